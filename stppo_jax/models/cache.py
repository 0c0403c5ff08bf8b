"""Keys and values of what was read, and reading on from there.

B rows, C appended tokens, D width, K key/value heads, H head size, S cache
positions.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import rotary
from stppo_jax.models import transformer

Array = jax.Array
Cache = tuple[tuple[Array, Array], ...]  # per layer: keys, values [B, K, S, H]


def empty(config: model_config.ModelConfig, rows: int, size: int) -> Cache:
  """Zeroed keys and values for `rows` sequences of at most `size` tokens."""
  shape = (rows, config.num_kv_heads, size, config.head_dim)
  zeros = lambda: jnp.zeros(shape, config.dtype)
  return tuple((zeros(), zeros()) for _ in range(config.num_layers))


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
  hidden_BCD, cache, _ = extend_routed(
    module, tokens_BC, cache, lengths_B, counts_B
  )
  return hidden_BCD, cache


def extend_routed(
  module: transformer.Transformer,
  tokens_BC: Array,
  cache: Cache,
  lengths_B: Array,
  counts_B: Array,
) -> tuple[Array, Cache, Array | None]:
  """`extend`, and the experts that the tokens visited.

  Returns:
    Hidden states [B, C, D], the new cache, and expert_ids_BCNE of N layers and
    E visits (meaningless past counts_B); None without experts.
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

  x_BCD, updated, visited = module.embed(tokens_BC), [], []
  for index, (keys_BKSH, values_BKSH) in enumerate(cache):

    def attend(q, k, v, keys=keys_BKSH, values=values_BKSH):
      at = (rows_BC, slice(None), slots_BC)
      keys = keys.at[at].set(k.astype(keys.dtype), mode='drop')
      values = values.at[at].set(v.astype(values.dtype), mode='drop')
      updated.append((keys, values))
      return attention.attention(q, keys, values, visible_BCS)

    params = jax.tree.map(lambda p: p[index], stacked)
    x_BCD, routing = nnx.merge(graph, params)(x_BCD, rotation, attend)
    if routing is not None:
      visited.append(routing.expert_ids)
  expert_ids_BCNE = jnp.stack(visited, axis=2) if visited else None
  return module.norm(x_BCD), tuple(updated), expert_ids_BCNE
