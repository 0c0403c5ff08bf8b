"""Attention: each query looks at the keys it may see.

B rows, L queries, S keys, Q query heads, K key/value heads, G = Q / K, H head
size.

`attention` is the definition, takes any mask and runs everywhere. Whole
sequences are attended to in blocks, or by a kernel of the platform, by a name
of `WHOLE`; those know causal masks only, so decoding from a cache always uses
`over_parts`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.models import blockwise
from stppo_jax.models import splash
from stppo_jax.parallel import activations

Array = jax.Array
Attend = Callable[[Array, Array, Array], Array]

_MASKED = -1e30  # finite: a row of nothing but masked scores stays finite
# Tokens of a block; scores of a pair of them stay in a CPU's cache, and are
# worth the start of a kernel elsewhere.
_CPU_BLOCK, _BLOCK = 80, 512


def attention(
  q_BLQH: Array, k_BKSH: Array, v_BKSH: Array, visible_BLS: Array
) -> Array:
  """softmax(q k / √H) v in float32 scores; keys are shared, never repeated."""
  q_BKGLH = _by_head(q_BLQH, k_BKSH.shape[1])
  weights, total, _ = _weights(q_BKGLH, k_BKSH, visible_BLS)
  # Normalised after the product with v: H divisions a query, not S.
  mixed = _mixed(weights, v_BKSH)
  return _by_query(mixed / total.astype(mixed.dtype))


class Part(NamedTuple):
  """Some of the keys that queries look at.

  Attributes:
    k_BKSH, v_BKSH: keys and values; S of each part its own.
    visible_BLS: what may be seen; its B and L may be 1.
    needed: a scalar, False where nothing of it is visible: it is not read.
    rows_B: whose keys and values they are that each row looks at, of keys and
      values with any number of rows; None: its own.
  """

  k_BKSH: Array
  v_BKSH: Array
  visible_BLS: Array
  needed: Array | bool
  rows_B: Array | None = None


def over_parts(q_BLQH: Array, parts: Sequence[Part]) -> Array:
  """Attention to keys that lie apart, as if they followed one another.

  Each part is looked at by itself, and added up in order. One of which a query
  sees nothing adds an exact zero, so that it makes no difference to a bit of
  the result whether such a part is read.
  """

  q_BKGLH = _by_head(q_BLQH, parts[0].k_BKSH.shape[1])

  def read(part):
    k_BKSH, v_BKSH = part.k_BKSH, part.v_BKSH
    if part.rows_B is not None:
      k_BKSH, v_BKSH = (
        x.at[part.rows_B].get(mode='clip') for x in (k_BKSH, v_BKSH)
      )
    weights, total, largest = _weights(q_BKGLH, k_BKSH, part.visible_BLS)
    return _mixed(weights, v_BKSH), total, largest

  def nothing(part):
    mixed, total, largest = jax.eval_shape(read, part)
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    return zeros(mixed), zeros(total), jnp.full_like(zeros(largest), _MASKED)

  # Which are read is known when tracing, or a branch is taken when running.
  found = [
    jax.lax.cond(part.needed, read, nothing, part._replace(needed=True))
    for part in parts
  ]
  largest = functools.reduce(jnp.maximum, [x for *_, x in found])
  mixed = total = 0.0
  for part_mixed, part_total, part_largest in found:
    scale = jnp.exp(part_largest - largest)
    mixed += part_mixed * scale.astype(part_mixed.dtype)
    total += part_total * scale
  return _by_query(mixed / total.astype(mixed.dtype))


def _by_head(q_BLQH: Array, K: int) -> Array:
  """q / √H as [B, K, G, L, H]: laid out once, whatever it is compared with."""
  B, L, Q, H = q_BLQH.shape
  q_BLKGH = (q_BLQH * H**-0.5).reshape(B, L, K, Q // K, H)
  return q_BLKGH.transpose(0, 2, 3, 1, 4)


def _weights(
  q_BKGLH: Array, k_BKSH: Array, visible_BLS: Array
) -> tuple[Array, Array, Array]:
  """exp(scores - their largest) [B, K, G, L, S], their sum, and the largest."""
  scores = _by_rows(
    'bknh,bksh->bkns', q_BKGLH, k_BKSH, preferred_element_type=jnp.float32
  )
  scores = jnp.where(visible_BLS[:, None, None], scores, _MASKED)
  largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.exp(scores - largest)
  return weights, jnp.sum(weights, axis=-1, keepdims=True), largest


def _mixed(weights: Array, v_BKSH: Array) -> Array:
  return _by_rows('bkns,bksh->bknh', weights.astype(v_BKSH.dtype), v_BKSH)


def _by_rows(equation: str, x: Array, y: Array, **options) -> Array:
  """A product with x [B, K, G, L, ...]: its G and L are rows of one matrix."""
  B, K, G, L, _ = x.shape
  flat = jnp.einsum(equation, x.reshape(B, K, G * L, -1), y, **options)
  return flat.reshape(B, K, G, L, -1)


def _by_query(mixed: Array) -> Array:
  """[B, K, G, L, H] -> [B, L, Q, H]."""
  B, K, G, L, H = mixed.shape
  return mixed.transpose(0, 3, 1, 2, 4).reshape(B, L, K * G, H)


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
  """Runs everywhere; by the definition up to one block, then in blocks.

  What comes after a query is padding first: no mask for it.
  """
  del lengths_B
  block = _CPU_BLOCK if jax.default_backend() == 'cpu' else _BLOCK
  if size > block:
    return blockwise.attend(size, block, mesh)
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
