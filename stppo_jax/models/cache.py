"""Keeps keys and values in pages.

B rows, C tokens read at once, D width, P pages, N pages that a row can have, K
heads of keys and of values, H head size, J positions of a page or of the recent
tokens, E experts that a token visits.

A page holds the keys and values of J adjacent tokens of a row. The host gives
pages to rows as they grow, and keeps the numbers of each row's pages in a table
[B, N], in which P or more stands for no page. Rows with a prefix in common can
share pages. On a mesh, each device has its own pages and rows, and a number
counts the pages of one device.

A program reads only the first pages of each row, up to the last one that the
longest row has begun, so the cost of a token grows with the present length of
the rows, not with the greatest possible length. The number of pages read
changes no bit of the result, see `attention.attend_to_slices`. A kernel for
TPU or GPU reads no page that its row has not begun, see `kernels`.

New tokens are kept beside the pages, in `Recent`, until `store` moves them
there. A loop that decodes tokens only ever appends to `Recent`, which is small;
the pages are an input of the loop, not part of what it carries from token to
token, so they are neither copied nor written in it. `store` runs once per chunk
of tokens, after the loop, and updates the donated pages in place, on every
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

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from stppo_jax.models import config as model_config
from stppo_jax.parallel import activations
from stppo_jax.parallel import mesh as mesh_lib

Array = jax.Array
# Keys and values of pages [P, K, J, H], or of as many positions of rows
# [B, K, J, H]; if they are int8, also their scales [..., J, 1]; with experts,
# also their ids [..., 1, J, E].
Block = tuple[Array, ...]
Cache = tuple[Block, ...]  # for each layer, all pages
NO_PAGE = 2**30  # larger than any number of pages
Recent = tuple[Block, ...]  # for each layer, of rows; never in 8 bits
# Scales are made from this magnitude at least, so no number is divided by zero.
_LEAST = 1e-12


def empty(
  config: model_config.ModelConfig, num_pages: int, page_size: int
) -> Cache:
  """Returns a cache of zeros.

  Args:
    config: the model's shape.
    num_pages: P, of all devices.
    page_size: J.
  """
  cache = nothing_recent(config, num_pages, page_size)
  return tuple(map(_in_8_bits, cache)) if config.cache == 'int8' else cache


def shardings(config: model_config.ModelConfig, mesh: jax.sharding.Mesh) -> Any:
  """Returns the layout of a cache on a mesh."""
  rows, heads = axes(config.num_kv_heads, mesh)
  specs = [P(rows, heads)] * (4 if config.cache == 'int8' else 2) + [P(rows)]
  page = tuple(NamedSharding(mesh, spec) for spec in specs)
  return _by_layer(config, page[:-1], page)


def row_shards(
  config: model_config.ModelConfig, mesh: jax.sharding.Mesh
) -> int:
  """Returns the number of devices that the rows of a cache are cut over."""
  return activations.extent(mesh, axes(config.num_kv_heads, mesh)[0])


def row_shards_of_host(
  config: model_config.ModelConfig, mesh: jax.sharding.Mesh
) -> int:
  """Returns how many of the `row_shards` of a mesh each of its hosts has."""
  return row_shards(config, mesh) // mesh_lib.num_hosts(mesh)


def axes(
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
  shape = (rows, config.num_kv_heads, size, config.head_dim)
  block = jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
  visits = (rows, 1, size, config.num_experts_per_tok)
  return _by_layer(config, block, (*block, jnp.zeros(visits, jnp.int32)))


def _by_layer(config, plain, with_experts) -> tuple[Any, ...]:
  """Returns one of two blocks for each layer."""
  return tuple(
    with_experts if config.stacks[name][0].num_experts else plain
    for name, _ in config.places
  )


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


def expert_ids(cache: Cache, pages_N: Array) -> Array:
  """Returns the experts that the tokens of pages visited [N J, layers, E].

  Layers without experts are left out: they have an even number of arrays.
  """
  visits = [page[-1][pages_N, 0] for page in cache if len(page) % 2]
  return jnp.stack([x.reshape(-1, x.shape[-1]) for x in visits], axis=1)


def store(
  cache: Cache,
  recent: Recent,
  table_BN: Array,
  lengths_B: Array,
  counts_B: Array,
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> Cache:
  """Returns the cache with the recent tokens appended; donate the old one.

  Rows are written one after the other, each with a contiguous write to each
  page. A scatter of all rows does the same in one operation, but the compiler
  for TPUs changes the layout of the whole cache before and after it. On a GPU
  the loop would start thousands of kernels, a quarter of the time of decoding,
  so there it is a scatter.

  Args:
    cache: all pages.
    recent: keys and values of the tokens that follow the cached ones.
    table_BN: int32, the pages of each row. What belongs to no page is dropped.
    lengths_B: tokens of each row that the cache holds.
    counts_B: the number of recent tokens of each row that are stored.
    mesh: mesh that the cache is laid out on; None: one device.
  """
  if cache[0][0].dtype == jnp.int8:
    recent = tuple(map(_in_8_bits, recent))
  write = _scatter if mesh_lib.platform(mesh) == 'gpu' else _store
  return _on_devices(
    write, mesh, (cache, recent), (table_BN, lengths_B, counts_B)
  )


def _on_devices(
  update: Callable[..., Cache],
  mesh: jax.sharding.Mesh | None,
  caches: tuple[Cache, ...],
  arrays: tuple[Array, ...],
) -> Cache:
  """Returns the cache that each device updates with arrays of its own rows."""
  if mesh is None or mesh.size == 1:
    return update(*caches, *arrays)
  cache = caches[0]
  rows, heads = axes(cache[0][0].shape[1], mesh)
  # The ids of experts have one head.
  layers = jax.tree.map(
    lambda x: P(rows, heads if x.shape[1] > 1 else None), cache
  )
  return jax.shard_map(
    update,
    mesh=mesh,
    in_specs=(layers,) * len(caches) + (P(rows),) * len(arrays),
    out_specs=layers,
    check_vma=False,
  )(*caches, *arrays)


def _store(
  cache: Cache,
  recent: Recent,
  table_BN: Array,
  lengths_B: Array,
  counts_B: Array,
) -> Cache:
  """Returns the part of a cache on one device, with the recent tokens.

  Of each page that a row's new tokens lie in, a window of W positions is
  rewritten: all that C new tokens can touch. The windows of all rows are made
  in one product with rows of the identity matrix. A loop that cut them out one
  by one would spend its time on starting small kernels.
  """
  num_pages, _, size, _ = cache[0][0].shape
  B, N = table_BN.shape
  C = recent[0][0].shape[2]
  W = min(C, size)
  touched = (C + size - 2) // size + 1  # most pages that C tokens lie in
  # A row that touches fewer pages than that has further windows, which are
  # rewritten with what is there: `is_new` is false in all of them.
  numbers_BT = lengths_B[:, None] // size + jnp.arange(touched)[None]
  begins_BT = numbers_BT * size - lengths_B[:, None]  # in new tokens
  pages_BT = jnp.take_along_axis(
    table_BN, jnp.minimum(numbers_BT, N - 1), axis=1
  )
  exists_BT = (numbers_BT < N) & (pages_BT < num_pages)
  pages_BT = jnp.minimum(pages_BT, num_pages - 1)
  firsts_BT = jnp.clip(-begins_BT, 0, size - W)
  # The new token at each position of a window.
  tokens_BTW = (begins_BT + firsts_BT)[..., None] + jnp.arange(W)[None, None]
  is_new_BTW = (tokens_BTW >= 0) & (tokens_BTW < counts_B[:, None, None])
  is_new_BTW &= exists_BT[..., None]
  chosen_BTWC = tokens_BTW[..., None] == jnp.arange(C)[None, None, None]
  windows = jax.tree.map(
    lambda x_BKCH: jnp.einsum(
      'btwc,bkch->btkwh',
      chosen_BTWC.astype(x_BKCH.dtype),
      x_BKCH,
      precision='highest',  # exact: each sum has one term that is not 0
      preferred_element_type=x_BKCH.dtype,
    ),
    recent,
  )

  def one_page(index, cache):
    row, part = index // touched, index % touched
    place = pages_BT[row, part], 0, firsts_BT[row, part], 0
    is_new_1W1 = is_new_BTW[row, part][None, :, None]

    def written(old_PKJH, windows_BTKWH):
      new = windows_BTKWH[row, part]
      old = jax.lax.dynamic_slice(old_PKJH, place, (1, *new.shape))
      window = jnp.where(is_new_1W1, new, old)
      return jax.lax.dynamic_update_slice(old_PKJH, window, place)

    return jax.tree.map(written, cache, windows)

  return jax.lax.fori_loop(0, B * touched, one_page, cache)


def _scatter(
  cache: Cache,
  recent: Recent,
  table_BN: Array,
  lengths_B: Array,
  counts_B: Array,
) -> Cache:
  """Returns what `_store` returns, by a scatter for each array."""
  num_pages, _, size, _ = cache[0][0].shape
  N = table_BN.shape[1]
  new_1C = jnp.arange(recent[0][0].shape[2])[None]
  positions_BC = lengths_B[:, None] + new_1C
  numbers_BC = positions_BC // size
  pages_BC = jnp.take_along_axis(
    table_BN, jnp.minimum(numbers_BC, N - 1), axis=1
  )
  stored_BC = (new_1C < counts_B[:, None]) & (numbers_BC < N)
  stored_BC &= pages_BC < num_pages

  def written(old_PKJH, new_BKCH):
    K, H = old_PKJH.shape[1], old_PKJH.shape[3]
    # One index over pages, heads and positions. With several, the compiler
    # would copy the whole cache to bring their axes together.
    old_XH, new_YH = old_PKJH.reshape(-1, H), new_BKCH.reshape(-1, H)
    heads_1K1 = jnp.arange(K)[None, :, None]
    index_BKC = (pages_BC[:, None] * K + heads_1K1) * size
    index_BKC += (positions_BC % size)[:, None]
    nowhere_BKC = len(old_XH) + jnp.arange(len(new_YH)).reshape(index_BKC.shape)
    index_BKC = jnp.where(stored_BC[:, None], index_BKC, nowhere_BKC)
    old_XH = old_XH.at[index_BKC.reshape(-1)].set(
      new_YH, mode='drop', unique_indices=True
    )
    return old_XH.reshape(old_PKJH.shape)

  return jax.tree.map(written, cache, recent)


def copy_pages(
  cache: Cache,
  from_A: Array,
  to_A: Array,
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> Cache:
  """Returns the cache with copies of pages; donate the old one.

  All pages are read before any is overwritten.

  Args:
    cache: all pages.
    from_A: int32, the pages that are copied.
    to_A: int32, where they are copied to; `NO_PAGE`: nowhere.
    mesh: mesh that the cache is laid out on; None: one device.
  """

  def copied(cache, from_A, to_A):
    return jax.tree.map(
      lambda x: x.at[to_A].set(x.at[from_A].get(mode='clip'), mode='drop'),
      cache,
    )

  return _on_devices(copied, mesh, (cache,), (from_A, to_A))
