"""Copies the folder of a run to a bucket, and back on another machine.

The run itself works on a folder of its machine. A thread copies what is new to
`writer.copy_to`, every few seconds; it holds up nothing, and its errors stop
nothing. An object replaces its predecessor at once. A checkpoint is many
objects, so `copied.json` names those that are complete; it is written after
their last object, and before the first object of a removed one is removed.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import threading
import time

from stppo_jax import buckets
from stppo_jax.records import run_folder
from stppo_jax.records.checkpoints import manifest

_COMPLETE = 'copied.json'
_EVERY = 15.0  # seconds between two rounds of copying
_TO_END = 2.0  # seconds that a process needs after the last round
_LONGEST = 600.0  # seconds that a run waits at its end for the last round
_CHECKPOINTS = 'checkpoints/'
# Folders and files that only this machine needs.
_OWN = (run_folder.COMPILED, 'aside-', run_folder.PROBE, 'lock')
_UNFINISHED = ('.new', '.part', '.partial')
_FETCHED = 'aside-fetched'  # a name that no check of the folder minds


class OtherRun(ValueError):
  """The bucket has another run than the folder; one line."""

  exit_code = 2


def fetch(
  address: str, workdir: pathlib.Path, show: Callable[[str], None]
) -> None:
  """Brings a run from a bucket into its folder, if the bucket is ahead.

  Args:
    address: the address of the run; '' = there is none.
    workdir: the folder, which is locked; it may be empty.
    show: prints what was done.

  Raises:
    OtherRun: folder and bucket belong to different runs.
    BucketError: the bucket cannot be read.
  """
  if not address:
    return
  bucket = buckets.Bucket(address)
  # What a start that was killed here has left.
  shutil.rmtree(workdir / _FETCHED, ignore_errors=True)
  theirs = _json(bucket.read('run.json')).get('run_id')
  if theirs is None:
    return
  complete = _complete(bucket)
  ours, here = run_folder.read(workdir), _steps(workdir)
  if ours is not None:
    if ours.run_id != theirs:
      raise OtherRun(
        f'writer.copy_to={address}: holds another run than {workdir}; name '
        'another address, or begin in a new --workdir to go on with that run'
      )
    if max(complete, default=0) <= max(here, default=0):
      return
  for name in bucket.sizes():
    if _is_wanted(name, complete):
      bucket.download(name, workdir / _FETCHED / name)
  aside = run_folder.move_all_aside(workdir)
  # A folder with a config is known as a run's, and one without an identity is
  # fetched again. So a start may be killed between any two of these moves.
  rank = {'config.json': 0, 'run.json': 2}
  names = os.listdir(workdir / _FETCHED)
  for name in sorted(names, key=lambda name: rank.get(name, 1)):
    (workdir / _FETCHED / name).rename(workdir / name)
  (workdir / _FETCHED).rmdir()
  newest = f'step {max(complete)}' if complete else 'no checkpoint'
  before = '' if aside is None else f'; what the folder held is in {aside}'
  show(f'{workdir}: brought here from {address}, {newest}{before}')


@contextlib.contextmanager
def copying(
  address: str,
  workdir: pathlib.Path,
  show: Callable[[str], None],
  seconds_left: Callable[[], float] = lambda: _LONGEST,
) -> Iterator[None]:
  """Copies a run to a bucket during the body, and once more after it.

  Args:
    address: the address of the run; '' = nothing is copied.
    workdir: its folder.
    show: prints the first error, and what is left at the end.
    seconds_left: returns the seconds until the process is killed.
  """
  if not address:
    yield
    return
  copy = _Copy(buckets.Bucket(address), workdir)
  stopped = threading.Event()
  told: list[str] = []

  def copy_round() -> None:
    try:
      copy.round()
    except OSError as error:
      if not told:
        show(f'not copied, will be tried again: {error}')
      told[:] = [str(error)]
    else:
      told.clear()

  def copy_rounds() -> None:
    while not stopped.wait(_EVERY):
      copy_round()
    copy_round()

  thread = threading.Thread(target=copy_rounds, name='bucket', daemon=True)
  thread.start()
  try:
    yield
  finally:
    stopped.set()
    # In two parts, so that whoever waits long learns why.
    limit = time.monotonic() + min(seconds_left() - _TO_END, _LONGEST)
    thread.join(min(5.0, max(limit - time.monotonic(), 0.0)))
    if thread.is_alive():
      show(f'copying the last files to {address}')
      thread.join(max(limit - time.monotonic(), 0.0))
    if thread.is_alive() or told:
      reason = told[0] if told else 'no time is left'
      show(
        f'{workdir} was not copied completely to {address}: {reason}; the same '
        'command copies the rest'
      )


@contextlib.contextmanager
def downloaded(
  place: str, *, dialogues: bool = False, arrays: bool = False
) -> Iterator[pathlib.Path]:
  """Yields the folder of a run, downloaded from its bucket if it is in one.

  What is downloaded is gone after the body.

  Args:
    place: the folder, or the address of its copy.
    dialogues: whether to download the dialogues too.
    arrays: whether to download the arrays of checkpoints; if not, their files
      have the right size and no content.

  Raises:
    BucketError: the bucket cannot be read, or holds nothing there.
  """
  if not buckets.is_address(place):
    yield pathlib.Path(place)
    return
  address = place
  bucket = buckets.Bucket(address)
  sizes = bucket.sizes()
  if not sizes:
    raise buckets.BucketError(f'{address}: there is nothing in the bucket', 2)
  with tempfile.TemporaryDirectory(prefix='stppo_jax-run-') as temporary:
    folder = pathlib.Path(temporary) / address.rstrip('/').rpartition('/')[2]
    folder.mkdir()
    complete = _complete(bucket)
    for name, size in sizes.items():
      path = folder / name
      is_shown = name.endswith(('.json', '.jsonl')) and '/' not in name
      if name.startswith(('trajectories-', 'evaluation-')):
        is_shown = dialogues
      if not _is_wanted(name, complete):
        continue
      if _step(name) is None and is_shown:
        bucket.download(name, path)
      elif _step(name) is not None:
        if arrays or name.endswith(f'/{manifest.FILE}'):
          bucket.download(name, path)
        else:
          path.parent.mkdir(parents=True, exist_ok=True)
          path.touch()
          os.truncate(path, size)
        saved = bucket.modified(name)
        os.utime(path, (saved, saved))
    yield folder


class _Copy:
  """Knows which files of a run are in a bucket, and copies the others."""

  def __init__(self, bucket: buckets.Bucket, workdir: pathlib.Path):
    self._bucket = bucket
    self._workdir = workdir
    # The size and the time of the files that are there; None: not known yet.
    self._copied: dict[str, tuple[int, int]] | None = None

  def round(self) -> None:
    """Copies what is new, and removes what the run has removed.

    Raises:
      OSError: something could not be copied; the rest is left for later.
    """
    files = self._files()
    if self._copied is None:
      # Checkpoints never change, so those of an earlier start count as copied.
      complete = _complete(self._bucket)
      there = self._bucket.sizes()
      self._copied = {name: (-1, -1) for name in there}
      self._copied |= {
        name: files[name]
        for name, size in there.items()
        if _step(name) in complete and files.get(name, (0, 0))[0] == size
      }
    # Checkpoints come last: the metrics of a step are there before its state.
    for name in sorted(files, key=lambda name: (_step(name) or 0, name)):
      if self._copied.get(name) == files[name]:
        continue
      path = self._workdir / name
      try:
        self._bucket.upload(path, name)
      except buckets.BucketError:
        if path.exists():
          raise
        continue  # it was removed meanwhile
      self._copied[name] = files[name]
    steps = {_step(name) for name in files} - {None}
    record = json.dumps({'checkpoints': sorted(map(int, steps))})
    self._bucket.write(_COMPLETE, record.encode())
    for name in sorted(self._copied.keys() - files.keys() - {_COMPLETE}):
      if _is_removed(name):
        self._bucket.remove(name)
      del self._copied[name]

  def _files(self) -> dict[str, tuple[int, int]]:
    """Returns size and time of each file of the run, by name."""
    found = {}
    for parent, folders, names in os.walk(self._workdir):
      below = pathlib.Path(parent).relative_to(self._workdir)
      folders[:] = [name for name in folders if _is_part(below / name)]
      for name in names:
        path = pathlib.Path(parent, name)
        if _is_part(below / name):
          with contextlib.suppress(OSError):  # it was removed meanwhile
            status = path.stat()
            found[str(below / name)] = (status.st_size, status.st_mtime_ns)
    return found


def _is_part(path: pathlib.PurePath) -> bool:
  """Returns whether a file or folder of a workdir is copied."""
  if path.parts[0].startswith(_OWN) or path.name.endswith(_UNFINISHED):
    return False
  # What is no number is a checkpoint that is being written, or was set aside.
  in_checkpoints = len(path.parts) > 1 and path.parts[0] == 'checkpoints'
  return not in_checkpoints or path.parts[1].isdecimal()


def _is_wanted(name: str, complete: set[int]) -> bool:
  """Returns whether an object belongs to the folder of a run."""
  path = pathlib.PurePosixPath(name)
  # The names come from elsewhere, and must stay inside of the folder.
  if name == _COMPLETE or path.is_absolute() or '..' in path.parts:
    return False
  if not name.startswith(_CHECKPOINTS):
    return True
  return _step(name) in complete


def _is_removed(name: str) -> bool:
  """Returns whether an object goes when its file does."""
  return name.startswith((_CHECKPOINTS, 'trajectories-', 'evaluation-'))


def _step(name: str) -> int | None:
  """Returns the step of the checkpoint that a file belongs to, if any."""
  parts = name.split('/')
  if len(parts) > 2 and parts[0] == 'checkpoints' and parts[1].isdecimal():
    return int(parts[1])
  return None


def _steps(workdir: pathlib.Path) -> set[int]:
  folder = workdir / 'checkpoints'
  names = os.listdir(folder) if folder.is_dir() else []
  return {int(name) for name in names if name.isdecimal()}


def _complete(bucket: buckets.Bucket) -> set[int]:
  """Returns the steps whose checkpoints are complete in a bucket."""
  steps = _json(bucket.read(_COMPLETE)).get('checkpoints')
  return {n for n in steps if type(n) is int} if type(steps) is list else set()


def _json(data: bytes) -> dict:
  try:
    content = json.loads(data)
  except (ValueError, RecursionError):
    return {}
  return content if isinstance(content, dict) else {}
