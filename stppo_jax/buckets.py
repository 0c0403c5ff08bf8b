"""Folders in buckets, such as gs://bucket/run, through fsspec.

A bucket is no file system: it has no locks, no appending and no renaming.
Commands therefore work on folders of this machine. The files that they read are
downloaded from the bucket first, and the files that a run writes are uploaded
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
# Maps the scheme of an address to EXTRA in pip install '.[EXTRA]'.
_EXTRAS = {'gs': 'gcs', 'gcs': 'gcs', 's3': 's3'}
# The fields of fsspec's description of an object that change with the object's
# content. Each kind of bucket has some of these fields.
_VERSION = ('size', 'etag', 'ETag', 'generation', 'updated', 'mtime', 'created')
# The fields that say when an object was written.
_TIMES = ('mtime', 'created', 'LastModified')
_PATIENCE = 5.0  # seconds until a line says that a bucket does not answer


class BucketError(OSError):
  """Says in one line why a bucket cannot be used or reached.

  Attributes:
    exit_code: 2 if the address cannot be used from this machine, or nothing is
      stored there; 75 if a request failed.
  """

  def __init__(self, line: str, exit_code: int = exits.TRY_AGAIN):
    super().__init__(line)
    self.exit_code = exit_code


def is_address(place: object) -> bool:
  """Returns whether a text is an address such as gs://bucket/run.

  An address with a user, a password or a query counts as no address, because
  addresses are printed and recorded.
  """
  return _ADDRESS.fullmatch(str(place)) is not None


@contextlib.contextmanager
def _announced(address: str) -> Iterator[None]:
  """Prints a line if the body of the `with` waits long for a bucket.

  Without a network, gcsfs looks for credentials for 20 seconds and repeats a
  request for another minute.
  """
  line = f'{address}: the bucket has not answered yet; retrying'
  timer = threading.Timer(_PATIENCE, streams.say, [line])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


class Written(NamedTuple):
  """The generation and the age of an object in a bucket.

  Attributes:
    generation: a number that changes each time the object is written.
    age: the seconds since the object was written, by the clock of the bucket.
  """

  generation: int
  age: float


class Entry(NamedTuple):
  """The bucket's description of an object.

  Attributes:
    size: the object's size in bytes.
    time: the time at which the object was written, in seconds since 1970; 0 if
      the bucket does not tell it.
    version: a text that changes when the object's content changes.
  """

  size: int
  time: float
  version: str

  @classmethod
  def of(cls, known: dict[str, Any]) -> 'Entry':
    """Returns the entry of an object, from fsspec's description of it."""
    moment = next((known[key] for key in _TIMES if key in known), 0.0)
    return cls(
      known['size'] or 0,
      moment if isinstance(moment, int | float) else moment.timestamp(),
      ' '.join(str(known.get(key, '')) for key in _VERSION),
    )


