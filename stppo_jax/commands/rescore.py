"""Score saved dialogues again, and show where two scorers differ.

python -m stppo_jax rescore --trajectories=FILE.jsonl
    --scope=response|search_r1 [--shown=N]

Reads the dialogues of a run (trajectories-*.jsonl) or of an evaluation
(dialogues.jsonl). Compares their saved exact match with the exact match that
the scorer gives. docs/evaluation.md describes the two scorers.

  --trajectories=FILE.jsonl  the dialogues
  --scope=SCOPE              where the answer is sought: response, in what the
                             policy wrote, or search_r1, in the prompt too
  --shown=N                  the most differences that are shown, 10 by default
"""

from collections.abc import Sequence
import pathlib

from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.envs import rewards
from stppo_jax.tools import rescoring


def main(argv: Sequence[str]) -> int:
  """Compares saved and new scores of dialogues; returns the exit code."""
  flags = command_line.flags(
    trajectories='',
    scope=command_line.one_of(list(rewards.SCOPES)),
    shown=command_line.integer(10, lower_bound=0),
  )
  required = 'trajectories', 'scope'
  given = command_line.parse(flags, argv, required=required)
  command_line.refuse(given.errors)
  path = pathlib.Path(flags.trajectories)
  with exits.as_misconfigured(str(path)):
    rescored = list(rescoring.rescore(path, flags.scope))
  if not rescored:
    raise exits.Misconfigured(f'{path}: no dialogues')
  rescoring.show(rescored, flags.scope, most=flags.shown)
  return 0
