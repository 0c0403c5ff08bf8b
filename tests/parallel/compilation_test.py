"""The options that programs are compiled with."""

from stppo_jax.parallel import compilation
from stppo_jax.parallel import mesh as mesh_lib


def test_options_are_those_of_the_platform_of_the_mesh():
  mesh = mesh_lib.make_mesh(data=-1, fsdp=1, tensor=1)
  assert mesh_lib.platform(mesh) == mesh_lib.platform(None) == 'cpu'
  # The programs of a CPU are compiled as by default.
  assert compilation.options(mesh) is None
  assert compilation.OPTIONS.keys() == {'tpu'}
