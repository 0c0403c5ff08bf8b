"""How the programs of models are compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from stppo_jax.models import heads
from stppo_jax.parallel import compilation


def _gradient(x_BD, output_VD, count, *, scale):
  """A loss with a product, and one whose gradient is written by hand."""

  def loss(x_BD):
    logprobs_BL, _ = heads.token_logprobs_and_entropy(
      (x_BD @ x_BD)[None],
      output_VD,
      jnp.zeros((1, 8), jnp.int32),
      loss_positions_BM=None,
      temperature=1.0,
      chunk=4,
      mesh=None,
      narrowed=False,
    )
    return scale * count * jnp.sum(logprobs_BL)

  return jax.grad(loss)(x_BD)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_products_of_float32_are_exact_also_in_gradients(dtype):
  # A bound argument and a static one stay what they are, like the name.
  program = compilation.jit(
    functools.partial(_gradient, scale=3.0),
    mesh=None,
    dtype=dtype,
    static_argnames='count',
  )
  x = jax.ShapeDtypeStruct((8, 8), dtype)
  text = program.lower(x, x, 2).as_text()
  assert 'module @jit__gradient ' in text
  products = re.findall('.*dot_general.*', text)
  assert len(products) > 4
  if dtype == 'float32':
    assert all('precision = [HIGHEST, HIGHEST]' in x for x in products)
  else:
    assert not any('HIGHEST' in x for x in products)
