"""A cache of keys and values, and passes that continue from it.

B rows, C tokens read at once, D width, K heads of keys and of values, H head
size, J positions of a block of the cache or of the recent tokens, E experts
that a token visits.

A slot's keys and values lie in several blocks, and a program reads only the
first ones, up to the last block that the longest row has reached. So the cost
of a token grows with the present length of the rows, not with the greatest
possible length. The number of blocks read changes no bit of the result, see
`attention.attend_to_slices`.

New tokens are kept beside the blocks, in `Recent`, until `store` moves them
there. A loop that decodes tokens only ever appends to `Recent`, which is small;
the blocks are an input of the loop, not part of what it carries from token to
token, so they are neither copied nor written in it. `store` runs once per chunk
of tokens, after the loop, and updates the donated blocks in place, on every
device for itself.

On a mesh, heads of keys and values are sharded along `tensor`. If the devices
along `tensor` do not divide the number of heads, rows are sharded along
`tensor` too, instead of heads. Then no two devices hold the same head of a row,
and only the queries and the results of attention move between devices.

Keys and values may be stored in 8 bits. The H numbers of a token and head then
become integers of -127..127 with one scale, the largest magnitude divided by
127. Recent tokens are not rounded.

For a mixture of experts, the cache also holds the experts that each token
visited, so that training can route it to the same ones (routing replay).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import rotary
from stppo_jax.models import transformer
from stppo_jax.parallel import activations

Array = jax.Array
# Keys and values [B, K, J, H]; if they are int8, also their scales
# [B, K, J, 1]; with experts, also their ids [B, 1, J, E].
Block = tuple[Array, ...]
Cache = tuple[tuple[Block, ...], ...]  # for each layer, its blocks
Recent = tuple[Block, ...]  # for each layer; never in 8 bits
# Scales are made from this magnitude at least, so no number is divided by zero.
_LEAST = 1e-12


def empty(
  config: model_config.ModelConfig, rows: int, blocks: Sequence[int]
) -> Cache:
  """Returns a cache of zeros.

  Args:
    config: the model's shape.
    rows: number of slots.
    blocks: positions J of each block; a slot holds as many tokens as their sum.
  """

  def block(size):
    zeros = _zeros(config, rows, size)
    return _in_8_bits(zeros) if config.cache == 'int8' else zeros

  return tuple(
    tuple(block(size) for size in blocks) for _ in range(config.num_layers)
  )


def shardings(
  config: model_config.ModelConfig, mesh: jax.sharding.Mesh, num_blocks: int
) -> Any:
  """Returns the shardings of a cache with `num_blocks` blocks per layer."""
  rows, heads = _axes(config.num_kv_heads, mesh)
  specs = (P(rows, heads),) * (4 if config.cache == 'int8' else 2)
  if config.num_experts:
    specs = *specs, P(rows)
  block = tuple(NamedSharding(mesh, spec) for spec in specs)
  return ((block,) * num_blocks,) * config.num_layers


def row_shards(
  config: model_config.ModelConfig, mesh: jax.sharding.Mesh
) -> int:
  """Returns the number of devices that the rows of a cache are cut over."""
  return activations.extent(mesh, _axes(config.num_kv_heads, mesh)[0])


def _axes(
  num_kv_heads: int, mesh: jax.sharding.Mesh
) -> tuple[activations.Axes, activations.Axes]:
  """Returns the mesh axes of rows and of heads."""
  rows, tensor = activations.ROWS, activations.TENSOR
  if num_kv_heads % activations.extent(mesh, tensor):
    return (*rows, tensor), None
  return rows, tensor


def nothing_recent(
  config: model_config.ModelConfig, rows: int, size: int
) -> Recent:
  """Returns zeros with room for `size` recent tokens of each row."""
  return tuple(_zeros(config, rows, size) for _ in range(config.num_layers))


def _zeros(config, rows, size) -> Block:
  shape = (rows, config.num_kv_heads, size, config.head_dim)
  block = jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
  if not config.num_experts:
    return block
  visits = (rows, 1, size, config.num_experts_per_tok)
  return *block, jnp.zeros(visits, jnp.int32)


def _in_8_bits(block: Block) -> Block:
  """Returns a block with keys and values as integers, and their scales."""

  def scale(x_BKJH):
    largest = jnp.max(jnp.abs(x_BKJH), axis=-1, keepdims=True)
    return jnp.maximum(largest.astype(jnp.float32), _LEAST) / 127

  def whole(x_BKJH, scale_BKJ1):
    scaled = x_BKJH.astype(jnp.float32) / scale_BKJ1
    return jnp.round(scaled).astype(jnp.int8)

  arrays, rest = block[:2], block[2:]
  scales = tuple(map(scale, arrays))
  return *map(whole, arrays, scales), *scales, *rest


def expert_ids(cache: Cache) -> Array:
  """Returns the experts that cached tokens visited [B, J, layers, E].

  J counts the positions of all blocks.
  """
  visits = [[block[-1][:, 0] for block in blocks] for blocks in cache]
  return jnp.stack([jnp.concatenate(x, axis=1) for x in visits], axis=2)


def extend(
  module: transformer.Transformer,
  layers: Sequence[transformer.DecoderLayer],
  tokens_BC: Array,
  *,
  cache: Cache,
  lengths_B: Array,
  recent: Recent,
  first: Array | int,
  num_blocks: Array | int,
  slots_B: Array | None = None,
) -> tuple[Array, Recent]:
  """Returns the states of the next tokens of each row; decoding has C = 1.

  Args:
    module: the transformer, whose own layers are not used.
    layers: the layers.
    tokens_BC: token ids. A row with fewer new tokens may end with any ids,
      which change nothing before them.
    cache: all blocks; they are read, not written.
    lengths_B: tokens of each row that the cache holds.
    recent: keys and values of the tokens that follow the cached ones; the
      first `first` of them are valid.
    first: index in `recent` of the first new token; the same in all rows.
    num_blocks: how many of the first blocks to read; together they hold all
      tokens of the rows. An int leaves the other blocks out of the program. An
      array skips them by a branch when the program runs, which saves compiling
      a program for each number, where a branch is cheap.
    slots_B: the slot of the cache that each row reads, see `rows.take`; only
      blocks that are read are gathered. None: row b reads slot b.

  Returns:
    Final hidden states [B, C, D], and the recent tokens with the new ones.
  """
  C = tokens_BC.shape[1]
  places_C = first + jnp.arange(C)  # indices of the new tokens in `recent`
  rotation = rotary.rotation(module.config, lengths_B[:, None] + places_C[None])
  mesh = module.mesh
  rows, heads = (
    (None, None) if mesh is None else _axes(module.config.num_kv_heads, mesh)
  )
  x_BCD, updated = module.embed(tokens_BC), []
  for layer, blocks, old_block in zip(layers, cache, recent, strict=True):
    new_block = []

    # Defaults bind this layer's values: a closure would see the last layer's.
    def append(new_BCKH, old_block=old_block, new_block=new_block):
      old = old_block[len(new_block)]
      new = new_BCKH.swapaxes(1, 2).astype(old.dtype)
      new = activations.constrain(new, mesh, rows, heads)
      new = jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=2)
      new_block.append(activations.constrain(new, mesh, rows, heads))
      return new_block[-1]

    def attend(q, k, v, append=append, blocks=blocks):
      slices = [
        attention.KeySlice(
          k_BKJH,
          v_BKJH,
          _filled(blocks, n, lengths_B),
          n < num_blocks,
          slots_B,
          (others[0], others[1]) if k_BKJH.dtype == jnp.int8 else None,
        )
        for n, (k_BKJH, v_BKJH, *others) in enumerate(blocks)
      ]
      keys, values = append(k), append(v)
      # Among the recent tokens, each attends to itself and those before it.
      seen_1CJ = (
        jnp.arange(keys.shape[2])[None, None] <= places_C[None, :, None]
      )
      slices.append(attention.KeySlice(keys, values, seen_1CJ, True))
      q = activations.constrain(q, mesh, rows, None, heads)
      mixed = attention.attend_to_slices(q, slices)
      # The layout changes in two steps. With the second one alone the compiler
      # would move the parts of every slice instead of their mean.
      mixed = activations.constrain(mixed, mesh, rows, None, heads)
      return activations.constrain(
        mixed, mesh, activations.ROWS, None, activations.TENSOR
      )

    x_BCD, routing = layer(x_BCD, rotation, attend)
    if routing is not None:
      append(routing.expert_ids[:, :, None])
    updated.append(tuple(new_block))
  return module.norm(x_BCD), tuple(updated)


def _filled(blocks, n: int, lengths_B: Array) -> Array:
  """Returns which positions of block n each row has reached [B, 1, J]."""
  begin = sum(keys.shape[2] for keys, *_ in blocks[:n])
  positions_J = begin + jnp.arange(blocks[n][0].shape[2])
  return positions_J[None, None] < lengths_B[:, None, None]


def store(
  cache: Cache,
  recent: Recent,
  lengths_B: Array,
  counts_B: Array,
  *,
  slots_B: Array | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> Cache:
  """Returns the cache with the recent tokens appended; donate the old one.

  Rows are written one after the other, each with one contiguous write to an
  array. A scatter of all rows would do the same in one operation, but the
  compiler for TPUs changes the layout of the whole cache before and after it.

  Args:
    cache: all blocks.
    recent: keys and values of the tokens that follow the cached ones.
    lengths_B: tokens of each row that the cache holds.
    counts_B: the number of recent tokens of each row that are stored.
    slots_B: the slot of the cache that each row writes to, see `rows.put`; rows
      with a slot that the cache does not have are left out. None: row b writes
      to slot b.
    mesh: mesh that the cache is laid out on; None: one device.
  """
  if cache[0][0][0].dtype == jnp.int8:
    recent = tuple(map(_in_8_bits, recent))
  if slots_B is not None:
    slots_B = slots_B.reshape(-1)
  if mesh is None or mesh.size == 1:
    return _store(cache, recent, lengths_B, counts_B, slots_B)
  rows, heads = _axes(cache[0][0][0].shape[1], mesh)
  block = tuple(P(rows, heads if x.shape[1] > 1 else None) for x in recent[0])
  return jax.shard_map(
    _store,
    mesh=mesh,
    in_specs=(
      tuple((block,) * len(x) for x in cache),
      (block,) * len(recent),
      P(rows),
      P(rows),
      P(rows),
    ),
    out_specs=tuple((block,) * len(x) for x in cache),
    check_vma=False,
  )(cache, recent, lengths_B, counts_B, slots_B)


def _store(
  cache: Cache,
  recent: Recent,
  lengths_B: Array,
  counts_B: Array,
  slots_B: Array | None,
) -> Cache:
  """Returns the part of a cache on one device, with the recent tokens."""
  num_slots = len(cache[0][0][0])
  if slots_B is None:
    slots_B = jnp.arange(num_slots)
  counts_B = jnp.where(slots_B < num_slots, counts_B, 0)
  slots_B = jnp.minimum(slots_B, num_slots - 1)

  def one_row(row, cache):
    where = slots_B[row], lengths_B[row], counts_B[row]

    def one_layer(blocks, recent):
      begin, stored = 0, []
      for block in blocks:
        stored.append(
          tuple(
            _written(old, new[row], *where, begin)
            for old, new in zip(block, recent, strict=True)
          )
        )
        begin += block[0].shape[2]
      return tuple(stored)

    return tuple(one_layer(*layer) for layer in zip(cache, recent, strict=True))

  return jax.lax.fori_loop(0, len(lengths_B), one_row, cache)


def _written(
  old_BKJH: Array,
  new_KCH: Array,
  slot: Array,
  length: Array,
  count: Array,
  begin: int,
) -> Array:
  """Returns a block with the recent tokens of a row that belong in it.

  Args:
    old_BKJH: the block.
    new_KCH: recent tokens.
    slot: the slot to write to.
    length: position of the first recent token.
    count: the number of recent tokens that are stored.
    begin: position of the block's first token.
  """
  _, K, J, H = old_BKJH.shape
  C = new_KCH.shape[1]
  size = min(C, J)
  # Only a window of the block is rewritten. It covers the positions of all new
  # tokens in the block; its other positions keep their content.
  first = jnp.clip(length - begin, 0, J - size)
  place = (slot, 0, first, 0)
  old = jax.lax.dynamic_slice(old_BKJH, place, (1, K, size, H))
  shift = begin + first - length  # the recent token at the window's start
  padded = jnp.pad(new_KCH, ((0, 0), (size, size), (0, 0)))
  new = jax.lax.dynamic_slice_in_dim(padded, shift + size, size, axis=1)
  index = shift + jnp.arange(size)
  kept = (index >= 0) & (index < count)
  window = jnp.where(kept[None, None, :, None], new[None], old)
  return jax.lax.dynamic_update_slice(old_BKJH, window, place)
