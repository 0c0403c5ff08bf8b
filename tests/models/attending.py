"""Attention and its gradients, compared with the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import attention

H = 8


def inputs(rows, size, num_heads, num_kv_heads, dtype=np.float32):
  """Returns queries, keys and values."""
  rng = np.random.default_rng(size)
  return tuple(
    rng.normal(size=(rows, size, heads, H)).astype(dtype)
    for heads in (num_heads, num_kv_heads, num_kv_heads)
  )


def definition(visible_BLL):
  """Returns a function of queries, keys and values."""
  return lambda q, k, v: attention.attention(
    q, k.swapaxes(1, 2), v.swapaxes(1, 2), visible_BLL
  )


@functools.partial(jax.jit, static_argnums=0)
def _results(make, inputs, weights, *others):
  def loss(inputs):
    mixed_BLNH = make(*others)(*inputs)
    return jnp.sum(mixed_BLNH * weights), mixed_BLNH

  gradients, mixed_BLNH = jax.grad(loss, has_aux=True)(inputs)
  return mixed_BLNH, *gradients


def results(make, inputs, text_BL, *others):
  """Returns attention, and the gradients of a weighted sum over the text.

  `make` gives a function of queries, keys and values, from `others`.
  """
  weights = np.random.default_rng(9).normal(size=inputs[0].shape)
  weights = np.where(text_BL[..., None, None], weights, 0.0)
  return _results(make, inputs, weights.astype(np.float32), *others)


def expected(inputs, ids_BL, window=0):
  """Returns `results` of the definition; sequences are numbered from 1."""
  size = inputs[0].shape[1]
  visible_BLL = ids_BL[:, :, None] == ids_BL[:, None]
  visible_BLL &= np.tri(size, dtype=bool)
  visible_BLL &= ~np.tri(size, k=-(window or size), dtype=bool)
  return results(definition, inputs, ids_BL > 0, visible_BLL)


def everywhere(inputs):
  """Returns the number 1 of all tokens."""
  return np.ones(inputs[0].shape[:2], int)


def assert_equal_the_definition(make, inputs, *others, ids_BL=None, window=0):
  """Compares at text only; but what stands at padding has to be finite."""
  ids_BL = everywhere(inputs) if ids_BL is None else ids_BL
  mixed, *gradients = results(make, inputs, ids_BL > 0, *others)
  assert np.isfinite(mixed).all()
  definition, *theirs = expected(inputs, ids_BL, window)
  mixed, definition = (np.asarray(x)[ids_BL > 0] for x in (mixed, definition))
  np.testing.assert_allclose(mixed, definition, rtol=1e-6, atol=1e-6)
  for x, y in zip(gradients, theirs, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
