"""Keys and values of what was read, and reading on from there.

B rows, C tokens read at once, D width, K key/value heads, H head size, S
positions of a block, N positions of what is recent, E experts that a token
visits.

A row's keys and values lie in blocks of S positions, of which only the first
ones are looked at, as many as the longest row has begun: a token costs what its
row is long, not what it may become. How many are looked at changes no bit of
the result, see `attention.over_parts`.

What is being read stands beside the blocks (`Recent`) until `store` puts it
there, so that a loop over tokens never carries the blocks.

Beside keys and values, a mixture of experts keeps where each token went: to
send it there again (routing replay).
"""

from collections.abc import Sequence

from flax import nnx
import jax
import jax.numpy as jnp

from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import rotary
from stppo_jax.models import transformer

Array = jax.Array
# Keys, values [B, K, S or N, H]; with experts, their ids [B, 1, S or N, E].
Block = tuple[Array, ...]
Cache = tuple[tuple[Block, ...], ...]  # of each layer
Recent = tuple[Block, ...]  # of each layer


def empty(
  config: model_config.ModelConfig, rows: int, blocks: Sequence[int]
) -> Cache:
  """Zeroed keys and values.

  Args:
    config: the shape.
    rows: B.
    blocks: S of each block; a row holds at most their sum.
  """
  return tuple(
    tuple(_zeros(config, rows, size) for size in blocks)
    for _ in range(config.num_layers)
  )


def nothing_recent(
  config: model_config.ModelConfig, rows: int, size: int
) -> Recent:
  """Room for N = `size` tokens of each row."""
  return tuple(_zeros(config, rows, size) for _ in range(config.num_layers))


def _zeros(config, rows, size) -> Block:
  shape = (rows, config.num_kv_heads, size, config.head_dim)
  block = jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
  if not config.num_experts:
    return block
  visits = (rows, 1, size, config.num_experts_per_tok)
  return *block, jnp.zeros(visits, jnp.int32)


def expert_ids(cache: Cache) -> Array:
  """expert_ids of the tokens in the cache of a mixture of experts.

  N is layers, S the positions of all blocks.
  """
  visits = [[block[2][:, 0] for block in blocks] for blocks in cache]
  return jnp.stack([jnp.concatenate(x, axis=1) for x in visits], axis=2)


def extend(
  module: transformer.Transformer,
  layers: Sequence,
  tokens_BC: Array,
  *,
  cache: Cache,
  lengths_B: Array,
  recent: Recent,
  first: Array | int,
  num_blocks: Array | int,
  slots_B: Array | None = None,
) -> tuple[Array, Recent]:
  """Reads tokens; decoding is the case C = 1.

  Args:
    module: all but its layers is used.
    layers: parameters of each layer.
    tokens_BC: a row that has fewer ends with any others: they change nothing
      that stands before them.
    cache: all blocks.
    lengths_B: tokens in the cache.
    recent: of the `first` tokens that followed them.
    first: the place of the first new token among the recent ones; the same in
      all rows.
    num_blocks: the first so many blocks hold all that rows of interest have
      read. An int leaves the others out of the program; an array is for where
      a branch is cheap, and spares the compiling of a program for each number.
    slots_B: the cache's row of each of these, of which only blocks that are
      looked at are taken out; None: they are its rows.

  Returns:
    Hidden states [B, C, D] and what is recent now.
  """
  C = tokens_BC.shape[1]
  at_C = first + jnp.arange(C)
  rotation = rotary.rotation(module.config, lengths_B[:, None] + at_C[None])
  graph, _ = nnx.split(module.layers)
  x_BCD, updated = module.embed(tokens_BC), []
  for params, blocks, held in zip(layers, cache, recent):
    now = []

    def put(new_BCNH, held=held, now=now):
      old = held[len(now)]
      new = new_BCNH.swapaxes(1, 2).astype(old.dtype)
      now.append(jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=2))
      return now[-1]

    def attend(q, k, v, put=put, blocks=blocks):
      parts = [
        attention.Part(
          *block[:2], _filled(blocks, n, lengths_B), n < num_blocks, slots_B
        )
        for n, block in enumerate(blocks)
      ]
      keys, values = put(k), put(v)
      before_1CN = jnp.arange(keys.shape[2])[None, None] <= at_C[None, :, None]
      parts.append(attention.Part(keys, values, before_1CN, True))
      return attention.over_parts(q, parts)

    x_BCD, routing = nnx.merge(graph, params)(x_BCD, rotation, attend)
    if routing is not None:
      put(routing.expert_ids[:, :, None])
    updated.append(tuple(now))
  return module.norm(x_BCD), tuple(updated)


def _filled(blocks, n: int, lengths_B: Array) -> Array:
  """[B, 1, S], the positions of block n that a row has reached."""
  begin = sum(keys.shape[2] for keys, *_ in blocks[:n])
  positions_S = begin + jnp.arange(blocks[n][0].shape[2])
  return positions_S[None, None] < lengths_B[:, None, None]


def store(
  cache: Cache,
  recent: Recent,
  lengths_B: Array,
  counts_B: Array,
  slots_B: Array | None = None,
) -> Cache:
  """Puts what is recent behind what the blocks hold; donate the cache.

  Args:
    cache: all blocks.
    recent: of the tokens after the first lengths_B.
    lengths_B: tokens in the cache.
    counts_B: how many recent tokens to keep.
    slots_B: the cache's row of each of these; None: they are its rows. One that
      it has not is left out.
  """
  N = recent[0][0].shape[2]
  rows = len(cache[0][0][0])
  if slots_B is None:
    slots_B = jnp.arange(rows)
  kept_BN = jnp.arange(N)[None] < counts_B[:, None]
  rows_BN = jnp.where(kept_BN, slots_B[:, None], rows)
  positions_BN = lengths_B[:, None] + jnp.arange(N)[None]

  def one_layer(blocks, recent):
    begin, stored = 0, []
    for block in blocks:
      S = block[0].shape[2]
      # One before the block is no place from its end.
      inside_BN = (positions_BN >= begin) & (positions_BN < begin + S)
      at = (jnp.where(inside_BN, rows_BN, rows), slice(None))
      at = (*at, positions_BN - begin)
      stored.append(
        tuple(
          old.at[at].set(new.swapaxes(1, 2), mode='drop')
          for old, new in zip(block, recent)
        )
      )
      begin += S
    return tuple(stored)

  return tuple(one_layer(*layer) for layer in zip(cache, recent))
