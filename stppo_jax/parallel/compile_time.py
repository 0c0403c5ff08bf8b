"""The programs that a process compiles: the time, and where they are kept."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import pathlib
import threading

import jax

# Each is recorded at its end. A program is compiled once it has been lowered.
_LOWERED = '/jax/core/compile/jaxpr_to_mlir_module_duration'
_COMPILED = '/jax/core/compile/backend_compile_duration'
_LONG = 10.0  # seconds


def keep(folder: pathlib.Path) -> None:
  """Keeps compiled programs in a folder, where later processes find them.

  The environment may name another folder (JAX_COMPILATION_CACHE_DIR).
  """
  # jax makes its config's attributes at run time.
  if not jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update('jax_compilation_cache_dir', str(folder))
  # The shortest ones too: a run has hundreds of them.
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


@contextlib.contextmanager
def measured() -> Iterator[Callable[[], float]]:
  """Yields a function that returns the seconds compiled since its last call.

  Reading a program from the cache on disk counts as compiling it. Threads
  compile side by side, so the seconds may be more than have passed.
  """
  seconds = []

  def listen(event: str, duration_secs: float, **kwargs) -> None:
    del kwargs
    if event == _COMPILED:
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


@contextlib.contextmanager
def announced(
  show: Callable[[str], None], *, long: float = _LONG
) -> Iterator[None]:
  """Shows which programs take long to compile, and how long they took.

  Args:
    show: prints a line; called by any thread.
    long: seconds after which the name of a program is shown. Shorter
      compilations are not mentioned.
  """
  waiting: dict[int, threading.Timer] = {}  # thread to the line it will cause

  def listen(event: str, duration_secs: float, **kwargs) -> None:
    if event not in (_LOWERED, _COMPILED):
      return
    name = str(kwargs.get('fun_name', 'a program'))
    name = name.removeprefix('jit(').removesuffix(')').lstrip('_')
    thread = threading.get_ident()
    if thread in waiting:
      waiting.pop(thread).cancel()
    if event == _LOWERED:
      line = f'compiling {name}: {long:.0f} s so far'
      waiting[thread] = threading.Timer(long, _show, (show, line))
      waiting[thread].daemon = True
      waiting[thread].start()
    elif duration_secs >= long:
      _show(show, f'compiled {name} in {duration_secs:.0f} s')

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
    for timer in list(waiting.values()):
      timer.cancel()


def _show(show: Callable[[str], None], line: str) -> None:
  """Shows a line, unless nobody reads the console any more."""
  with contextlib.suppress(OSError):
    show(line)
