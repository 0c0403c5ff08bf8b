"""Copies the folder of a run to a bucket, and back on another machine.

The run itself works on a folder of its machine. A thread copies what is new to
`writer.copy_to`, every few seconds; it holds up nothing, and its errors stop
nothing. A reader of an object sees the old content or the new one. A checkpoint
is many objects, and so is a policy or the value model of a start. Therefore
`copied.json` names such folders that are complete: it is written after all
files of a new one are there, and before any file of an old one is removed.

An address belongs to one run, by the id in `run.json`. A checkpoint is removed
from the bucket only after the run has removed it here, and only if a newer one
is complete there.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.workdir import bucket_layout
from stppo_jax.workdir import run_folder

_log = logging.getLogger(__name__)
_HEARTBEAT = 'heartbeat.json'
_EVERY = 15.0  # seconds between two rounds of copying
_TO_END = 2.0  # seconds that a process needs after the last round
_LONGEST = 600.0  # seconds that a run waits at its end for the last round
_AFTER_ERROR = 10.0  # the same if an error ends it: other hosts wait for it
_DIALOGUES = ('trajectories-', 'evaluation-')
_FETCHED = 'aside-fetched'  # a name that no check of the folder minds

_Files = dict[str, tuple[int, int]]  # size and time by name


class OtherRun(ValueError):
  """An address holds something else than the run of the folder; one line."""

  exit_code = exits.USAGE


def check_restart(address: str, is_restart: bool) -> None:
  """Checks that a run that begins anew takes the place of no other.

  Args:
    address: the address of the new run; '' = there is none.
    is_restart: whether a run begins anew; if not, nothing is checked.

  Raises:
    OtherRun: the address holds a run.
    BucketError: the bucket cannot be read.
  """
  if is_restart and address and bucket_layout.run_id(buckets.Bucket(address)):
    raise OtherRun(
      f'writer.copy_to={address}: holds a run already; a run that --restart '
      'begins needs another address'
    )


def fetch(address: str, workdir: pathlib.Path) -> None:
  """Brings a run from a bucket into its folder, if the bucket is ahead.

  Args:
    address: the address of the run; '' = there is none.
    workdir: the folder, which is locked; it may be empty.

  Raises:
    OtherRun: the address holds another run, or other files.
    BucketError: the bucket cannot be read.
  """
  if not address:
    return
  bucket = buckets.Bucket(address)
  # What a start that was killed here has left.
  shutil.rmtree(workdir / _FETCHED, ignore_errors=True)
  names, theirs = bucket.sizes(), bucket_layout.run_id(bucket)
  if not names:
    return
  if theirs is None:
    raise OtherRun(
      f'writer.copy_to={address}: holds files that are no run, such as '
      f'{min(names)}; name another address'
    )
  complete = bucket_layout.complete_folders(bucket)
  newest, ours = bucket_layout.newest(complete), run_folder.read(workdir)
  if newest is None:
    # Without a checkpoint, that run would have to begin anew.
    if ours is None or ours.run_id != theirs:
      _log.info(
        f'{address}: holds a run without a checkpoint; this one replaces it'
      )
    return
  if ours is not None and ours.run_id != theirs:
    raise OtherRun(
      f'writer.copy_to={address}: holds a different run from {workdir}; to go '
      'on with the one in the folder, name another address; to go on with the '
      'one in the bucket, give an empty --workdir'
    )
  if ours is not None and newest <= run_folder.newest_step(workdir):
    return
  for name in names:
    if bucket_layout.is_wanted(name, complete):
      bucket.download(name, workdir / _FETCHED / name)
  aside = run_folder.move_all_aside(workdir)
  # A folder with a config is known as a run's, and one without an identity is
  # fetched again. So a start may be killed between any two of these moves.
  rank = {'config.json': 0, bucket_layout.IDENTITY: 2}
  brought = os.listdir(workdir / _FETCHED)
  for name in sorted(brought, key=lambda name: rank.get(name, 1)):
    (workdir / _FETCHED / name).rename(workdir / name)
  (workdir / _FETCHED).rmdir()
  before = '' if aside is None else f'; what the folder held is in {aside}'
  _log.info(f'{workdir}: brought here from {address}, step {newest}{before}')


@contextlib.contextmanager
def copying(
  address: str,
  workdir: pathlib.Path,
  seconds_left: Callable[[], float] = lambda: _LONGEST,
) -> Iterator[None]:
  """Copies a run to a bucket during the body, and once more after it.

  Args:
    address: the address of the run; '' = nothing is copied.
    workdir: its folder, with an identity.
    seconds_left: returns the seconds until the process is killed.
  """
  if not address:
    yield
    return
  copy = _Copy(buckets.Bucket(address), workdir)
  stopped = threading.Event()
  problem = ''  # of the last round

  def copy_round() -> None:
    nonlocal problem
    line = ''
    # Packages for buckets raise errors of many kinds.
    try:
      copy.round()
    except Exception as error:
      line = str(error) or type(error).__name__
      if line != problem:
        _log.info(
          f'writer.copy_to: cannot copy to {line}; the run goes on, and tries '
          f'again every {_EVERY:.0f} s'
        )
    else:
      if problem:
        _log.info('writer.copy_to: copied again')
    problem = line

  def copy_rounds() -> None:
    while not stopped.wait(_EVERY):
      copy_round()
    if not copy.abandoned.is_set():
      copy_round()

  thread = threading.Thread(target=copy_rounds, name='bucket', daemon=True)
  thread.start()
  try:
    yield
  finally:
    stopped.set()
    longest = _LONGEST if sys.exc_info()[0] is None else _AFTER_ERROR
    since, is_told = time.monotonic(), False
    while thread.is_alive():
      waited = time.monotonic() - since
      # A signal may come while this waits.
      left = min(longest - waited, seconds_left() - _TO_END)
      if left <= 0:
        break
      if waited > 5 and not is_told:
        _log.info(f'copying the last files to {address}')
        is_told = True
      thread.join(min(left, 0.5))
    copy.abandoned.set()
    if problem or thread.is_alive():
      _log.info(
        f'some files of {workdir} are not in {address} '
        f'({problem or "no time is left"}); run the same command on this '
        'machine again to copy them'
      )


@contextlib.contextmanager
def downloaded(
  place: str, *, dialogues: bool = False, arrays: bool = False
) -> Iterator[pathlib.Path]:
  """Yields the folder of a run, downloaded from its bucket if it is in one.

  The downloaded files are deleted when the body ends.

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
  bucket = buckets.Bucket(place)
  sizes = bucket.sizes()
  if not sizes:
    raise buckets.BucketError(
      f'{place}: nothing is stored at this address; check its spelling, or '
      'whether the run has copied something yet',
      2,
    )
  with tempfile.TemporaryDirectory(prefix='stppo_jax-run-') as temporary:
    folder = pathlib.Path(temporary) / place.rstrip('/').rpartition('/')[2]
    folder.mkdir()
    complete = bucket_layout.complete_folders(bucket)
    for name, size in sizes.items():
      path = folder / name
      if not bucket_layout.is_wanted(name, complete):
        continue
      if bucket_layout.step(bucket_layout.whole_folder(name)) is not None:
        if arrays or name.endswith(f'/{run_folder.MANIFEST}'):
          bucket.download(name, path)
        else:
          path.parent.mkdir(parents=True, exist_ok=True)
          path.touch()
          os.truncate(path, size)
        saved = bucket.modified(name)
        os.utime(path, (saved, saved))
      elif '/' not in name and name.endswith(('.json', '.jsonl')):
        if dialogues or not name.startswith(_DIALOGUES):
          bucket.download(name, path)
    yield folder


