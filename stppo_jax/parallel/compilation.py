"""Compiles the programs of models with the options of each platform.

The options belong to the programs and not to the environment: two machines
compile the same, and a program that is compiled ahead of time (`topology`) is
the one that a run executes. Compiling is timed, and announced if it takes long;
compiled programs are kept in a folder.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import logging
import os
import pathlib
import threading
from typing import Any

import jax

from stppo_jax.parallel import mesh as mesh_lib

OPTIONS: Mapping[str, Mapping[str, Any]] = {
  'tpu': {
    # From this many MiB on, a product with a sharded matrix is computed in
    # windows, one for each device, so that a window is multiplied while the
    # next one is sent. With 16 devices and more the windows are narrow: 96
    # columns of a width of 1536 fill a third of the matrix unit. By the
    # compiler's estimate, an update of 1.5B on 16 chips takes half the time
    # without windows, and the compiler still gathers each matrix while the
    # product before it is computed.
    'xla_jf_spmd_threshold_for_windowed_einsum_mib': 1_000_000,
  },
}


def options(mesh: jax.sharding.Mesh | None) -> dict[str, Any] | None:
  """Returns `compiler_options` of `jax.jit` for programs on a mesh."""
  return dict(OPTIONS.get(mesh_lib.platform(mesh), {})) or None


def jit(
  function: Callable[..., Any],
  *,
  mesh: jax.sharding.Mesh | None,
  dtype: str,
  **arguments: Any,
) -> Any:
  """Returns `jax.jit` of a function that computes with a model.

  Unless told otherwise, GPUs and TPUs round the factors of float32 products to
  TF32 and bfloat16. Then a model in float32 is as inexact as in bfloat16, and
  the engine, whose programs round elsewhere, does not agree with the trainer.

  Args:
    function: the function; all products in it are exact to float32 if dtype is.
    mesh: the devices of the program; None = the default device.
    dtype: the name of the type of the model's computations.
    **arguments: further arguments of `jax.jit`.
  """
  if dtype == 'float32':
    named = function
    while isinstance(named, functools.partial):
      named = named.func
    function = jax.default_matmul_precision('highest')(function)
    function.__name__ = named.__name__
  return jax.jit(function, compiler_options=options(mesh), **arguments)


# Each is recorded at its end. A program is compiled once it has been lowered.
_LOWERED = '/jax/core/compile/jaxpr_to_mlir_module_duration'
_COMPILED = '/jax/core/compile/backend_compile_duration'
_LONG = 10.0  # seconds
_log = logging.getLogger(__name__)


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
def announced(*, long: float = _LONG) -> Iterator[None]:
  """Logs which programs take long to compile, and how long they took.

  Args:
    long: seconds after which the name of a program is logged. Shorter
      compilations are not mentioned.
  """
  waiting: dict[int, threading.Timer] = {}  # thread to the line it will cause

  def listen(event: str, duration_secs: float, **kwargs) -> None:
    if event not in (_LOWERED, _COMPILED):
      return
    name = str(kwargs.get('fun_name', 'a program'))
    name = name.removeprefix('jit(').removesuffix(')').lstrip('_')
    # Programs are compiled by several threads, but by each one after the other:
    # a thread has at most one line that waits to be said.
    thread = threading.get_ident()
    if thread in waiting:
      waiting.pop(thread).cancel()
    if event == _LOWERED:
      line = f'compiling {name}: {long:.0f} s so far'
      waiting[thread] = threading.Timer(long, _log_line, (line,))
      waiting[thread].daemon = True
      waiting[thread].start()
    elif duration_secs >= long:
      _log_line(f'compiled {name} in {duration_secs:.0f} s')

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
    for timer in list(waiting.values()):
      timer.cancel()


def _log_line(line: str) -> None:
  """Logs a line, unless nobody reads the console any more."""
  with contextlib.suppress(OSError):
    _log.info(line)
