"""Lets Orbax work with buckets that are sometimes out of reach.

Orbax reads and writes arrays with TensorStore, which repeats a failed request
for a quarter of an hour. It reads and writes small files with gcsfs, which
gives up after half a minute. A failed request says nothing about the content of
a bucket, so it does not mean that a checkpoint is damaged.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import functools
import time
from typing import Any

from stppo_jax import buckets

_PAUSE = 1.0  # seconds between two tries of a request
# Packages whose errors mean that a request failed, and the words with which
# TensorStore reports a failed request.
_PACKAGES = ('aiohttp', 'asyncio', 'gcsfs', 'google', 'requests', 's3fs')
_PASSING = ('UNAVAILABLE', 'DEADLINE_EXCEEDED', 'RESOURCE_EXHAUSTED', 'ABORTED')


@contextlib.contextmanager
def reaching(address: str) -> Iterator[None]:
  """Turns an error of the `with` block into `BucketError` if a request failed.

  Args:
    address: the address where the `with` block reads or writes. If `address` is
      '', the block uses no bucket, and its errors are raised unchanged.
  """
  try:
    yield
  except Exception as error:
    if not address or hasattr(error, 'exit_code') or not is_unreachable(error):
      raise
    reason = str(error).strip().partition('\n')[0] or type(error).__name__
    raise buckets.BucketError(f'{address}: {reason}') from error


def prepare(seconds: float) -> None:
  """Makes Orbax repeat requests for small files, and cache no listings.

  Call this function before Orbax first uses a gs:// address. For such an
  address, Orbax uses the protocol `gcs` of fsspec, and `Bucket` uses the
  protocol `gs`. So the change concerns only Orbax.

  Args:
    seconds: the seconds for which a failed request is repeated. The request is
      repeated, not the save, because all hosts save together and one host alone
      cannot begin the save again.
  """
  _file_system().seconds = seconds


@functools.cache
def _file_system() -> Any:
  """Registers the file system that fsspec gives to Orbax; returns its class."""
  # These packages are imported here, because few runs use buckets.
  import fsspec
  import gcsfs
  from gcsfs import retry

  class FileSystem(gcsfs.GCSFileSystem):
    seconds = 0.0

    def __init__(self, *args, **kwargs):
      # A cache of listings would hide files that other hosts write.
      super().__init__(*args, **kwargs | {'use_listings_cache': False})

    async def _request(self, *args, **kwargs):
      deadline = time.monotonic() + self.seconds
      while True:
        try:
          return await super()._request(*args, **kwargs)
        except Exception as error:
          if time.monotonic() > deadline or not retry.is_retriable(error):
            raise
        await asyncio.sleep(_PAUSE)

  fsspec.register_implementation('gcs', FileSystem, clobber=True)
  return FileSystem


def is_unreachable(error: Exception) -> bool:
  """Returns whether an error means only that a bucket was out of reach.

  Args:
    error: an error of fsspec, of a package that fsspec uses, or of TensorStore.
  """
  package = type(error).__module__.partition('.')[0]
  if isinstance(error, OSError):  # a missing permission counts as unreachable
    return not isinstance(error, FileNotFoundError)
  return package in _PACKAGES or any(x in str(error) for x in _PASSING)