class Bucket:
  """The objects below an address, by their names relative to the address.

  Attributes:
    address: an address such as gs://bucket/run, without a '/' at its end.
  """

  def __init__(self, address: str):
    """Opens the bucket with fsspec's package for its kind.

    Args:
      address: an address such as gs://bucket/run.

    Raises:
      BucketError: the kind of bucket is unknown, its package is missing, or
        its server cannot be reached, for example with ftp://.
    """
    # Imported here, because few runs use buckets.
    import fsspec

    self.address = address.rstrip('/')
    # fsspec and gcsfs raise an error and also log its traceback. At the log
    # level CRITICAL, the traceback is not printed.
    for name in ('fsspec', 'gcsfs'):
      logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
      # A cache of listings would hide the objects that other processes write.
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
    """Maps the name of each object below the address to its `Entry`.

    The result is {} if there is no object. Names such as '../x', which would
    lead out of a folder, are left out.

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
        # With http://, `find` returns nothing if the host does not exist, while
        # `ls` raises an error.
        self._files.ls(self._root)
    start = len(self._root) + 1
    names = {path[start:]: known for path, known in found.items()}
    return {
      name: Entry.of(known)
      for name, known in names.items()
      if name and not name.startswith('/') and '..' not in name.split('/')
    }

  def read(self, name: str) -> bytes:
    """Returns the content of an object; b'' if the object does not exist.

    Raises:
      BucketError: the bucket cannot be read.
    """
    with self._errors():
      try:
        return self._files.cat_file(self._path(name))
      except FileNotFoundError:
        return b''

  def download(self, names: Iterable[str], folder: pathlib.Path) -> None:
    """Copies objects into files of the same names, and makes missing folders.

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
    """Copies files of a folder into objects of the same names.

    Raises:
      BucketError: a file cannot be read, or the bucket cannot be written.
    """
    if names := list(names):
      with self._errors():
        self._files.put(
          [str(folder / name) for name in names], list(map(self._path, names))
        )

  def write(self, name: str, data: bytes) -> None:
    """Writes an object, and replaces an object that has the same name.

    Raises:
      BucketError: the bucket cannot be written.
    """
    target = self._path(name)
    with self._errors():
      self._files.makedirs(target.rpartition('/')[0], exist_ok=True)
      self._files.pipe_file(target, data)

  def remove(self, name: str) -> None:
    """Removes an object if it exists.

    Raises:
      BucketError: the bucket cannot be written.
    """
    with self._errors(), contextlib.suppress(FileNotFoundError):
      self._files.rm_file(self._path(name))

  def written(self, name: str) -> Written | None:
    """Returns the generation and the age of an object; None if it is missing.

    For gs:// only, because other kinds of buckets have no generations.

    Raises:
      BucketError: the bucket cannot be read.
    """
    with self._errors():
      try:
        headers, data = self._files.call('GET', *self._object(name))
      except FileNotFoundError:
        return None
      known = json.loads(data)
      # Both times are the bucket's, because this machine's clock may be wrong.
      now = email.utils.parsedate_to_datetime(headers['Date'])
      age = now - datetime.datetime.fromisoformat(known['updated'])
      return Written(int(known['generation']), age.total_seconds())

  def write_if(self, name: str, data: bytes, generation: int) -> int | None:
    """Writes an object if its generation is the expected one; for gs:// only.

    Args:
      name: the name of the object.
      data: the new content.
      generation: the expected generation; 0 means that the object must not
        exist.

    Returns:
      The new generation. None if the object has another generation, in which
      case nothing is written.

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
    """Removes an object if it has this generation; for gs:// only.

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
    """Returns an object's URL template, its bucket and its name.

    Together, the three texts give the object's URL in Google's JSON API.
    """
    bucket, _, key = self._path(name).partition('/')
    return 'b/{}/o/{}', bucket, key

  def _path(self, name: str) -> str:
    return f'{self._root}/{name}'

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    """Turns every exception of the body into a `BucketError`."""
    # The packages for buckets raise exceptions of many classes.
    try:
      yield
    except Exception as error:
      reason = str(error).strip().partition('\n')[0] or type(error).__name__
      raise BucketError(f'{self.address}: {reason}') from error


@functools.cache
def local_folder(place: str | pathlib.Path) -> pathlib.Path:
  """Returns a folder of this machine with the files of a path or an address.

  A path is returned as it is. The objects below an address are downloaded into
  ~/.cache/stppo_jax (or $XDG_CACHE_HOME/stppo_jax). Only one process of a
  machine downloads an address at a time, and objects that have not changed
  since the last download are not downloaded again.

  Args:
    place: a path, or an address.

  Raises:
    BucketError: the bucket cannot be read, has no object below the address, or
      has sent fewer or more bytes than the object has.
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
    with contextlib.suppress(OSError):  # some file systems have no file locks
      fcntl.flock(lock, fcntl.LOCK_EX)
    _refresh(folder, bucket)
  return folder / 'content'


def _refresh(folder: pathlib.Path, bucket: Bucket) -> None:
  """Downloads the changed objects of a bucket into a folder of the cache."""
  entries = bucket.entries()
  if not entries:
    raise BucketError(
      f'{bucket.address}: nothing is stored at this address; check its '
      'spelling',
      2,
    )
  for name, entry in entries.items():
    path = folder / 'content' / name
    # The version is not stored beside the file, because readers of the folder
    # `content` must find the bucket's files only.
    known = folder / 'versions' / name
    if (
      path.is_file() and known.is_file() and known.read_text() == entry.version
    ):
      continue
    for parent in (path.parent, known.parent):
      parent.mkdir(parents=True, exist_ok=True)
    # The object is downloaded into a temporary folder first, because another
    # process may read the file and must not see half of it.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
      bucket.download([name], pathlib.Path(temporary))
      part = pathlib.Path(temporary, name)
      if (size := part.stat().st_size) != entry.size:
        raise BucketError(
          f'{bucket.address}: received {size} bytes of {name}, expected '
          f'{entry.size}'
        )
      part.replace(path)
    # The version is written last. If the process is killed before this line,
    # the next call downloads the object again.
    known.write_text(entry.version)
  content = folder / 'content'
  for path in content.rglob('*'):
    if path.is_file() and str(path.relative_to(content)) not in entries:
      path.unlink(missing_ok=True)  # the bucket no longer has the object
