"""Folders in buckets, such as gs://bucket/run, through fsspec.

A bucket is no file system: it has no locks, no appending and no renaming. So
commands work on folders of this machine. What they read is downloaded from the
bucket first, and what a run writes is copied to it (`records/bucket_copy.py`).
fsspec needs a package for each kind of bucket: gcsfs for gs://, s3fs for s3://.
"""

from collections.abc import Iterator
import contextlib
import hashlib
import os
import pathlib
import re

_ADDRESS = re.compile(r'[a-z][a-z0-9+.-]*://.')


class BucketError(OSError):
  """A bucket that cannot be used or reached; one line.

  Attributes:
    exit_code: 2 if this machine has no access to such buckets, 75 if a request
      failed.
  """

  def __init__(self, line: str, exit_code: int = 75):
    super().__init__(line)
    self.exit_code = exit_code


def is_address(place: object) -> bool:
  """Returns whether text is an address such as gs://bucket/run."""
  return _ADDRESS.match(str(place)) is not None


class Bucket:
  """The objects below an address, by their names relative to it."""

  def __init__(self, address: str):
    """Sends no request.

    Args:
      address: such as gs://bucket/run.

    Raises:
      BucketError: the kind of bucket is unknown, or its package is missing.
    """
    # Late, because few runs use buckets.
    import fsspec

    self._address = address.rstrip('/')
    try:
      # Without the cache of listings, which hides what others write.
      self._files, root = fsspec.core.url_to_fs(
        self._address, use_listings_cache=False
      )
    except (ImportError, ValueError, TypeError) as error:
      reason = str(error).partition('\n')[0]
      raise BucketError(f'{address}: {reason}', 2) from error
    self._root = root.rstrip('/')

  def sizes(self) -> dict[str, int]:
    """Returns the bytes of each object; {} if there is none.

    Raises:
      BucketError: the bucket cannot be read.
    """
    found = {}
    with self._errors(), contextlib.suppress(FileNotFoundError):
      found = self._files.find(self._root, detail=True)
    start = len(self._root) + 1
    return {path[start:]: entry['size'] or 0 for path, entry in found.items()}

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

  def modified(self, name: str) -> float:
    """Returns when an object was written, in seconds since 1970.

    Raises:
      BucketError: the bucket cannot be read.
    """
    with self._errors():
      return self._files.modified(self._path(name)).timestamp()

  def download(self, name: str, path: pathlib.Path) -> None:
    """Copies an object into a file, whose folder is made.

    Raises:
      BucketError: the object cannot be read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with self._errors():
      self._files.get_file(self._path(name), str(path))

  def upload(self, path: pathlib.Path, name: str) -> None:
    """Copies a file into an object, in place of an earlier one.

    Raises:
      BucketError: the file or the bucket cannot be read or written.
    """
    target = self._path(name)
    with self._errors():
      # Object stores have no folders, and do nothing here.
      self._files.makedirs(target.rpartition('/')[0], exist_ok=True)
      self._files.put_file(str(path), target)

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
      raise BucketError(f'{self._address}: {reason}') from error


def local_folder(place: str) -> pathlib.Path:
  """Returns a folder of this machine with the content of a folder.

  A folder of this machine is returned as it is. What is in a bucket is
  downloaded into ~/.cache/stppo_jax (or $XDG_CACHE_HOME/stppo_jax); objects
  whose size is the same as at the last download are not downloaded again.

  Args:
    place: a path, or an address.

  Raises:
    BucketError: the bucket cannot be read, or holds nothing there.
  """
  if not is_address(place):
    return pathlib.Path(place)
  caches = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache')
  digest = hashlib.sha256(place.encode()).hexdigest()[:16]
  folder = caches.expanduser() / 'stppo_jax' / digest
  bucket = Bucket(place)
  sizes = bucket.sizes()
  if not sizes:
    raise BucketError(f'{place}: there is nothing in the bucket', 2)
  for name, size in sizes.items():
    path = folder / name
    if not path.is_file() or path.stat().st_size != size:
      # Other processes may download the same object, and must not see a part.
      part = path.with_name(f'{path.name}.{os.getpid()}.part')
      bucket.download(name, part)
      part.replace(path)
  return folder
