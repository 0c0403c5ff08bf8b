"""Lists the checkpoints of a run from their small files, without jax."""

import contextlib
import dataclasses
import pathlib
import re

from stppo_jax.records.checkpoints import manifest as manifest_lib

_UNITS = ('B', 'KiB', 'MiB', 'GiB', 'TiB')
_SET_ASIDE = re.compile(r'(\d+)\.corrupt\d*')


@dataclasses.dataclass(frozen=True)
class SavedStep:
  """A checkpoint of a run.

  Attributes:
    step: the number of steps that were done.
    path: the folder of the checkpoint.
    time: the time of the save, in seconds since 1970.
    size: the number of bytes of all files of the checkpoint.
    score: the score of the step, or None if the step was not evaluated.
    notes: texts for the user. They say that the checkpoint is the newest or the
      best, that it was set aside, or what is wrong with its manifest.
  """

  step: int
  path: pathlib.Path
  time: float
  size: int
  score: float | None
  notes: tuple[str, ...]


def find(workdir: pathlib.Path) -> list[SavedStep]:
  """Returns a run's checkpoints in order, including checkpoints set aside.

  Arrays are not read. The module `verification` checks whether arrays are
  intact.

  Raises:
    OSError: a folder cannot be read.
  """
  folder = workdir / 'checkpoints'
  names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
  # While Orbax is still writing a step, the name of its folder is no number.
  numbers = sorted(int(name) for name in names if name.isdecimal())
  known = [_read(folder / str(number), number) for number in numbers]
  known = [saved for saved in known if saved.path.exists()]
  best = manifest_lib.best({saved.step: saved.score for saved in known})
  found = []
  for saved in known:
    notes = ['newest'] if saved is known[-1] else []
    notes += ['best'] if saved.step == best else []
    found.append(dataclasses.replace(saved, notes=(*notes, *saved.notes)))
  for name in sorted(names):
    match = _SET_ASIDE.fullmatch(name)
    if match:
      saved = _read(folder / name, int(match[1]))
      found.append(dataclasses.replace(saved, notes=(f'set aside: {name}',)))
  return sorted(found, key=lambda saved: saved.step)


def describe_size(count: float) -> str:
  """Returns a number of bytes with a unit."""
  unit = 0
  while count >= 1024 and unit < len(_UNITS) - 1:
    count, unit = count / 1024, unit + 1
  return f'{count:.1f} {_UNITS[unit]}' if unit else f'{count} B'


def _read(path: pathlib.Path, step: int) -> SavedStep:
  """Describes a checkpoint from its manifest and the sizes of its files."""
  score, notes = None, ()
  try:
    score = manifest_lib.read(path, step)['host'].get('score')
  except manifest_lib.NewerSchema as error:
    notes = (str(error),)
  except ValueError as error:
    notes = (f'damaged: {manifest_lib.FILE}: {error}',)
  files = []
  # The run may remove the step at the same time.
  with contextlib.suppress(FileNotFoundError):
    files += [each.stat() for each in path.rglob('*') if each.is_file()]
  size = sum(each.st_size for each in files)
  # Orbax renames the folder once all files are written, so the newest file has
  # the time of the save.
  time = max((each.st_mtime for each in files), default=0.0)
  return SavedStep(step, path, time, size, score, notes)
