"""Lets Orbax work with buckets that are out of reach now and then.

Orbax reads and writes arrays with TensorStore, which repeats a request for a
quarter of an hour, and its small files with gcsfs, which gives up after half a
minute. An error of a request says nothing about what a bucket holds: it is no
damage of a checkpoint.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import functools
import time
from typing import Any

from stppo_jax import buckets

_PAUSE = 1.0  # seconds between two tries of a request
# Packages whose errors are those of requests, and the words by which
# TensorStore reports such an error.
_PACKAGES = ('aiohttp', 'asyncio', 'gcsfs', 'google', 'requests', 's3fs')
_PASSING = ('UNAVAILABLE', 'DEADLINE_EXCEEDED', 'RESOURCE_EXHAUSTED', 'ABORTED')


@contextlib.contextmanager
def reaching(address: str) -> Iterator[None]:
  """Raises `BucketError` for an error that says nothing about stored content.

  Args:
    address: where the body reads or writes; '' = in no bucket.
  """
  try:
    yield
  except Exception as error:
    if not address or hasattr(error, 'exit_code') or not is_unreachable(error):
      raise
    reason = str(error).strip().partition('\n')[0] or type(error).__name__
    raise buckets.BucketError(f'{address}: {reason}') from error


def prepare(seconds: float) -> None:
  """Makes Orbax list buckets uncached, and repeat requests for small files.

  Call it before Orbax first uses gs://. It does so by the protocol `gcs` of
  fsspec, where `Bucket` says `gs`.

  Args:
    seconds: for which a request is repeated. A save of several hosts cannot be
      begun again by one of them.
  """
  _file_system().seconds = seconds


@functools.cache
def _file_system() -> Any:
  """Returns the class that fsspec makes for Orbax, with its `seconds`."""
  # Late, because few runs use buckets.
  import fsspec
  import gcsfs
  from gcsfs import retry

  class FileSystem(gcsfs.GCSFileSystem):
    seconds = 0.0

    def __init__(self, *args, **kwargs):
      # A cache of listings would hide what other hosts write.
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
    error: raised by fsspec, by a package of it, or by TensorStore.
  """
  package = type(error).__module__.partition('.')[0]
  if isinstance(error, OSError):  # a missing permission raises one, too
    return not isinstance(error, FileNotFoundError)
  return package in _PACKAGES or any(x in str(error) for x in _PASSING)
