"""Keys and values of what was read, and reading on from there.

B rows, C appended tokens, D width, K key/value heads, H head size, S cache
positions, N layers, E experts that a token visits.

Beside keys and values, a mixture of experts keeps where each token went: to
send it there again (routing replay).
"""

from flax import nnx
import jax
import jax.numpy as jnp

from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import rotary
from stppo_jax.models import transformer

Array = jax.Array
# Per layer: keys, values [B, K, S, H]; with experts, their ids [B, 1, S, E].
Cache = tuple[tuple[Array, ...], ...]


def empty(config: model_config.ModelConfig, rows: int, size: int) -> Cache:
  """Zeroed keys and values for `rows` sequences of at most `size` tokens."""
  shape = (rows, config.num_kv_heads, size, config.head_dim)
  zeros = lambda: jnp.zeros(shape, config.dtype)

  def layer():
    if not config.num_experts:
      return zeros(), zeros()
    visits = (rows, 1, size, config.num_experts_per_tok)
    return zeros(), zeros(), jnp.zeros(visits, jnp.int32)

  return tuple(layer() for _ in range(config.num_layers))


def expert_ids(cache: Cache) -> Array:
  """expert_ids_BSNE of the tokens in the cache of a mixture of experts."""
  return jnp.stack([visits[:, 0] for _, _, visits in cache], axis=2)


def extend(
  module: transformer.Transformer,
  tokens_BC: Array,
  cache: Cache,
  lengths_B: Array,
  counts_B: Array,
) -> tuple[Array, Cache]:
  """Appends tokens to cached rows; decoding is the case C = 1.

  Args:
    tokens_BC: the first counts_B of each row are appended, the rest ignored.
    cache: keys and values of the first lengths_B tokens.
    lengths_B: tokens in the cache; lengths_B + counts_B <= S.
    counts_B: tokens to append, 0..C.

  Returns:
    Hidden states [B, C, D] (meaningless past counts_B) and the new cache.
  """
  B, C = tokens_BC.shape
  size = cache[0][0].shape[2]
  positions_BC = lengths_B[:, None] + jnp.arange(C)[None]
  rotation = rotary.rotation(module.config, positions_BC)
  visible_BCS = jnp.arange(size)[None, None] <= positions_BC[:, :, None]
  # Slots past the end are dropped by the scatter.
  valid_BC = jnp.arange(C)[None] < counts_B[:, None]
  slots_BC = jnp.where(valid_BC, positions_BC, size)
  rows_BC = jnp.broadcast_to(jnp.arange(B)[:, None], slots_BC.shape)
  graph, stacked = nnx.split(module.layers)

  def put(x, new):
    at = (rows_BC, slice(None), slots_BC)
    return x.at[at].set(new.astype(x.dtype), mode='drop')

  x_BCD, updated = module.embed(tokens_BC), []
  for index, (keys_BKSH, values_BKSH, *visits) in enumerate(cache):
    now = []

    def attend(q, k, v, now=now, keys=keys_BKSH, values=values_BKSH):
      now += [put(keys, k), put(values, v)]
      return attention.attention(q, *now, visible_BCS)

    params = jax.tree.map(lambda p: p[index], stacked)
    x_BCD, routing = nnx.merge(graph, params)(x_BCD, rotation, attend)
    if routing is not None:
      now += [put(*visits, routing.expert_ids[:, :, None])]
    updated.append(tuple(now))
  return module.norm(x_BCD), tuple(updated)
