"""The folder of a run in a bucket, and what a host has of it on its disk.

A run works on a folder of its machine, which begins with what the bucket has.
A thread uploads what is new every few seconds, and waits while the bucket is
out of reach. A checkpoint is committed after everything that was written before
it was uploaded, and only by the holder of the lease.
"""

from collections.abc import Callable, Iterator
import contextlib
import logging
import math
import os
import pathlib
import re
import threading
import time
import zlib

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.workdir import bucket_files
from stppo_jax.workdir import lease
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder

_EVERY = 5.0  # seconds between two rounds
_PAUSE = 1.0  # seconds between two tries of what must succeed
_TO_END = 2.0  # seconds that a process needs after the last round
_AFTER_ERROR = 10.0  # seconds for the last round if an error ends the run
# The files of earlier starts that a start needs, beside checkpoints.
_NEEDED = re.compile(r'[^/]+\.jsonl?|start/(policy/)?[^/]+|compiled/.+')
# Files of a folder that are of use on this machine alone.
_OWN = (run_folder.ADDRESS, lock.NAME, run_folder.PROBE)
_UNFINISHED = ('.new', '.part', '.partial')
_log = logging.getLogger(__name__)


class OtherFiles(ValueError):
  """An address holds files that belong to no run; one line."""

  exit_code = exits.USAGE


