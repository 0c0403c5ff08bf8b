"""Compiles the programs of models with compiler options for each platform.

The options are arguments of the programs and do not come from the environment.
So two machines compile the same program, and a program that is compiled ahead
of time (`topology`) is the program that a run executes. The module also
measures the time of compilations, logs long compilations, and keeps compiled
programs in a folder.
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
    # If a sharded matrix has at least this many MiB, the compiler cuts a
    # product with the matrix into windows, one for each device, and multiplies
    # a window while the next window is sent. This number is so large that no
    # product is cut. With 16 or more devices, windows would be narrow: a width
    # of 1536 gives windows of 96 columns, which fill a third of the matrix
    # unit. By the compiler's estimate, an update of a 1.5B model on 16 chips
    # takes half the time without windows. Without windows, the compiler gathers
    # each matrix during the preceding product.
    'xla_jf_spmd_threshold_for_windowed_einsum_mib': 1_000_000,
  },
}


def options(mesh: jax.sharding.Mesh | None) -> dict[str, Any] | None:
  """Returns the argument `compiler_options` of `jax.jit` for a mesh."""
  return dict(OPTIONS.get(mesh_lib.platform(mesh), {})) or None


def jit(
  function: Callable[..., Any],
  *,
  mesh: jax.sharding.Mesh | None,
  dtype: str,
  **arguments: Any,
) -> Any:
  """Returns `jax.jit` of a function that computes with a model.

  By default, GPUs round the factors of float32 products to TF32, and TPUs round
  the factors to bfloat16. A float32 model would then be nearly as inexact as a
  bfloat16 model, and the engine would disagree with the trainer, because the
  programs of the two round at different points. So matrix products of float32
  models have full precision.

  Args:
    function: the function to compile.
    mesh: the devices of the program; None: the default device.
    dtype: the name of the dtype of the model's computations.
    **arguments: further arguments of `jax.jit`.
  """
  if dtype == 'float32':
    named = function
    while isinstance(named, functools.partial):
      named = named.func
    function = jax.default_matmul_precision('highest')(function)
    function.__name__ = named.__name__
  return jax.jit(function, compiler_options=options(mesh), **arguments)


# jax records these events at the end of lowering and at the end of compiling.
# Each program is lowered first and compiled next.
_LOWERED = '/jax/core/compile/jaxpr_to_mlir_module_duration'
_COMPILED = '/jax/core/compile/backend_compile_duration'
_LONG = 10.0  # seconds of a compilation after which its program is logged
_log = logging.getLogger(__name__)


def keep(folder: pathlib.Path) -> None:
  """Keeps compiled programs in a folder, where later processes find them.

  If the environment variable JAX_COMPILATION_CACHE_DIR names another folder,
  jax uses that folder instead.
  """
  # jax makes its config's attributes at run time, so pyright cannot find them.
  if not jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update('jax_compilation_cache_dir', str(folder))
  # Programs that compile fast are kept too, because a run has hundreds of them.
  if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


@contextlib.contextmanager
def measured() -> Iterator[Callable[[], float]]:
  """Yields a function that returns the compile seconds since the last call.

  Reading a program from the cache on disk counts as compiling it. The seconds
  of all threads are added up, so the sum may exceed the elapsed time.
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
  """Logs long compilations while the body runs.

  Args:
    long: seconds after which a compilation counts as long. A line with the name
      of the program is then logged, and at the end of the compilation a line
      with its seconds. Shorter compilations are not logged.
  """
  # Thread that compiles -> timer that logs the first line.
  waiting: dict[int, threading.Timer] = {}

  def listen(event: str, duration_secs: float, **kwargs) -> None:
    if event not in (_LOWERED, _COMPILED):
      return
    name = str(kwargs.get('fun_name', 'a program'))
    name = name.removeprefix('jit(').removesuffix(')').lstrip('_')
    # Several threads compile, but each thread compiles one program at a time,
    # so a thread has at most one timer.
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
  """Logs a line, and ignores the error if the console has been closed."""
  with contextlib.suppress(OSError):
    _log.info(line)
