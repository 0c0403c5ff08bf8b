"""Runs several worker processes that serve the same address.

The parent process binds the address, and each worker accepts a connection when
it has time for one. A worker that ends is replaced after a pause. Workers end
with their parent, even if the parent is killed: the standard input of a worker
is a pipe from the parent, and the worker ends when the pipe is closed.
"""

import asyncio
from collections.abc import Callable, Sequence
import socket
import sys

_END_TIMEOUT = 20.0  # seconds until a worker that does not end is killed
# Seconds before a worker is replaced. Without a pause, a worker that always
# crashes would be started again and again as fast as the machine can.
_PAUSE = 1.0


class WorkerFailed(Exception):
  """Raised if a worker ends before it is ready; it has printed the reason."""

  def __init__(self, exit_code: int):
    super().__init__(f'a worker ended with exit code {exit_code}')
    self.exit_code = exit_code


async def supervise(
  command: Callable[[int], Sequence[str]],
  *,
  num_workers: int,
  bound: socket.socket,
  stopping: asyncio.Event,
  ready: Callable[[], None],
) -> None:
  """Runs workers until `stopping` is set, and waits for their end.

  Args:
    command: takes the descriptor of the socket and returns the command of a
      worker, which prints a line when it is ready.
    num_workers: the number of workers.
    bound: the socket that the workers listen on.
    stopping: an event that ends all workers.
    ready: called once all workers are ready.

  Raises:
    WorkerFailed: if a worker ended before it was ready.
  """

  async def keep_one(first: asyncio.Future) -> None:
    while not stopping.is_set():
      worker = await asyncio.create_subprocess_exec(
        *command(bound.fileno()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        pass_fds=[bound.fileno()],
      )
      ended = asyncio.ensure_future(worker.wait())
      stop = asyncio.ensure_future(stopping.wait())
      try:
        assert worker.stdout is not None
        # If there is no line, the worker has ended before it was ready.
        if not await worker.stdout.readline():
          raise WorkerFailed(await ended)
        if not first.done():
          first.set_result(None)
        await asyncio.wait([ended, stop], return_when='FIRST_COMPLETED')
        if not stop.done():
          print(
            f'worker {worker.pid} ended with exit code {ended.result()}; '
            f'starting another one in {_PAUSE:g} s',
            file=sys.stderr,
          )
          await asyncio.wait([stop], timeout=_PAUSE)
      finally:
        stop.cancel()
        await _end(worker, ended)

  loop = asyncio.get_running_loop()
  firsts = [loop.create_future() for _ in range(num_workers)]
  try:
    async with asyncio.TaskGroup() as group:
      for first in firsts:
        group.create_task(keep_one(first))
      await asyncio.gather(*firsts)
      ready()
  except* WorkerFailed as failures:
    raise failures.exceptions[0] from None


async def _end(
  worker: asyncio.subprocess.Process, ended: asyncio.Future
) -> None:
  """Ends a worker if it still runs, and waits for its end."""
  assert worker.stdin is not None
  worker.stdin.close()
  try:
    # At the timeout, `wait_for` cancels its argument. The shield protects
    # `ended`, which is awaited again after the timeout.
    await asyncio.wait_for(asyncio.shield(ended), _END_TIMEOUT)
  except TimeoutError:
    worker.kill()
    await ended
