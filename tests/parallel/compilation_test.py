"""How the programs of models are compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from stppo_jax.models import heads
from stppo_jax.parallel import compilation


def _products(function, dtype: str, **arguments):
  """Returns the lines of the lowered program that are products."""
  x = jax.ShapeDtypeStruct((8, 8), dtype)
  program = compilation.jit(function, mesh=None, dtype=dtype, **arguments)
  return re.findall('.*dot_general.*', program.lower(x, x, 2).as_text())


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


def test_all_products_of_float32_are_exact_also_in_gradients():
  function = functools.partial(_gradient, scale=3.0)
  # A bound argument and a static one stay what they are.
  lines = _products(function, 'float32', static_argnames='count')
  assert len(lines) > 4
  assert all('precision = [HIGHEST, HIGHEST]' in line for line in lines)


def test_products_of_bfloat16_are_left_alone():
  lines = _products(functools.partial(_gradient, scale=3.0), 'bfloat16')
  assert lines and not any('HIGHEST' in line for line in lines)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_program_keeps_the_name_of_its_function(dtype):
  program = compilation.jit(
    functools.partial(_gradient, scale=3.0), mesh=None, dtype=dtype
  )
  x = jax.ShapeDtypeStruct((8, 8), dtype)
  assert 'module @jit__gradient ' in program.lower(x, x, 2).as_text()
