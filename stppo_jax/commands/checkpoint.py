"""List the checkpoints of a run, or verify them all; nothing is changed.

python -m stppo_jax checkpoint list DIR
python -m stppo_jax checkpoint verify DIR

  DIR            the folder of the run, which may still be in progress, or the
                 address of its copy in a bucket (writer.copy_to)
  --workdir=DIR  means the same

list prints a line for each checkpoint: its step, when it was saved, its size,
its score if it was evaluated, and whether it is the newest or the best. It
reads small files only.

verify reads all of them. It computes the fingerprint of every array again, and
compares the digest of the manifest and the id of the run. A line says that a
checkpoint is sound, or names the file or the array that is damaged. The exit
code is 3 if one is damaged, or if the run has saved some and all are gone.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import pathlib
import time

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax import streams
from stppo_jax.commands.flags import configuration
from stppo_jax.records.checkpoints import saved_steps
from stppo_jax.workdir import bucket_copy
from stppo_jax.workdir import run_folder

_ACTIONS = ('list', 'verify')
_COMMANDS = ('train', 'sft', 'prefer')
_TITLES = ('step', 'saved', 'size', 'score', '')


def main(argv: Sequence[str]) -> int:
  """Lists or verifies the checkpoints of a run; returns the exit code."""
  action, rest = argv[0] if argv else '', argv[1:]
  if action.startswith('-'):
    action, rest = '', argv
  if rest and not rest[0].startswith('-'):
    rest = [f'--workdir={rest[0]}', *rest[1:]]
  given = configuration.split(rest, ('workdir',))
  errors = list(given.errors)
  if action not in _ACTIONS:
    problem = f'{action}: unknown' if action else 'missing'
    errors.insert(0, problem + settings.closest(action, _ACTIONS))
  place = given.values.get('workdir', '')
  if not place and 'workdir' not in given.meant:
    errors.append('DIR: missing; give the folder of a run')
  if errors:
    raise configuration.ConfigurationError(errors)
  with bucket_copy.downloaded(place, arrays=action == 'verify') as workdir:
    return _act(action, workdir, place)


def _act(action: str, workdir: pathlib.Path, place: str) -> int:
  """Lists or verifies; returns the exit code.

  Args:
    action: one of `_ACTIONS`.
    workdir: the folder of the run.
    place: what the command line names: the folder, or the address of its copy.
  """
  errors = [f'--workdir={place}: {x}' for x in _problems(workdir)]
  if errors:
    raise configuration.ConfigurationError(errors)
  found = saved_steps.find(workdir)
  if action == 'list':
    print('\n'.join(table(found)) if found else f'{place}: no checkpoints')
    return 0
  return _verify(workdir, place, found)


def table(found: Sequence[saved_steps.SavedStep]) -> list[str]:
  """Returns the lines of a table of checkpoints."""
  return streams.aligned([_TITLES, *map(_row, found)])


def _problems(workdir: pathlib.Path) -> Iterator[str]:
  """Yields why a folder is not that of a run, if it is not."""
  if not workdir.is_dir():
    yield 'no such folder'
  elif run_folder.command_of(workdir) not in _COMMANDS:
    yield 'not the folder of a run'


def _row(saved: saved_steps.SavedStep) -> tuple[str, ...]:
  when = time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(saved.time))
  return (
    str(saved.step),
    when,
    saved_steps.describe_size(saved.size),
    '' if saved.score is None else f'{saved.score:.4f}',
    ', '.join(saved.notes),
  )


def _verify(
  workdir: pathlib.Path, place: str, found: Sequence[saved_steps.SavedStep]
) -> int:
  """Verifies the checkpoints of a run; returns the exit code."""
  # Imported late: a wrong flag is answered before jax is loaded.
  import jax

  # The devices may belong to the run, which may be going on.
  jax.config.update('jax_platforms', 'cpu')
  from stppo_jax.records.checkpoints import verification
  from stppo_jax.workdir import run_record

  run_record.check_checkpoints(workdir)
  run, exit_code = run_folder.read(workdir), 0
  checked = [saved for saved in found if saved.path.name.isdecimal()]
  for saved in checked:
    problems = verification.problems(saved.path, saved.step, run)
    if problems and not saved.path.exists():
      continue  # the run has removed it in the meantime
    for problem in problems:
      print(f'WRONG  step {saved.step}: {problem}', flush=True)
      exit_code = exits.DAMAGED
    if not problems:
      size = saved_steps.describe_size(saved.size)
      print(f'ok     step {saved.step}: {size}', flush=True)
  if not checked:
    print(f'{place}: no checkpoints')
  return exit_code
