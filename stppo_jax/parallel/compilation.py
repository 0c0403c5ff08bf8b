"""The options with which programs are compiled, for each platform.

They belong to the programs and not to the environment: two machines compile the
same, and a program that is compiled ahead of time (`topology`) is the one that
a run executes.
"""

from collections.abc import Mapping
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
