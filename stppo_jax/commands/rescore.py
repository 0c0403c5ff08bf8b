"""Score saved dialogues again, and show where two scorers differ.

python -m stppo_jax rescore --trajectories=FILE.jsonl
    --scope=response|search_r1 [--shown=N]

reads the dialogues of a run (trajectories-*.jsonl) or of an evaluation
(dialogues.jsonl) and compares their saved exact match with that of the scorer.
docs/evaluation.md describes the two scorers.

  --trajectories=FILE.jsonl  the dialogues
  --scope=SCOPE              where the answer is sought: response, in what the
                             policy wrote, or search_r1, in the prompt too
  --shown=N                  the most differences that are shown, 10 by default
"""

from collections.abc import Sequence
import pathlib

from stppo_jax import settings
from stppo_jax import streams
from stppo_jax.commands.flags import configuration
from stppo_jax.envs import rewards
from stppo_jax.tools import rescoring

_FLAGS = ('trajectories', 'scope', 'shown')


def main(argv: Sequence[str]) -> int:
  """Prints the two mean scores and the dialogues in which they differ."""
  given = configuration.split(argv, _FLAGS)
  flags, errors = given.values, list(given.errors)
  for name in ('trajectories', 'scope'):
    if not flags.get(name) and name not in given.meant:
      errors.append(f'--{name}: missing')
  scope, shown = flags.get('scope', ''), flags.get('shown', '10')
  if scope and scope not in rewards.SCOPES:
    choices = settings.closest(scope, list(rewards.SCOPES))
    errors.append(f'--scope={scope}: unknown scorer{choices}')
  if not shown.isdecimal():
    errors.append(f'--shown={shown}: must be an integer, 0 or greater')
  if errors:
    raise configuration.ConfigurationError(errors)
  path = pathlib.Path(flags['trajectories'])
  try:
    rescored = list(rescoring.rescore(path, scope))
  except OSError as error:
    line = f'--trajectories={path}: {error.strerror}'
    raise configuration.ConfigurationError([line]) from error
  except ValueError as error:
    raise configuration.ConfigurationError([str(error)]) from error
  if not rescored:
    raise configuration.ConfigurationError([f'{path}: no dialogues'])
  _print(rescored, scope, int(shown))
  return 0


def _print(
  rescored: Sequence[rescoring.Rescored], scope: str, shown: int
) -> None:
  count = len(rescored)
  differing = [entry for entry in rescored if entry.score != entry.saved]
  gained = sum(entry.score > entry.saved for entry in differing)
  print(f'{count:,} dialogues')
  print(f'saved      em {sum(e.saved for e in rescored) / count:.4f}')
  print(f'{scope:10} em {sum(e.score for e in rescored) / count:.4f}')
  print(
    f'{len(differing):,} differ: {gained:,} are right only to {scope}, '
    f'{len(differing) - gained:,} only as saved'
  )
  for entry in differing[:shown]:
    golden = ' | '.join(entry.record['golden_answers'])
    answer = 'none' if entry.answer is None else repr(entry.answer)
    line = (
      f'{entry.where}: {entry.record["id"]}: saved {entry.saved:g}, {scope} '
      f'{entry.score:g}; it finds the answer {answer}; golden: {golden}'
    )
    print(streams.escape(line))
