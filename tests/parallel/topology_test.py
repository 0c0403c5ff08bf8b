"""TPU slices that are not there: their names, and programs compiled for them.

What needs the compiler for TPU is skipped without it; `pip install libtpu`
installs it on any Linux machine.
"""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.parallel import topology

_THERE = importlib.util.find_spec('libtpu') is not None
needs_libtpu = pytest.mark.skipif(not _THERE, reason='libtpu is not installed')


@pytest.mark.parametrize('name', ['v5e', 'v5e:16', 'v9:2x2', 'v5e:2x2x2x2', ''])
def test_a_name_that_is_no_slice_is_refused(name):
  with pytest.raises(ValueError, match='such as v5e:4x4; generations: v4, v5e'):
    topology.devices(name)


@pytest.mark.skipif(_THERE, reason='libtpu is installed')
def test_without_the_compiler_the_error_says_what_to_install():
  with pytest.raises(ValueError, match='^v5e:2x2: needs the package libtpu'):
    topology.devices('v5e:2x2')


@needs_libtpu
def test_programs_are_compiled_for_chips_that_are_not_there():
  devices = topology.devices('v5e:2x4')
  mesh = mesh_lib.make_mesh(data=1, fsdp=8, tensor=1, devices=devices)
  assert mesh_lib.platform(mesh) == 'tpu'
  square = jax.jit(lambda x: jnp.tanh(x @ x) @ x)

  def shape(size):
    layout = sharding.replicated(mesh)
    return jax.ShapeDtypeStruct((size, size), jnp.float32, sharding=layout)

  compiled = topology.compiled(square.lower(shape(512)))
  assert compiled.memory_analysis().argument_size_in_bytes == 4 * 512**2
  with pytest.raises(topology.DoesNotFit, match=r'^needs .*GiB of 15.75GiB on'):
    topology.compiled(square.lower(shape(60_000)))
