"""The lease of a folder in a bucket: only its holder writes to the folder.

    gs://BUCKET/RUN/lease    JSON: the process that holds it, and for how long

A bucket has no locks. But an object can be written on the condition that its
generation has not changed since it was read, so only one of several writers
succeeds. The holder renews the lease by writing it again and again. If
a lease was not written for the time that it states, by the clock of the bucket,
another process takes it over. A holder that was only frozen learns from
`Lease.touch` that it has lost the lease, before it commits a checkpoint.
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
# During the time for which a lease holds, the holder renews the lease
# `_RENEWALS` times, and a waiting process reads the lease `_LOOKS` times.
_RENEWALS = 4
_LOOKS = 20
# Seconds that a process waits at its end until its lease is removed.
_TO_RELEASE = 5.0


class Lease(lock.Claim):
  """The lease of a folder in a bucket, which a thread renews.

  Args:
    bucket: the folder in the bucket.
    data: the content of the lease, which is unique to this holder.
    generation: the generation of the object that this process has written.
  """

  def __init__(self, bucket: buckets.Bucket, data: bytes, generation: int):
    super().__init__()
    self._bucket, self._data, self._generation = bucket, data, generation
    self._renewing = threading.Lock()
    self._lost: lock.Lost | None = None

  def check(self) -> None:
    """Raises `Lost` if `touch` has raised it; sends no request."""
    if self._lost is not None:
      raise self._lost

  def touch(self) -> None:
    """Renews the lease.

    Raises:
      Lost: another process has taken the lease over.
      BucketError: the bucket is out of reach.
    """
    with self._renewing:
      written = self._bucket.write_if(NAME, self._data, self._generation)
      if written is None:
        # The generation is not the expected one. Either another process has
        # the lease, or the answer to an earlier write of this process was lost.
        found, content = self._bucket.written(NAME), self._bucket.read(NAME)
        if found is not None and content != self._data:
          holder, _ = _read(content)
          self._lost = lock.taken_over(self._bucket.address, holder)
          raise self._lost
        # The lease has this process's content, or a user has removed it.
        self._generation = 0 if found is None else found.generation
        written = self._bucket.write_if(NAME, self._data, self._generation)
      if written is not None:
        self._generation = written

  def release(self) -> None:
    """Removes the lease, unless another process has taken it over."""
    self.end()
    # A thread removes the lease, so that the process can end while the bucket
    # is out of reach.
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
  """Holds the lease of a folder in a bucket during the `with` block.

  If the lease has another holder, this function waits until the lease runs out
  or is renewed. If that holder was a process of this host and has ended, the
  lease is taken over at once.

  Args:
    bucket: the folder in the bucket.
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
  """Writes the lease of this process; returns the generation of the object."""
  known = 0  # the generation of the lease that this process waits for
  while True:
    written = bucket.write_if(NAME, data, 0)  # succeeds if there is no lease
    if written is not None:
      return written
    found, content = bucket.written(NAME), bucket.read(NAME)
    if found is None:
      continue
    if content == data:  # the write has succeeded, but its answer was lost
      return found.generation
    holder, seconds = _read(content)
    # The lease was renewed while this process waited, so its holder lives.
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
      # The message names one second more than `left`, because the bucket gives
      # times in whole seconds.
      _log.info(
        f'{bucket.address}: the lease of {holder} runs out in {left + 1:.0f} s '
        'unless it is renewed; waiting'
      )
      known = found.generation
    time.sleep(min(max(left, 0.1), seconds / _LOOKS))


def _read(content: bytes) -> tuple[lock.Holder | None, float]:
  """Returns the holder of a lease, and for how many seconds the lease holds.

  If the content is damaged, the holder is None and the seconds are `SECONDS`.
  """
  try:
    record = json.loads(content)
    return lock.Holder(**record['holder']), float(record['seconds'])
  except (ValueError, TypeError, KeyError, RecursionError):
    return None, SECONDS
