"""Runs an asyncio loop on a thread of its own, for the whole run."""

import asyncio
import collections
from collections.abc import Coroutine, Sequence
import concurrent.futures
import contextlib
import itertools
import threading
from typing import Any, TypeVar

Result = TypeVar('Result')

# Seconds that cancelled coroutines have to clean up when the context is left.
_GRACE = 5.0


class EventLoop:
  """A context manager that runs coroutines for synchronous code.

  A run has one such loop. The connections of a retriever belong to the loop
  that made them, so all code that uses the connections must run on this loop.
  Coroutines that still run when the context is left are cancelled.
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
    """Starts coroutines on the loop's thread, and returns without waiting.

    All coroutines start in the same iteration of the loop, so that the requests
    that they make before they first wait can be sent together.

    Returns:
      A future for each coroutine; cancelling a future cancels its coroutine.
    """
    waiting = collections.deque(coroutines)
    try:
      # This is no comprehension, because in Python 3.12 an interrupt inside a
      # comprehension does not reach the handler below.
      nothing = itertools.repeat((), len(coroutines))
      futures = list(itertools.starmap(concurrent.futures.Future, nothing))

      def start():
        for future in futures:
          if not waiting:  # an interrupt has emptied the queue of coroutines
            return
          _link(future, self._loop.create_task(waiting.popleft()))

      self._loop.call_soon_threadsafe(start)
    except BaseException:
      # After an interrupt nobody waits for the coroutines. Coroutines that are
      # closed here have left the queue, so the loop does not start them.
      with contextlib.suppress(IndexError):
        while True:
          waiting.popleft().close()
      raise
    return futures

  def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine, waits for it and returns its result.

    If the waiting thread is interrupted, the coroutine is cancelled.

    Raises:
      BaseException: the error that the coroutine raises.
    """
    (future,) = self.submit([coroutine])
    try:
      return future.result()
    except BaseException:
      future.cancel()
      raise


def _link(future: concurrent.futures.Future, task: asyncio.Task) -> None:
  """Gives a future a task's result; cancelling the future cancels the task."""
  loop = task.get_loop()

  def on_task_done(task):
    if not future.set_running_or_notify_cancel():
      if not task.cancelled():
        # Nobody needs the result any more. Without this call, asyncio would log
        # that the exception was never retrieved.
        task.exception()
    elif task.cancelled():
      future.set_exception(concurrent.futures.CancelledError())
    elif task.exception() is not None:
      future.set_exception(task.exception())
    else:
      future.set_result(task.result())

  def on_future_done(future):
    if future.cancelled() and not loop.is_closed():
      loop.call_soon_threadsafe(task.cancel)

  task.add_done_callback(on_task_done)
  future.add_done_callback(on_future_done)


async def _cancel_others() -> None:
  """Cancels all other coroutines and waits while they clean up."""
  others = asyncio.all_tasks() - {asyncio.current_task()}
  for task in others:
    task.cancel()
  if others:
    await asyncio.wait(others, timeout=_GRACE)