class BucketFolder:
  """A folder in a bucket, and the folder of this machine that stands for it.

  Args:
    address: such as gs://bucket/run.
    folder: the folder of this machine, which is empty.
    retry: seconds for which the bucket may be out of reach where the run
      cannot go on without it.

  Attributes:
    address: the address.
    bucket: the objects below it.
  """

  def __init__(self, address: str, folder: pathlib.Path, *, retry: float):
    self.address, self.bucket = address, buckets.Bucket(address)
    self._folder, self._retry = folder, retry
    (folder / run_folder.ADDRESS).write_text(address)
    # Size and time, on this machine, of each file that the bucket has.
    self._known: dict[str, tuple[int, int]] = {}
    self._grown: dict[str, bucket_files.Grown] = {}
    self._pushing = threading.Lock()

  def pull(self) -> None:
    """Downloads what a start needs.

    Dialogues are downloaded if they were written after an older checkpoint.
    Other dialogues have empty files.

    Raises:
      OtherFiles: the address holds files that belong to no run.
      BucketError: the bucket cannot be read.
    """
    entries = self.bucket.entries()
    others = [
      name
      for name in entries
      if name != lease.NAME and not name.startswith(run_folder.COMPILED)
    ]
    if others and run_folder.IDENTITY not in entries:
      raise OtherFiles(
        f'{self.address}: holds files that belong to no run, such as '
        f'{min(others)}; name another address'
      )
    # If the newest checkpoint is damaged, the run goes on from an older one and
    # moves later dialogues aside. So those are needed, not only their names.
    steps = sorted(bucket_files.committed(entries))
    oldest = steps[-2] if len(steps) > 1 else 0

    def is_needed(name: str) -> bool:
      match = bucket_files.DIALOGUES.fullmatch(name)
      late = match is None or int(match[1]) > oldest
      return late and _NEEDED.fullmatch(name) is not None

    with self._pushing:
      self._grown = bucket_files.download(
        self.bucket, self._folder, entries, is_needed
      )
      for name in entries:
        if bucket_files.DIALOGUES.fullmatch(name):
          # An empty file of that name, from which the writer knows what to
          # remove or to move aside.
          (self._folder / name).touch()
        elif name.startswith(run_folder.ASIDE):
          (self._folder / name.partition('/')[0]).mkdir(exist_ok=True)
      # Taken after the download, so that nothing which came from the bucket
      # counts as new here and is uploaded again.
      self._known = self._files()

  def push(self) -> None:
    """Uploads what is new here, and removes there what was removed here.

    Raises:
      BucketError: the bucket cannot be written.
    """
    with self._pushing:
      files = self._files()
      new = {n for n, x in files.items() if self._known.get(n) != x}
      grown = set(filter(bucket_files.GROWS.fullmatch, new))
      # A folder without its config is not taken for a model. With the config
      # written last, a model is complete or not there.
      last = {name for name in new if name.endswith('/config.json')}
      self.bucket.upload(new - grown - last, self._folder)
      self.bucket.upload(last, self._folder)
      for name in grown:
        self._append(name)
      self._known |= {name: files[name] for name in new}
      for name in self._known.keys() - files.keys():
        self.bucket.remove(name)
        del self._known[name]

  def with_retries(
    self, call: Callable[[], object], seconds: float = math.inf
  ) -> None:
    """Calls a function again until it meets no error of the bucket.

    Args:
      call: the function.
      seconds: the most that it may be tried, if that is less than `retry`.

    Raises:
      BucketError: the bucket was out of reach for so long.
    """
    seconds = min(seconds, self._retry)
    deadline, is_told = time.monotonic() + seconds, False
    while True:
      try:
        call()
        return
      except buckets.BucketError as error:
        if time.monotonic() > deadline:
          raise
        if not is_told:
          _log.info(f'{error}; trying again for up to {seconds:.0f} s')
          is_told = True
        time.sleep(_PAUSE)

  def wait(self) -> None:
    """Waits until the bucket is in reach; raises as `with_retries` does."""
    self.with_retries(lambda: self.bucket.written(lease.NAME))

  @contextlib.contextmanager
  def pushed(
    self, seconds_left: Callable[[], float] = lambda: math.inf
  ) -> Iterator[None]:
    """Uploads what is new every few seconds during the body, and after it.

    Args:
      seconds_left: returns the seconds until the process is killed.

    Raises:
      BucketError: after a body without an error, the rest is not uploaded.
    """
    ended, problem = threading.Event(), ''

    def push_often() -> None:
      nonlocal problem
      while not ended.wait(_EVERY):
        try:
          self.push()
        except OSError as error:
          if not problem:
            _log.info(
              f'{error}; the run goes on, and its files wait on this machine'
            )
          problem = str(error)
        else:
          if problem:
            _log.info(f'{self.address}: in reach again')
          problem = ''

    thread = threading.Thread(target=push_often, name='bucket', daemon=True)
    thread.start()
    try:
      yield
    except BaseException:
      ended.set()
      self.finish(seconds_left())
      raise
    ended.set()
    self.with_retries(self.push, seconds_left() - _TO_END)

  def finish(self, seconds: float) -> None:
    """Uploads what is new, unless that takes too long.

    Args:
      seconds: until the process is killed.
    """
    thread = threading.Thread(target=self._try_push, daemon=True)
    thread.start()
    thread.join(max(min(_AFTER_ERROR, seconds - _TO_END), 0))

  def _try_push(self) -> None:
    with contextlib.suppress(OSError):
      self.push()

  def _append(self, name: str) -> None:
    """Writes what is new in a file that lines are appended to."""
    data = (self._folder / name).read_bytes()
    there = self._grown.get(name, bucket_files.Grown())
    number, start, old = there.number, there.size, ()
    # The file was rewritten, not appended to, so all of it is uploaded again,
    # as parts with the next number.
    if len(data) < start or zlib.crc32(data[:start]) != there.checksum:
      number, start, old = number + 1, 0, there.parts
    part = f'{name}/{number:06d}-{start:012d}'
    if len(data) > start or old:
      self.bucket.write(part, data[start:])
    parts = part, *there.parts
    # Old parts are removed only when the new part is there: a kill in between
    # leaves parts of both numbers, of which the greater counts.
    for part in old:
      self.bucket.remove(part)
    self._grown[name] = bucket_files.Grown(
      number,
      len(data),
      zlib.crc32(data),
      tuple(x for x in dict.fromkeys(parts) if x not in old),
    )

  def _files(self) -> dict[str, tuple[int, int]]:
    """Returns size and time of each file here that belongs in the bucket."""
    found = {}
    for parent, folders, names in os.walk(self._folder):
      below = pathlib.Path(parent).relative_to(self._folder)
      folders[:] = [
        name
        for name in folders
        if name != 'checkpoints' and not name.endswith(_UNFINISHED)
      ]
      for name in names:
        if name.startswith(_OWN) or name.endswith(_UNFINISHED):
          continue
        with contextlib.suppress(OSError):  # it was removed meanwhile
          status = os.stat(os.path.join(parent, name))
          found[str(below / name)] = status.st_size, status.st_mtime_ns
    return found
