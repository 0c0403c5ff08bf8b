"""Worker processes that answer at one address.

The parent binds the address, and each worker accepts connections from it as
soon as it has time for one. A worker that ends is replaced, after a pause if it
did not live long. Workers end with their parent, even if it is killed: their
standard input is a pipe from the parent, and they end when the pipe does.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence
import os
import socket
import sys
import tempfile

from stppo_jax.http import metrics

_END_TIMEOUT = 20.0  # seconds until a worker that does not end is killed
_LONG_LIFE = 60.0  # seconds; a worker that lived longer is replaced at once
_LONGEST_PAUSE = 30.0  # seconds before a worker is replaced


class WorkerFailed(Exception):
  """Raised if a worker ended before it was ready; it has printed the reason."""

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
  first_pause: float = 1.0,
) -> None:
  """Runs workers until `stopping` is set, and waits for their end.

  Args:
    command: takes the descriptor of the socket and returns the command of a
      worker, which prints a line when it is ready.
    num_workers: the number of workers.
    bound: the socket that the workers listen on.
    stopping: an event that ends all workers.
    ready: called once all workers are ready.
    first_pause: the seconds until a worker that did not live long is replaced;
      they double with each further one.

  Raises:
    WorkerFailed: if a worker ended before it was ready.
  """
  with tempfile.TemporaryDirectory() as folder:
    environment = os.environ | {metrics.FOLDER_VARIABLE: folder}

    async def keep_one(first: asyncio.Future) -> None:
      loop = asyncio.get_running_loop()
      pause = 0.0
      while not stopping.is_set():
        worker = await asyncio.create_subprocess_exec(
          *command(bound.fileno()),
          stdin=asyncio.subprocess.PIPE,
          stdout=asyncio.subprocess.PIPE,
          pass_fds=[bound.fileno()],
          env=environment,
        )
        ended = asyncio.ensure_future(worker.wait())
        stop = asyncio.ensure_future(stopping.wait())
        try:
          assert worker.stdout is not None
          if not await worker.stdout.readline():
            raise WorkerFailed(await ended)
          began = loop.time()
          if not first.done():
            first.set_result(None)
          await asyncio.wait([ended, stop], return_when='FIRST_COMPLETED')
          if not stop.done():
            pause = min(max(2 * pause, first_pause), _LONGEST_PAUSE)
            if loop.time() - began > _LONG_LIFE:
              pause = 0.0
            print(
              f'worker {worker.pid} ended with exit code {ended.result()}; '
              f'starting another one in {pause:g} s',
              file=sys.stderr,
            )
            await asyncio.wait([stop], timeout=pause)
        finally:
          stop.cancel()
          await _end(worker, ended)

    firsts = [
      asyncio.get_running_loop().create_future() for _ in range(num_workers)
    ]
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
  """Ends a worker that may have ended already."""
  assert worker.stdin is not None
  worker.stdin.close()
  try:
    await asyncio.wait_for(asyncio.shield(ended), _END_TIMEOUT)
  except TimeoutError:
    worker.kill()
    await ended
