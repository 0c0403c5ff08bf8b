"""The lease of a folder in a bucket: one process at a time writes there.

    gs://BUCKET/RUN/lease    JSON: the process that holds it, and for how long

A bucket has no locks. But an object can be written on the condition that it
still has the generation that was read: of several writers, one succeeds. The
holder writes the lease again and again. Once it was not written for as long as
it says, by the clock of the bucket, another process takes it over. A holder
that was only frozen finds out by `Lease.touch`, before it commits anything.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import logging
import threading
import time
import uuid

from stppo_jax import buckets
from stppo_jax.workdir import lock

NAME = 'lease'
SECONDS = 60.0
_log = logging.getLogger(__name__)
# How often a lease is renewed in its time, and looked at by who waits for it.
_RENEWALS = 4
_LOOKS = 20
_TO_RELEASE = 5.0  # seconds that the end of a process waits for the bucket


class Lease(lock.Claim):
  """The lease of a folder in a bucket, which a thread renews.

  Args:
    bucket: the folder.
    data: the content of the lease, which no other holder writes.
    generation: the generation of the lease.
  """

  def __init__(self, bucket: buckets.Bucket, data: bytes, generation: int):
    super().__init__()
    self._bucket, self._data, self._generation = bucket, data, generation
    self._renewing = threading.Lock()
    self._lost: lock.Lost | None = None

  def check(self) -> None:
    """Raises `Lost` if `touch` has; asks nobody, and so needs no bucket."""
    if self._lost is not None:
      raise self._lost

  def touch(self) -> None:
    """Writes the lease again, before it runs out.

    Raises:
      Lost: another process has taken the lease over.
      BucketError: the bucket is out of reach.
    """
    with self._renewing:
      written = self._bucket.write_if(NAME, self._data, self._generation)
      if written is None:
        # The answer to an earlier writing may have been lost.
        found, content = self._bucket.written(NAME), self._bucket.read(NAME)
        if found is not None and content != self._data:
          holder, _ = _read(content)
          self._lost = lock.taken_over(self._bucket.address, holder)
          raise self._lost
        # The lease is still ours, or was removed by hand.
        self._generation = 0 if found is None else found.generation
        written = self._bucket.write_if(NAME, self._data, self._generation)
      if written is not None:
        self._generation = written

  def release(self) -> None:
    """Removes the lease, unless another process has taken it over."""
    self.end()
    # On a thread: a bucket out of reach must not hold up the end of a process.
    thread = threading.Thread(target=self._remove, daemon=True)
    thread.start()
    thread.join(_TO_RELEASE)

  def _remove(self) -> None:
    with self._renewing, contextlib.suppress(buckets.BucketError):
      self._bucket.remove_if(NAME, self._generation)


@contextlib.contextmanager
def held(
  bucket: buckets.Bucket, *, seconds: float = SECONDS
) -> Iterator[Lease]:
  """Holds the lease of a folder in a bucket.

  If its holder has ended, this waits until the lease has run out. A holder on
  this host is seen to have ended, and its lease is taken at once.

  Args:
    bucket: the folder.
    seconds: how long the lease holds if it is not renewed.

  Raises:
    Locked: another process renews the lease.
    BucketError: the bucket cannot be read or written.
  """
  fields = dataclasses.asdict(lock.Holder.of_this_process())
  token = uuid.uuid4().hex
  record = {'holder': fields, 'seconds': seconds, 'token': token}
  data = json.dumps(record).encode() + b'\n'
  lease = Lease(bucket, data, _acquire(bucket, data))
  thread = threading.Thread(
    target=lease.keep_touching,
    args=(seconds / _RENEWALS,),
    name='lease',
    daemon=True,
  )
  thread.start()
  try:
    yield lease
  finally:
    lease.release()


def _acquire(bucket: buckets.Bucket, data: bytes) -> int:
  """Writes the lease of this process; returns its generation."""
  known = 0  # the generation that is waited for
  while True:
    written = bucket.write_if(NAME, data, 0)  # if there is no lease
    if written is not None:
      return written
    found, content = bucket.written(NAME), bucket.read(NAME)
    if found is None:
      continue
    if content == data:  # the answer was lost
      return found.generation
    holder, seconds = _read(content)
    # The holder lives if the lease was written again while this process waited.
    if known not in (0, found.generation):
      raise lock.Locked(
        f'{bucket.address}: {holder} writes there and has renewed its lease; '
        'wait for its end, or use another address'
      )
    left = seconds - found.age
    if left <= 0 or (holder is not None and holder.has_ended):
      written = bucket.write_if(NAME, data, found.generation)
      if written is not None:
        _log.info(
          f'{bucket.address}: took over the lease of an ended run: {holder}'
        )
        return written
    elif not known:
      # The bucket tells the time in whole seconds.
      _log.info(
        f'{bucket.address}: the lease of {holder} runs out in {left + 1:.0f} s '
        'unless it is renewed; waiting'
      )
      known = found.generation
    time.sleep(min(max(left, 0.1), seconds / _LOOKS))


def _read(content: bytes) -> tuple[lock.Holder | None, float]:
  """Returns the holder that a lease names, if any, and how long it holds."""
  try:
    record = json.loads(content)
    return lock.Holder(**record['holder']), float(record['seconds'])
  except (ValueError, TypeError, KeyError, RecursionError):
    return None, SECONDS
