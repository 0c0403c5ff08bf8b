"""The decoder: positions, rematerialisation, and its embedding."""

import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import transformer
from stppo_jax.parallel import mesh as mesh_lib
from tests.models import tiny

_L = 14


def _tokens(shape=(3, _L)):
  return np.random.default_rng(0).integers(0, 11, shape).astype(np.int32)


def test_a_program_is_rematerialised_and_unrolled_as_configured():
  def program(**runtime):
    model = tiny.model(**runtime)
    return str(jax.make_jaxpr(model.hidden)(tiny.params(model), _tokens()))

  plain, other = program(), program(remat='full', scan_unroll=2)
  assert 'remat' not in plain and 'unroll=1' in plain
  assert 'remat' in other and 'unroll=2' in other
  # Positions are not repeated for every row.
  assert re.findall(r'f32\[([\d,]+)\] = cos ', plain) == [f'1,{_L},1,4']


@pytest.mark.parametrize('axes', [(1, 1, 1), (2, 2, 2)])
def test_gradients_of_a_frequent_token_add_up_in_float32(axes):
  rng = np.random.default_rng(0)
  tokens_BL = _tokens((8, 512))
  tokens_BL[rng.random(tokens_BL.shape) < 0.6] = 4
  config = tiny.model(vocab_size=16, dtype='bfloat16').config
  mesh = mesh_lib.make_mesh(
    **dict(zip(('data', 'fsdp', 'tensor'), axes)),
    devices=jax.devices()[: np.prod(axes)],
  )

  def embed(table_VD):
    module = transformer.Transformer(
      config, head='scalar', mesh=mesh, rngs=nnx.Rngs(0)
    )
    module.embedding = nnx.Param(table_VD)
    return module.embed(tokens_BL)

  table_VD = rng.normal(size=(16, 16)).astype(jnp.bfloat16)
  shape = (*tokens_BL.shape, 16)
  cotangent_BLD = rng.normal(1.0, size=shape).astype(jnp.bfloat16)
  pull = lambda table, g: jax.vjp(embed, table)[1](g)[0]
  found_VD = np.asarray(jax.jit(pull)(table_VD, cotangent_BLD))
  wanted_VD = np.zeros((16, 16))
  np.add.at(wanted_VD, tokens_BL, cotangent_BLD.astype(np.float64))
  assert found_VD.dtype == jnp.bfloat16
  # Only sums are rounded, to 8 bits: that of each device before it is sent, and
  # that of all devices.
  rtol = 2**-8 if mesh.size == 1 else 2**-7
  np.testing.assert_allclose(
    found_VD.astype(np.float64), wanted_VD, rtol=rtol, atol=1e-2
  )
