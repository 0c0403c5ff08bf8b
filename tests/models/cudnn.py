"""Stands in for cuDNN, which runs on GPUs only."""

import jax
import jax.numpy as jnp
import numpy as np

_PLAIN = jax.nn.dot_product_attention


def stand_in(q, k, v, *, implementation, **options):
  """Has the kernel's interface, and writes garbage at padding.

  There is garbage in the gradients, too.
  """
  assert implementation == 'cudnn' and options['is_causal']
  lengths_B = options.get('query_seq_lengths')
  assert lengths_B is options.get('key_value_seq_lengths')
  if lengths_B is None:
    return _PLAIN(q, k, v, implementation='xla', **options)
  assert lengths_B.dtype == np.int32
  padding_BL = np.arange(q.shape[1])[None] >= lengths_B[:, None]
  padding_BL |= jnp.any(lengths_B < 1)  # it would divide by zero
  inputs = (_spoils_gradient(x, padding_BL) for x in (q, k, v))
  mixed = _PLAIN(*inputs, implementation='xla', **options)
  return _spoiled(mixed, padding_BL)


def _spoiled(x, padding_BL):
  return jnp.where(padding_BL[..., None, None], jnp.nan, x)


@jax.custom_vjp
def _spoils_gradient(x, padding_BL):
  del padding_BL
  return x


_spoils_gradient.defvjp(
  lambda x, padding_BL: (x, padding_BL),
  lambda padding_BL, g: (_spoiled(g, padding_BL), None),
)
