"""The decoder: padding, positions, rematerialisation, and its embedding."""

import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import transformer
from stppo_jax.parallel import mesh as mesh_lib
from tests.models import tiny

_B, _L = 3, 14


def _tokens(seed=0, shape=(_B, _L)):
  return np.random.default_rng(seed).integers(0, 11, shape).astype(np.int32)


def test_later_tokens_do_not_change_earlier_states():
  model = tiny.model()
  params, tokens_BL = tiny.params(model), _tokens()
  lengths_B = np.array([5, 9, _L])
  padding_BL = np.arange(_L)[None] >= lengths_B[:, None]
  padded_BL = np.where(padding_BL, _tokens(7), tokens_BL).astype(np.int32)
  whole_BLD, padded_BLD = (
    np.asarray(tiny.hidden(model)(params, x)) for x in (tokens_BL, padded_BL)
  )
  np.testing.assert_array_equal(whole_BLD[~padding_BL], padded_BLD[~padding_BL])
  assert not np.allclose(whole_BLD[padding_BL], padded_BLD[padding_BL])


def test_layers_are_rematerialised_and_unrolled_as_configured():
  tokens_BL = _tokens()

  def program(**runtime):
    model = tiny.model(**runtime)
    return str(jax.make_jaxpr(model.hidden)(tiny.params(model), tokens_BL))

  assert 'remat' not in program() and 'unroll=1' in program()
  assert 'remat' in program(remat='full')
  assert 'unroll=2' in program(scan_unroll=2)


@pytest.mark.parametrize('axes', [(1, 1, 1), (2, 2, 2)])
def test_gradients_of_a_frequent_token_add_up_in_float32(axes):
  rng = np.random.default_rng(0)
  tokens_BL = _tokens(shape=(8, 512))
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


def test_positions_are_not_repeated_for_every_row():
  model = tiny.model()
  program = str(jax.make_jaxpr(model.hidden)(tiny.params(model), _tokens()))
  shapes = re.findall(r'f32\[([\d,]+)\] = cos ', program)
  assert shapes == [f'1,{_L},1,{model.config.head_dim // 2}']
