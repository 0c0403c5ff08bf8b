"""An asyncio loop on a thread of its own, for environments and retrievers."""

import asyncio
from collections.abc import Coroutine
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


async def _cancel_others() -> None:
  """Lets every other coroutine of this loop run its `finally` blocks."""
  others = asyncio.all_tasks() - {asyncio.current_task()}
  for task in others:
    task.cancel()
  if others:
    await asyncio.wait(others, timeout=_GRACE)