class _Copy:
  """Knows which files of a run are in a bucket, and copies the others.

  Attributes:
    abandoned: set if nobody waits for the rest of a round.
  """

  def __init__(self, bucket: buckets.Bucket, workdir: pathlib.Path):
    self.abandoned = threading.Event()
    self._bucket = bucket
    self._workdir = workdir
    run = run_folder.read(workdir)
    self._run_id = run.run_id if run is not None else None
    self._is_ours = False  # whether the bucket has the identity of this run
    self._copied: _Files = {}
    self._complete: set[str] = set()
    self._seen = 0.0  # when the heartbeat was copied last

  def round(self) -> None:
    """Copies what is new, and removes what the run has removed.

    Raises:
      OSError, OtherRun: something could not be copied; the rest was.
    """
    files = self._files()
    self._own(files)
    errors = []
    # Folders that must be complete come last: the metrics of a step are there
    # before its state.
    for name in sorted(
      files, key=lambda name: (bucket_layout.whole_folder(name), name)
    ):
      if self.abandoned.is_set():
        return
      if name in files and self._needs_copy(name, files):
        try:
          self._upload(name, files)
        except buckets.BucketError as error:
          errors.append(error)
    self._record(files)
    self._remove(files)
    if errors:
      raise errors[0]

  def _own(self, files: _Files) -> None:
    """Makes sure that the address belongs to this run."""
    theirs = bucket_layout.run_id(self._bucket)
    if self._is_ours:
      if theirs != self._run_id:
        raise OtherRun(f'{self._bucket.address}: another run copies there now')
      return
    there = self._bucket.sizes()
    complete = bucket_layout.complete_folders(self._bucket)
    if theirs != self._run_id and bucket_layout.newest(complete) is not None:
      raise OtherRun(f'{self._bucket.address}: holds another run')
    if theirs == self._run_id:
      self._complete = complete
    self._copied = {name: (-1, -1) for name in there}
    # Folders that are complete do not change any more.
    self._copied |= {
      name: files[name]
      for name, size in there.items()
      if bucket_layout.whole_folder(name) in self._complete
      and files.get(name, (-1,))[0] == size
    }
    self._upload(bucket_layout.IDENTITY, files)
    self._is_ours = True

  def _needs_copy(self, name: str, files: _Files) -> bool:
    if self._copied.get(name) == files[name]:
      return False
    folder = bucket_layout.whole_folder(name)
    is_there = (
      bucket_layout.step(folder) is not None and folder in self._complete
    )
    # A checkpoint that was damaged here must not replace the sound one, but one
    # that was set aside and made again does.
    return not is_there or self._is_set_aside(folder)

  def _upload(self, name: str, files: _Files) -> None:
    """Copies a file, if it is still there, and the heartbeat now and then."""
    now = time.monotonic()
    if name != _HEARTBEAT and now - self._seen > _EVERY:
      self._seen = now
      if _HEARTBEAT in files:
        self._upload(_HEARTBEAT, files)
    path = self._workdir / name
    try:
      self._bucket.upload(path, name)
    except buckets.BucketError:
      if path.exists():
        raise
      files.pop(name)  # it was removed meanwhile
    else:
      self._copied[name] = files[name]

  def _record(self, files: _Files) -> None:
    """Writes which folders are complete."""
    now = self._files()
    folders = {name: bucket_layout.whole_folder(name) for name in files}
    changed = {
      folder
      for name, folder in folders.items()
      if not self._copied.get(name) == files[name] == now.get(name)
    }
    complete = set(folders.values()) - {''} - (changed - self._complete)
    # What the run has removed stays until a newer checkpoint is complete.
    newest = bucket_layout.newest(complete) or 0
    for folder in self._complete - complete:
      step = bucket_layout.step(folder)
      if step is None or step >= newest or self._is_set_aside(folder):
        complete.add(folder)
    record = {'folders': sorted(complete)}
    self._bucket.write(bucket_layout.COMPLETE, json.dumps(record).encode())
    self._complete = complete

  def _remove(self, files: _Files) -> None:
    """Removes what the run has removed."""
    for name in sorted(self._copied.keys() - files.keys()):
      folder = bucket_layout.whole_folder(name)
      if bucket_layout.step(folder) is not None:
        is_removed = folder not in self._complete
      else:
        is_removed = name.startswith(_DIALOGUES)
      if is_removed:
        self._bucket.remove(name)
        del self._copied[name]

  def _is_set_aside(self, folder: str) -> bool:
    """Returns whether a checkpoint of this step was found to be damaged."""
    path = self._workdir / folder
    return any(path.parent.glob(f'{path.name}.corrupt*'))

  def _files(self) -> _Files:
    """Returns size and time of each file of the run, by name."""
    found = {}
    for parent, folders, names in os.walk(self._workdir):
      below = pathlib.Path(parent).relative_to(self._workdir)
      folders[:] = [
        name for name in folders if bucket_layout.is_part(below / name)
      ]
      if str(below) == 'start' and bucket_layout.IDENTITY in names:
        # A supervised start that is not finished begins anew elsewhere.
        folders[:], names = [x for x in folders if x == 'policy'], []
      for name in names:
        path = pathlib.Path(parent, name)
        if bucket_layout.is_part(below / name):
          with contextlib.suppress(OSError):  # it was removed meanwhile
            status = path.stat()
            found[str(below / name)] = (status.st_size, status.st_mtime_ns)
    return found
