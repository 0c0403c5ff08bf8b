"""How the programs of models are compiled, on each platform.

The options belong to the programs and not to the environment: two machines
compile the same, and a program that is compiled ahead of time (`topology`) is
the one that a run executes.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import inspect
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
    function = _exact(function)
  return jax.jit(function, compiler_options=options(mesh), **arguments)


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the function with exact products, under its own name."""
  named = function
  while isinstance(named, functools.partial):
    named = named.func

  def exact(*args, **kwargs):
    with jax.default_matmul_precision('highest'):
      return function(*args, **kwargs)

  # Under the name of the function, and with the arguments that are left of it,
  # which `jax.jit` looks up for `static_argnames`.
  functools.update_wrapper(exact, named)
  vars(exact)['__signature__'] = inspect.signature(function)
  return exact
