"""The folder of a run in a bucket, and its copy on the disk of a host.

A run works on a folder of its machine, into which the files of the bucket are
downloaded at the start. A thread uploads new files every few seconds; while the
bucket is out of reach, the files wait. A checkpoint is committed only by the
holder of the lease, and only after the upload of all files that were written
before the checkpoint.
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

_EVERY = 5.0  # seconds between two uploads by the thread
_PAUSE = 1.0  # seconds between two tries in `with_retries`
_TO_END = 2.0  # seconds that a process needs to end after the last upload
_AFTER_ERROR = 10.0  # seconds for the last upload if an error ends the run
# Matches the files of earlier starts that a start needs, beside checkpoints.
_NEEDED = re.compile(r'[^/]+\.jsonl?|start/(policy/)?[^/]+|compiled/.+')
# The beginnings of the names of files that are never uploaded, because they are
# for this machine only.
_OWN = (run_folder.ADDRESS, lock.NAME, run_folder.PROBE)
_UNFINISHED = ('.new', '.part', '.partial')
_log = logging.getLogger(__name__)


class OtherFiles(ValueError):
  """The address has files that belong to no run; the message is one line."""

  exit_code = exits.USAGE


class BucketFolder:
  """A folder in a bucket, and the folder of this machine that stands for it.

  Args:
    address: the address of the folder in the bucket, such as gs://bucket/run.
    folder: the folder of this machine, which is empty.
    retry: the seconds for which a call is repeated while the bucket is out of
      reach, if the run cannot go on without the call.

  Attributes:
    address: the address of the folder in the bucket.
    bucket: the objects at this address.
  """

  def __init__(self, address: str, folder: pathlib.Path, *, retry: float):
    self.address, self.bucket = address, buckets.Bucket(address)
    self._folder, self._retry = folder, retry
    (folder / run_folder.ADDRESS).write_text(address)
    # Size and time of each file of this machine whose content is in the bucket.
    self._known: dict[str, tuple[int, int]] = {}
    self._grown: dict[str, bucket_files.Grown] = {}
    self._pushing = threading.Lock()

  def pull(self) -> None:
    """Downloads the files that a start of the run needs.

    If there are several checkpoints, dialogues are downloaded only for steps
    after the second newest checkpoint. For older dialogues, empty files are
    made.

    Raises:
      OtherFiles: the address has files that belong to no run.
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
    # moves later dialogues aside, so the content of these files is needed.
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
          # `touch` makes an empty file if the dialogues were not downloaded.
          # From the file's name, the writer knows that there are dialogues to
          # remove or to move aside.
          (self._folder / name).touch()
        elif name.startswith(run_folder.ASIDE):
          (self._folder / name.partition('/')[0]).mkdir(exist_ok=True)
      # This comes after the download, so that the files from the bucket do not
      # count as new and are not uploaded again.
      self._known = self._files()

  def push(self) -> None:
    """Uploads new and changed files; removes objects whose files are gone.

    Checkpoints are not uploaded here, because Orbax writes them to the bucket.

    Raises:
      BucketError: the bucket cannot be written.
    """
    with self._pushing:
      files = self._files()
      new = {n for n, x in files.items() if self._known.get(n) != x}
      grown = set(filter(bucket_files.GROWS.fullmatch, new))
      # A folder without config.json does not count as a model. This file is
      # uploaded last, so that a model in the bucket is complete or absent.
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
    """Calls a function until the call raises no error of the bucket.

    Args:
      call: the function.
      seconds: the seconds after which the function is not called again. If the
        `retry` of the folder is shorter, `retry` is used.

    Raises:
      BucketError: the bucket was out of reach for all of this time.
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
    """Waits until the bucket is in reach; raises like `with_retries`."""
    self.with_retries(lambda: self.bucket.written(lease.NAME))

  @contextlib.contextmanager
  def pushed(
    self, seconds_left: Callable[[], float] = lambda: math.inf
  ) -> Iterator[None]:
    """Uploads new files every few seconds in the `with` block, and at its end.

    Args:
      seconds_left: returns the seconds until the process is killed.

    Raises:
      BucketError: the `with` block had no error, but the last upload failed.
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
    """Tries to upload new files; gives up silently if that takes too long.

    Args:
      seconds: the seconds until the process is killed.
    """
    thread = threading.Thread(target=self._try_push, daemon=True)
    thread.start()
    thread.join(max(min(_AFTER_ERROR, seconds - _TO_END), 0))

  def _try_push(self) -> None:
    with contextlib.suppress(OSError):
      self.push()

  def _append(self, name: str) -> None:
    """Uploads the lines that the run has appended to a file, as a new part."""
    data = (self._folder / name).read_bytes()
    there = self._grown.get(name, bucket_files.Grown())
    number, start, old = there.number, there.size, ()
    # If the bucket's bytes are not the beginning of the file, the file was
    # rewritten. Then all of it is uploaded again, as a part with the next
    # number.
    if len(data) < start or zlib.crc32(data[:start]) != there.checksum:
      number, start, old = number + 1, 0, there.parts
    part = f'{name}/{number:06d}-{start:012d}'
    if len(data) > start or old:
      self.bucket.write(part, data[start:])
    parts = part, *there.parts
    # Old parts are removed only after the new part is written. A kill in
    # between leaves parts with both numbers, and the greater number counts.
    for part in old:
      self.bucket.remove(part)
    self._grown[name] = bucket_files.Grown(
      number,
      len(data),
      zlib.crc32(data),
      tuple(x for x in dict.fromkeys(parts) if x not in old),
    )

  def _files(self) -> dict[str, tuple[int, int]]:
    """Returns size and time of each local file that the bucket should have."""
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
        with contextlib.suppress(OSError):  # the file may be removed meanwhile
          status = os.stat(os.path.join(parent, name))
          found[str(below / name)] = status.st_size, status.st_mtime_ns
    return found
