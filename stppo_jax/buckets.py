"""Folders in buckets, such as gs://bucket/run, through fsspec.

A bucket is no file system: it has no locks, no appending and no renaming. So
commands work on folders of this machine. What they read is downloaded from the
bucket first, and what a run writes there is uploaded
(`workdir/bucket_folder.py`). fsspec needs a package for each kind of bucket:
gcsfs for gs://, s3fs for s3://.
"""

from collections.abc import Iterable, Iterator
import contextlib
import datetime
import email.utils
import fcntl
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import tempfile
import threading
from typing import Any, NamedTuple

from stppo_jax import exits
from stppo_jax import streams

_ADDRESS = re.compile(r'([a-z][a-z0-9+.-]*)://[^?@]+')
_EXTRAS = {'gs': 'gcs', 'gcs': 'gcs', 's3': 's3'}  # of pip install '.[EXTRA]'
# The fields of fsspec that change with an object's content; each kind of bucket
# has some of them.
_VERSION = ('size', 'etag', 'ETag', 'generation', 'updated', 'mtime', 'created')
# The fields that say when an object was written.
_TIMES = ('mtime', 'created', 'LastModified')
_PATIENCE = 5.0  # seconds until a line says that a bucket does not answer


class BucketError(OSError):
  """A bucket that cannot be used or reached; one line.

  Attributes:
    exit_code: 2 if this machine has no access to such buckets, 75 if a request
      failed.
  """

  def __init__(self, line: str, exit_code: int = exits.TRY_AGAIN):
    super().__init__(line)
    self.exit_code = exit_code


def is_address(place: object) -> bool:
  """Returns whether text is an address such as gs://bucket/run.

  One with a user, a password or a query is none: it would be printed and kept.
  """
  return _ADDRESS.fullmatch(str(place)) is not None


@contextlib.contextmanager
def _announced(address: str) -> Iterator[None]:
  """Prints a line if the body waits long for a bucket.

  Without a network, gcsfs looks for credentials for 20 seconds and repeats a
  request for another minute.
  """
  line = f'{address}: no answer yet; its requests are repeated'
  timer = threading.Timer(_PATIENCE, streams.say, [line])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


class Written(NamedTuple):
  """The version of an object, and its age.

  Attributes:
    generation: a number that each writing changes.
    age: the seconds since then, by the clock of the bucket.
  """

  generation: int
  age: float


class Entry(NamedTuple):
  """An object, as its bucket describes it.

  Attributes:
    size: its bytes.
    time: when it was written, in seconds since 1970; 0 if that is not told.
    version: text that changes when its content does.
  """

  size: int
  time: float
  version: str

  @classmethod
  def of(cls, known: dict[str, Any]) -> 'Entry':
    """Returns an object from what fsspec tells of it."""
    moment = next((known[key] for key in _TIMES if key in known), 0.0)
    return cls(
      known['size'] or 0,
      moment if isinstance(moment, int | float) else moment.timestamp(),
      ' '.join(str(known.get(key, '')) for key in _VERSION),
    )


