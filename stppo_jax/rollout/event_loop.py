"""An asyncio loop on a thread of its own, for environments and retrievers."""

import asyncio
from collections.abc import Coroutine
from collections.abc import Sequence
import concurrent.futures
import threading
from typing import Any
from typing import TypeVar

Result = TypeVar('Result')

_GRACE = 5.0  # seconds that coroutines have to end when the loop does


class EventLoop:
  """Runs coroutines from synchronous code; one loop for a whole run.

  A context manager; what still runs when it is left is cancelled. Retriever
  connections belong to the loop that made them, so everything that touches
  them must run here.
  """

  def __init__(self):
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='event-loop', daemon=True
    )

  def __enter__(self) -> 'EventLoop':
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    self.run(_cancel_others())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def submit(
    self, coroutines: Sequence[Coroutine[Any, Any, Result]]
  ) -> list[concurrent.futures.Future[Result]]:
    """Starts coroutines on the loop's thread, all at once; the caller goes on.

    What they ask for in their first moment can travel together. Cancelling a
    future cancels its coroutine.
    """
    futures = [concurrent.futures.Future() for _ in coroutines]

    def start():
      for coroutine, future in zip(coroutines, futures, strict=True):
        _settle(future, self._loop.create_task(coroutine))

    self._loop.call_soon_threadsafe(start)
    return futures

  def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The coroutine's result, or its exception.

    An interrupt of the waiting thread cancels the coroutine.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    try:
      return future.result()
    except BaseException:
      future.cancel()
      raise


def _settle(future: concurrent.futures.Future, task: asyncio.Task) -> None:
  """Gives the task's end to the future, and the future's to the task."""
  loop = task.get_loop()

  def done(task):
    if not future.set_running_or_notify_cancel():
      if not task.cancelled():
        task.exception()  # seen, for nobody asks any more
    elif task.cancelled():
      future.set_exception(concurrent.futures.CancelledError())
    elif task.exception() is not None:
      future.set_exception(task.exception())
    else:
      future.set_result(task.result())

  def given_up(future):
    if future.cancelled() and not loop.is_closed():
      loop.call_soon_threadsafe(task.cancel)

  task.add_done_callback(done)
  future.add_done_callback(given_up)


async def _cancel_others() -> None:
  """Lets every other coroutine of this loop run its `finally` blocks."""
  others = asyncio.all_tasks() - {asyncio.current_task()}
  for task in others:
    task.cancel()
  if others:
    await asyncio.wait(others, timeout=_GRACE)
