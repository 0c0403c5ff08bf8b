"""Attention: each query looks at the keys it may see.

B rows, L queries, S keys, Q query heads, K key/value heads, G = Q / K, H head
size.

`attention` is the definition, takes any mask and runs everywhere. Whole
sequences may be left to a kernel of the platform, by a name of `WHOLE`; those
know causal masks only, so decoding from a cache always uses `attention`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp

from stppo_jax.models import splash
from stppo_jax.parallel import activations

Array = jax.Array
Attend = Callable[[Array, Array, Array], Array]

_MASKED = -1e30  # finite: a row of nothing but masked scores stays finite


def attention(
  q_BLQH: Array, k_BKSH: Array, v_BKSH: Array, visible_BLS: Array
) -> Array:
  """softmax(q k / √H) v in float32 scores; keys are shared, never repeated."""
  return over_parts(q_BLQH, [(k_BKSH, v_BKSH, visible_BLS)])


def over_parts(
  q_BLQH: Array, parts: Sequence[tuple[Array, Array, Array]]
) -> Array:
  """Attention to keys that lie apart, as if they followed one another.

  Parts are looked at one by one and added up in order, so that one of which
  nothing is visible adds an exact zero.

  Args:
    q_BLQH: queries.
    parts: keys [B, K, S, H], values and what is visible [B or 1, L or 1, S], S
      of each part its own.
  """
  B, L, Q, H = q_BLQH.shape
  K = parts[0][0].shape[1]
  q_BLKGH = q_BLQH.reshape(B, L, K, Q // K, H) * H**-0.5
  scores = []
  for k_BKSH, _, visible_BLS in parts:
    part = jnp.einsum(
      'blkgh,bksh->bkgls',
      q_BLKGH,
      k_BKSH,
      preferred_element_type=jnp.float32,
    )
    scores.append(jnp.where(visible_BLS[:, None, None], part, _MASKED))
  largest = functools.reduce(
    jnp.maximum, [jnp.max(x, axis=-1, keepdims=True) for x in scores]
  )
  largest = jax.lax.stop_gradient(largest)
  mixed = total = 0.0
  # Normalised after the product with v: H divisions a query, not S.
  for part, (_, v_BKSH, _) in zip(scores, parts):
    weights = jnp.exp(part - largest)
    total += jnp.sum(weights, axis=-1, keepdims=True)
    mixed += jnp.einsum(
      'bkgls,bksh->bkglh', weights.astype(v_BKSH.dtype), v_BKSH
    )
  mixed = mixed / total.astype(mixed.dtype)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(B, L, Q, H)


def whole(
  name: str,
  size: int,
  lengths_B: Array | None,
  mesh: jax.sharding.Mesh | None,
) -> Attend:
  """Causal attention of right-padded sequences from their first token on.

  Call it once, outside a scan over layers: what all layers share is made here.

  Args:
    name: a key of `WHOLE`.
    size: L, tokens of a row with its padding.
    lengths_B: tokens of each row without; int32; None: all.
    mesh: that activations lie on; None: one device.

  Returns:
    attend(q_BLQH, k_BLKH, v_BLKH): what each query found [B, L, Q, H]. At
    padding it is finite and without meaning.
  """
  return WHOLE[name](size, lengths_B, mesh)


def choose(name: str, *, dtype: str, head_dim: int, platform: str) -> str:
  """The key of `WHOLE` that a config means.

  Args:
    name: one of those, or 'auto' for the fastest that runs here.
    dtype: of the activations.
    head_dim: H.
    platform: 'cpu', 'gpu' or 'tpu'.

  Raises:
    ValueError: it does not run here; a line that lists what does.
  """
  runs = {
    'cudnn': platform == 'gpu'
    and dtype in ('bfloat16', 'float16')
    and head_dim % 8 == 0
    and head_dim <= 128,
    'splash': platform == 'tpu',
    'xla': True,
  }
  here = [choice for choice, does in runs.items() if does]
  if name == 'auto':
    return here[0]
  if name not in here:
    raise ValueError(
      f'model.attention={name}: does not run on {platform} with '
      f'dtype={dtype}, head_dim={head_dim}; choices here: auto, '
      + ', '.join(here)
    )
  return name


def _xla(size: int, lengths_B: Array | None, mesh) -> Attend:
  """The oracle. What comes after a query is padding first: no mask for it."""
  del lengths_B, mesh
  causal_1LL = jnp.tril(jnp.ones((size, size), bool))[None]
  return lambda q, k, v: attention(
    q, k.swapaxes(1, 2), v.swapaxes(1, 2), causal_1LL
  )


def _cudnn(size: int, lengths_B: Array | None, mesh) -> Attend:
  """Fused, on GPU; without the scores of padding."""
  options = {'is_causal': True, 'implementation': 'cudnn'}
  valid_BL11 = None
  if lengths_B is not None:
    valid_BL = jnp.arange(size)[None] < lengths_B[:, None]
    valid_BL11 = valid_BL[:, :, None, None]
    # A row of nothing would divide by zero.
    lengths_B = jnp.maximum(lengths_B, 1).astype(jnp.int32)
    options['query_seq_lengths'] = options['key_value_seq_lengths'] = lengths_B

  def attend(q_BLQH, k_BLKH, v_BLKH):
    inputs = (q_BLQH, k_BLKH, v_BLKH)
    if mesh is not None:  # the kernel wants all three cut alike
      heads = activations.TENSOR
      if k_BLKH.shape[2] % activations.extent(mesh, heads):
        heads = None
      inputs = (
        activations.constrain(x, mesh, activations.ROWS, None, heads)
        for x in inputs
      )
    if valid_BL11 is None:
      return jax.nn.dot_product_attention(*inputs, **options)
    # What the kernel leaves at padding, also in the gradients, is undefined.
    inputs = (jnp.where(valid_BL11, x, 0) for x in inputs)
    mixed_BLQH = jax.nn.dot_product_attention(*inputs, **options)
    return jnp.where(valid_BL11, mixed_BLQH, 0)

  return attend


WHOLE: Mapping[str, Callable[..., Attend]] = {
  'xla': _xla,
  'cudnn': _cudnn,
  'splash': splash.attend,
}