class Bucket:
  """The objects below an address, by their names relative to it.

  Attributes:
    address: the address.
  """

  def __init__(self, address: str):
    """Finds the package for a kind of bucket, and the rights to use it.

    Args:
      address: such as gs://bucket/run.

    Raises:
      BucketError: the kind of bucket is unknown, its package is missing, or
        (of ftp, say) its server cannot be reached.
    """
    # Late, because few runs use buckets.
    import fsspec

    self.address = address.rstrip('/')
    # These packages print the tracebacks of errors that they raise, too.
    for name in ('fsspec', 'gcsfs'):
      logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
      # Without the cache of listings, which hides what others write.
      with _announced(self.address):
        self._files, root = fsspec.core.url_to_fs(
          self.address, use_listings_cache=False
        )
    except ImportError as error:
      kind = address.partition(':')[0]
      extra = _EXTRAS.get(kind)
      advice = f"pip install '.[{extra}]' in the clone" if extra else str(error)
      line = f'{address}: needs a package for {kind}://: {advice}'
      raise BucketError(line, 2) from error
    except (ValueError, TypeError, OSError) as error:
      reason = str(error).partition('\n')[0]
      raise BucketError(f'{address}: {reason}', 2) from error
    self._root = root.rstrip('/')

  def entries(self) -> dict[str, Entry]:
    """Returns what is known of each object; {} if there is none.

    Names that would lead out of a folder are left out.

    Raises:
      BucketError: the bucket cannot be read.
    """
    found = {}
    with (
      self._errors(),
      _announced(self.address),
      contextlib.suppress(FileNotFoundError),
    ):
      found = self._files.find(self._root, detail=True)
      if not found:
        # The `find` of http returns nothing where the host does not exist; `ls`
        # raises.
        self._files.ls(self._root)
    start = len(self._root) + 1
    names = {path[start:]: known for path, known in found.items()}
    return {
      name: Entry.of(known)
      for name, known in names.items()
      if name and not name.startswith('/') and '..' not in name.split('/')
    }

  def read(self, name: str) -> bytes:
    """Returns an object; b'' if there is none.

    Raises:
      BucketError: the bucket cannot be read.
    """
    with self._errors():
      try:
        return self._files.cat_file(self._path(name))
      except FileNotFoundError:
        return b''

  def download(self, names: Iterable[str], folder: pathlib.Path) -> None:
    """Copies objects into files of their names, whose folders are made.

    Raises:
      BucketError: an object cannot be read.
    """
    paths = {name: folder / name for name in names}
    for path in paths.values():
      path.parent.mkdir(parents=True, exist_ok=True)
    if paths:
      with self._errors():
        self._files.get(
          [self._path(name) for name in paths], list(map(str, paths.values()))
        )

  def upload(self, names: Iterable[str], folder: pathlib.Path) -> None:
    """Copies files of a folder into objects of their names.

    Raises:
      BucketError: a file or the bucket cannot be read or written.
    """
    if names := list(names):
      with self._errors():
        self._files.put(
          [str(folder / name) for name in names], list(map(self._path, names))
        )

  def write(self, name: str, data: bytes) -> None:
    """Writes an object, in place of an earlier one.

    Raises:
      BucketError: the bucket cannot be written.
    """
    target = self._path(name)
    with self._errors():
      self._files.makedirs(target.rpartition('/')[0], exist_ok=True)
      self._files.pipe_file(target, data)

  def remove(self, name: str) -> None:
    """Removes an object, if there is one.

    Raises:
      BucketError: the bucket cannot be written.
    """
    with self._errors(), contextlib.suppress(FileNotFoundError):
      self._files.rm_file(self._path(name))

  def written(self, name: str) -> Written | None:
    """Returns when an object was written; None if there is none.

    Only for gs://, like everything that uses generations.

    Raises:
      BucketError: the bucket cannot be read.
    """
    with self._errors():
      try:
        headers, data = self._files.call('GET', *self._object(name))
      except FileNotFoundError:
        return None
      known = json.loads(data)
      # Both times are those of the bucket: the clock here may be wrong.
      now = email.utils.parsedate_to_datetime(headers['Date'])
      age = now - datetime.datetime.fromisoformat(known['updated'])
      return Written(int(known['generation']), age.total_seconds())

  def write_if(self, name: str, data: bytes, generation: int) -> int | None:
    """Writes an object unless somebody else has.

    Args:
      name: the object.
      data: its content.
      generation: the generation that it must have; 0: it must not exist.

    Returns:
      The new generation; None if the object has another one than it must have.

    Raises:
      BucketError: the bucket cannot be written, or its answer was lost.
    """
    _, bucket, key = self._object(name)
    place = self._files.base.replace('/storage/', '/upload/storage/')
    with self._errors():
      try:
        _, answer = self._files.call(
          'POST',
          place + 'b/{}/o',
          bucket,
          uploadType='media',
          name=key,
          ifGenerationMatch=str(generation),
          data=data,
        )
      except FileExistsError:
        return None
      return int(json.loads(answer)['generation'])

  def remove_if(self, name: str, generation: int) -> None:
    """Removes an object if it has this generation.

    Raises:
      BucketError: the bucket cannot be written.
    """
    wanted = str(generation)
    with (
      self._errors(),
      contextlib.suppress(FileNotFoundError, FileExistsError),
    ):
      self._files.call('DELETE', *self._object(name), ifGenerationMatch=wanted)

  def _object(self, name: str) -> tuple[str, str, str]:
    """Returns the place of an object in the JSON API of Google's storage."""
    bucket, _, key = self._path(name).partition('/')
    return 'b/{}/o/{}', bucket, key

  def _path(self, name: str) -> str:
    return f'{self._root}/{name}'

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    """Raises `BucketError` for any error of the body."""
    # Packages for buckets raise errors of many kinds of their own.
    try:
      yield
    except Exception as error:
      reason = str(error).strip().partition('\n')[0] or type(error).__name__
      raise BucketError(f'{self.address}: {reason}') from error


@functools.cache
def local_folder(place: str | pathlib.Path) -> pathlib.Path:
  """Returns a local folder with the content of a folder or of an address.

  A folder of this machine is returned as it is. What is in a bucket is
  downloaded into ~/.cache/stppo_jax (or $XDG_CACHE_HOME/stppo_jax), by one of
  the processes of a machine; objects that have not changed since the last
  download are not downloaded again.

  Args:
    place: a path, or an address.

  Raises:
    BucketError: the bucket cannot be read, holds nothing there, or has given
      other bytes than it has.
  """
  if not is_address(place):
    return pathlib.Path(place)
  place = str(place).rstrip('/')
  caches = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache')
  digest = hashlib.sha256(place.encode()).hexdigest()[:16]
  folder = caches.expanduser() / 'stppo_jax' / digest
  bucket = Bucket(place)
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / 'lock', 'w') as lock:
    with contextlib.suppress(OSError):  # a file system without such locks
      fcntl.flock(lock, fcntl.LOCK_EX)
    _refresh(folder, bucket)
  return folder / 'content'


def _refresh(folder: pathlib.Path, bucket: Bucket) -> None:
  """Downloads what has changed in a bucket into a folder of the cache."""
  entries = bucket.entries()
  if not entries:
    raise BucketError(
      f'{bucket.address}: nothing is stored at this address; check its '
      'spelling',
      2,
    )
  for name, entry in entries.items():
    path = folder / 'content' / name
    # Not beside the file: whoever reads the folder must not find it.
    known = folder / 'versions' / name
    if (
      path.is_file() and known.is_file() and known.read_text() == entry.version
    ):
      continue
    for parent in (path.parent, known.parent):
      parent.mkdir(parents=True, exist_ok=True)
    # Other processes may download the same object, and must not see a part.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
      bucket.download([name], pathlib.Path(temporary))
      part = pathlib.Path(temporary, name)
      if (size := part.stat().st_size) != entry.size:
        raise BucketError(
          f'{bucket.address}: {size} bytes of {name} came, not {entry.size}'
        )
      part.replace(path)
    # Written last: if the process is killed before this, the object is
    # downloaded again.
    known.write_text(entry.version)
  content = folder / 'content'
  for path in content.rglob('*'):
    if path.is_file() and str(path.relative_to(content)) not in entries:
      path.unlink(missing_ok=True)  # the bucket no longer has it
