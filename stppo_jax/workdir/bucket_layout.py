"""The names of a run's files in a bucket, and which of them are of use.

    BUCKET/RUN/copied.json      {"folders": ["checkpoints/40", "start/policy"]}
              /run.json         the identity of the run, to which it belongs
              /...              the files of its folder

A checkpoint is many objects, and so is a policy or the value model of a start.
Such a folder is of use only if `copied.json` names it.
"""

from collections.abc import Iterable
from collections.abc import Set
import pathlib

from stppo_jax import buckets
from stppo_jax.workdir import run_folder

COMPLETE, IDENTITY = 'copied.json', 'run.json'
_CHECKPOINTS = 'checkpoints'
# Folders and files that only one machine needs.
_OWN = (run_folder.COMPILED, 'aside-', run_folder.PROBE, 'lock')
_UNFINISHED = ('.new', '.part', '.partial')
# Up to version 0.2 the policy of a start was in `start` itself.
_WHOLE = ('start/policy', 'start', 'start_value', 'policy')


def is_part(path: pathlib.PurePath) -> bool:
  """Returns whether a file or folder of a workdir is copied."""
  if path.parts[0].startswith(_OWN):
    return False
  if any(part.endswith(_UNFINISHED) for part in path.parts):
    return False
  # What is no number is a checkpoint that is being written, or was set aside.
  first, *rest = path.parts
  return first != _CHECKPOINTS or not rest or rest[0].isdecimal()


def is_wanted(name: str, complete: Set[str]) -> bool:
  """Returns whether an object is of use.

  Args:
    name: its name.
    complete: the folders that are complete.
  """
  if name == COMPLETE or not is_part(pathlib.PurePosixPath(name)):
    return False
  folder = whole_folder(name)
  return not folder or folder in complete


def whole_folder(name: str) -> str:
  """Returns the folder without whose other files a file is of no use, or ''."""
  parts = name.split('/')
  if len(parts) > 2 and parts[0] == _CHECKPOINTS and parts[1].isdecimal():
    return f'{_CHECKPOINTS}/{parts[1]}'
  return next((x for x in _WHOLE if name.startswith(f'{x}/')), '')


def step(folder: str) -> int | None:
  """Returns the step of a folder that is a checkpoint; None for others."""
  parent, _, name = folder.partition('/')
  return int(name) if parent == _CHECKPOINTS and name.isdecimal() else None


def newest(folders: Iterable[str]) -> int | None:
  """Returns the newest step of those folders that are checkpoints."""
  steps = [n for n in map(step, folders) if n is not None]
  return max(steps, default=None)


def complete_folders(bucket: buckets.Bucket) -> set[str]:
  """Returns the folders that are complete in a bucket.

  Raises:
    BucketError: the bucket cannot be read.
  """
  folders = run_folder.parse(bucket.read(COMPLETE)).get('folders')
  names = folders if isinstance(folders, list) else []
  return {n for n in names if isinstance(n, str) and whole_folder(f'{n}/x')}


def run_id(bucket: buckets.Bucket) -> str | None:
  """Returns the id of the run in a bucket; None if there is no run.

  Raises:
    BucketError: the bucket cannot be read.
  """
  return run_folder.parse(bucket.read(IDENTITY)).get('run_id')
