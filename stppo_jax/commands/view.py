"""Show the dialogues of a run in the terminal.

python -m stppo_jax view DIR [--evaluation] [--step=N] [--number=N] [--tokens]
                        [FILTERS]

  DIR           the folder of a run of train, its --workdir, or the address of
                its copy, its writer.copy_to
  --evaluation  the dialogues of evaluations, not those that were trained on
  --step        the step; by default the last one that has dialogues
  --number      shows that dialogue of the step; without it, a list of them
  --tokens      shows ratio, advantage, value and entropy of each token too,
                where they are recorded (writer.token_details)
  --status      lists only dialogues that ended with this status
  --least       lists only dialogues whose reward is at least this
  --most        lists only dialogues whose reward is at most this
  --searches    lists only dialogues with this number of searches
  --text        lists only dialogues that contain the text

Control characters and invisible ones are shown as escapes. What cannot be read
is named in one line, and the exit code is then 2. `report` makes a page with
all dialogues.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import pathlib
import sys
from typing import Any

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.tools.report import dialogue_data
from stppo_jax.tools.report import run_files
from stppo_jax.tools.report import terminal
from stppo_jax.workdir import bucket_copy

_TYPES: dict[str, Callable[[str], Any]] = {
  '--evaluation': str,
  '--step': int,
  '--number': int,
  '--tokens': str,
  '--status': str,
  '--least': float,
  '--most': float,
  '--searches': int,
  '--text': str,
}
_ALLOWED = {int: 'a whole number', float: 'a number'}


def main(argv: Sequence[str]) -> int:
  """Prints dialogues; returns the exit code."""
  folders = [word for word in argv if not word.startswith('-')]
  flags, problems = _flags([word for word in argv if word.startswith('-')])
  if len(folders) != 1:
    problems.append('DIR: give the folder of one run')
  if problems:
    print('\n'.join(problems), file=sys.stderr)
    return exits.USAGE
  (folder,) = folders
  losses: list[str] = []
  try:
    with bucket_copy.downloaded(folder, dialogues=True) as path:
      run_files.check(str(path), folder)
      lines = _lines(str(path), flags, losses)
  except (run_files.Unreadable, buckets.BucketError) as error:
    print(error, file=sys.stderr)
    return exits.USAGE
  print('\n'.join(lines))
  for loss in losses:
    print(loss, file=sys.stderr)
  return 2 if losses else 0


def _lines(
  folder: str, flags: Mapping[str, Any], losses: list[str]
) -> list[str]:
  """Returns what the flags ask for.

  Raises:
    Unreadable: the step or the dialogue is not there.
  """
  files: dict[int, list[pathlib.Path]] = {}
  kind = run_files.EVALUATED if '--evaluation' in flags else run_files.SAMPLED
  for step, path in run_files.dialogue_files(folder, kind=kind):
    files.setdefault(step, []).append(path)
  if not files:
    raise run_files.Unreadable(
      f'{folder}: no dialogue is written (writer.{kind})'
    )
  step = flags.get('--step', max(files))
  if step not in files:
    raise run_files.Unreadable(
      f'--step={step}: must be one of the steps with dialogues, '
      f'{min(files)} to {max(files)}'
    )
  records = [
    record
    for path in files[step]
    for _, record in run_files.dialogues(path, losses)
  ]
  if '--number' in flags:
    number = flags['--number']
    if not 1 <= number <= len(records):
      raise run_files.Unreadable(
        f'--number={number}: must be from 1 to {len(records)}, the dialogues '
        f'of step {step}'
      )
    return [
      terminal.text(
        records[number - 1],
        colour=sys.stdout.isatty(),
        tokens='--tokens' in flags,
      )
    ]
  shown = {
    number: record
    for number, record in enumerate(records, start=1)
    if _passes(record, flags)
  }
  title = f'step {step}: {len(shown)} of {len(records)} dialogues'
  return [title, *terminal.table(shown)]


def _passes(record: Mapping[str, Any], flags: Mapping[str, Any]) -> bool:
  """Returns whether a dialogue passes the filters."""
  reward = dialogue_data.reward(record)
  _, searches, *_ = dialogue_data.measures(record)
  return (
    flags.get('--status', record['status']) == record['status']
    and flags.get('--least', reward) <= reward <= flags.get('--most', reward)
    and flags.get('--searches', searches) == searches
    and dialogue_data.contains(record, flags.get('--text', ''))
  )


def _flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
  """Returns the value of each flag, and what is wrong with them."""
  flags: dict[str, Any] = {}
  problems = []
  for word in words:
    name, _, value = word.partition('=')
    if name not in _TYPES:
      hint = settings.closest(name, list(_TYPES))
      problems.append(f'{word}: unknown flag{hint}')
      continue
    kind = _TYPES[name]
    try:
      flags[name] = kind(value)
    except ValueError:
      problems.append(f'{word}: must be {_ALLOWED[kind]}')
  return flags, problems
