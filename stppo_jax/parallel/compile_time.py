"""The seconds in which a process compiles programs."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'


@contextlib.contextmanager
def measured() -> Iterator[Callable[[], float]]:
  """Yields a function that returns the seconds compiled since its last call.

  Reading a program from the cache on disk counts as compiling it. Threads
  compile side by side, so the seconds may be more than have passed.
  """
  seconds = []

  def listen(event: str, duration_secs: float, **kwargs) -> None:
    del kwargs
    if event == _EVENT:
      seconds.append(duration_secs)

  def take() -> float:
    count = len(seconds)
    taken = sum(seconds[:count])
    del seconds[:count]
    return taken

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield take
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
