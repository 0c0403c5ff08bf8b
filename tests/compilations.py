"""Makes jax compile quickly, and counts what it compiles or has on disk."""

from collections.abc import Iterator
import contextlib

import jax

# Options of the compiler. Compiling is most of the time of many tests.
QUICK = {
  'xla_backend_optimization_level': 0,
  'xla_llvm_disable_expensive_passes': True,
}
_EVENT = '/jax/core/compile/backend_compile_duration'


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
  """Yields a list that grows by one with every program inside the block."""
  programs = []

  def listen(event: str, duration: float, **details) -> None:
    del duration, details
    if event == _EVENT:
      programs.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield programs
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
