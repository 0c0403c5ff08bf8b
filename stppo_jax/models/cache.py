"""Keeps a KV cache in pages.

Shape letters: B rows, C new tokens of a row in one call, P pages, N pages that
a row can have, K key and value heads, H size of a head, J positions of a page
or of the recent tokens, E experts that a token visits.

A page holds the keys and values of J adjacent tokens of a row. The host assigns
pages to rows as the rows grow. It keeps the page numbers of each row in a table
[B, N], in which a number of P or more stands for no page. Rows with a common
prefix can share pages. On a mesh, each device has pages for its own rows only,
and page numbers and P count the pages of one device.

A program reads only the first n pages of each row, where n is the number of
pages that the longest row has begun. So the cost of a token grows with the
current length of the rows, not with the largest possible length. The number of
pages that are read changes no bit of the result, see
`attention.attend_to_slices`. For each row, the kernels for TPU and GPU read
only pages that the row has begun, see the package `kernels`.

New keys and values are first kept beside the pages, in `Recent`, until `store`
moves them into pages. A loop that decodes tokens writes only to `Recent`, which
is small. The pages are an input of the loop and not a part of its carry, so the
loop neither copies nor writes them. `store` runs once per chunk of tokens,
after the loop. It updates the donated pages in place, and on a mesh each device
updates its own pages.

On a mesh, key and value heads are sharded along `tensor`. But if the size of
`tensor` does not divide the number of heads, heads are not sharded, and rows
are sharded along `tensor` too. Then no two devices hold the same head of the
same row, and only the queries and the results of attention move between
devices.

Keys and values may be stored as int8. The H numbers of one token and head then
become integers from -127 to 127 and share one scale, which is their largest
magnitude divided by 127. Keys and values in `Recent` are not quantised.

For a mixture of experts, the cache also holds the ids of the experts that each
token visited, so that training can route the token to the same experts
(routing replay).
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
# The arrays of one layer. The first two are keys and values, either of pages
# [P, K, J, H] or of the recent tokens of rows [B, K, J, H]. If these are int8,
# their two scales [..., J, 1] follow. If the layer has experts, the ids of the
# visited experts [..., 1, J, E] come last.
Block = tuple[Array, ...]
Cache = tuple[Block, ...]  # for each layer, the block of all pages
NO_PAGE = 2**30  # larger than the number of any page
Recent = tuple[Block, ...]  # for each layer, the block of recent tokens
# A scale is made from a magnitude of at least this number, so it is never zero.
_LEAST = 1e-12


def empty(
  config: model_config.ModelConfig, num_pages: int, page_size: int
) -> Cache:
  """Returns a cache of zeros.

  Args:
    config: the model's config.
    num_pages: the number of pages of all devices together.
    page_size: J, the number of positions of a page.
  """
  cache = nothing_recent(config, num_pages, page_size)
  return tuple(map(_in_8_bits, cache)) if config.cache == 'int8' else cache


def shardings(config: model_config.ModelConfig, mesh: jax.sharding.Mesh) -> Any:
  """Returns the sharding of each array of a cache on a mesh."""
  rows, heads = axes(config.num_kv_heads, mesh)
  specs = [P(rows, heads)] * (4 if config.cache == 'int8' else 2) + [P(rows)]
  page = tuple(NamedSharding(mesh, spec) for spec in specs)
  return _by_layer(config, page[:-1], page)


def row_shards(
  config: model_config.ModelConfig, mesh: jax.sharding.Mesh
) -> int:
  """Returns the number of shards that the rows of a cache are cut into."""
  return activations.extent(mesh, axes(config.num_kv_heads, mesh)[0])


def row_shards_of_host(
  config: model_config.ModelConfig, mesh: jax.sharding.Mesh
) -> int:
  """Returns the number of shards of a cache's rows that each host holds."""
  return row_shards(config, mesh) // mesh_lib.num_hosts(mesh)


def axes(
  num_kv_heads: int, mesh: jax.sharding.Mesh
) -> tuple[activations.Axes, activations.Axes]:
  """Returns the mesh axes along which rows and heads of a cache are sharded.

  The first result is for the rows. The second result is the axis for the key
  and value heads, or None if the heads are not sharded.
  """
  rows, tensor = activations.ROWS, activations.TENSOR
  if num_kv_heads % activations.extent(mesh, tensor):
    return (*rows, tensor), None
  return rows, tensor


def nothing_recent(
  config: model_config.ModelConfig, rows: int, size: int
) -> Recent:
  """Returns a `Recent` of zeros, with room for `size` tokens of each row."""
  shape = (rows, config.num_kv_heads, size, config.head_dim)
  block = jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
  visits = (rows, 1, size, config.num_experts_per_tok)
  return _by_layer(config, block, (*block, jnp.zeros(visits, jnp.int32)))


def _by_layer(config, plain, with_experts) -> tuple[Any, ...]:
  """Returns a tuple with one element for each layer.

  The element is `with_experts` for a layer with experts, or else `plain`.
  """
  return tuple(
    with_experts if config.stacks[name][0].num_experts else plain
    for name, _ in config.places
  )


def _in_8_bits(block: Block) -> Block:
  """Returns a layer's arrays with keys and values in int8, and their scales."""

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
  """Returns the ids of the experts that some tokens visited [N J, layers, E].

  The tokens are all tokens of the pages `pages_N`. The axis `layers` has only
  layers with experts: the layers for which the cache has an odd number of
  arrays.
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
  """Returns the cache with the recent tokens written into its pages.

  Callers donate the old cache, so that its pages are updated in place.

  A loop writes the rows one after another, with one contiguous write to each
  page. A scatter would write all rows in one operation, but the compiler for
  TPU would change the layout of the whole cache before and after the scatter.
  On a GPU, the loop would start thousands of kernels and take a quarter of the
  time of decoding, so a GPU uses the scatter.

  Args:
    cache: all pages.
    recent: keys and values of the tokens that follow the cached tokens.
    table_BN: int32, the page numbers of each row. Tokens beyond the pages of
      their row are dropped.
    lengths_B: the number of tokens of each row that the cache holds already.
    counts_B: the number of recent tokens of each row to store.
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
  """Returns the cache after each device has updated its own shard.

  Args:
    update: function of (*caches, *arrays) that returns the new cache. Each
      device calls it with its own shards.
    mesh: mesh that the caches are laid out on; None: one device.
    caches: the cache to update, and further trees of the same structure.
    arrays: arrays with a leading axis over rows.
  """
  if mesh is None or mesh.size == 1:
    return update(*caches, *arrays)
  cache = caches[0]
  rows, heads = axes(cache[0][0].shape[1], mesh)
  # The ids of experts have an axis of one head, which cannot be sharded.
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
  """Returns one device's pages after a loop has written the recent tokens.

  The C new tokens of a row lie in at most T adjacent pages. In each of these
  pages, the loop rewrites a window of W adjacent positions, where W is the most
  positions of a page that C tokens can fill. The new contents of all windows
  are computed before the loop, by one product with one-hot rows. If the loop
  also cut out the contents of each window, it would spend its time on starting
  small kernels.
  """
  num_pages, _, size, _ = cache[0][0].shape
  B, N = table_BN.shape
  C = recent[0][0].shape[2]
  W = min(C, size)
  # T, the largest number of pages that C adjacent tokens lie in.
  touched = (C + size - 2) // size + 1
  # If the tokens of a row lie in fewer than T pages, its remaining windows keep
  # their old contents, because `is_new_BTW` is false in them.
  numbers_BT = lengths_B[:, None] // size + jnp.arange(touched)[None]
  # For each page, the index of the new token at its first position; negative if
  # an older token is there.
  begins_BT = numbers_BT * size - lengths_B[:, None]
  pages_BT = jnp.take_along_axis(
    table_BN, jnp.minimum(numbers_BT, N - 1), axis=1
  )
  exists_BT = (numbers_BT < N) & (pages_BT < num_pages)
  pages_BT = jnp.minimum(pages_BT, num_pages - 1)
  firsts_BT = jnp.clip(-begins_BT, 0, size - W)
  # The index of the new token at each position of a window.
  tokens_BTW = (begins_BT + firsts_BT)[..., None] + jnp.arange(W)[None, None]
  is_new_BTW = (tokens_BTW >= 0) & (tokens_BTW < counts_B[:, None, None])
  is_new_BTW &= exists_BT[..., None]
  chosen_BTWC = tokens_BTW[..., None] == jnp.arange(C)[None, None, None]
  windows = jax.tree.map(
    lambda x_BKCH: jnp.einsum(
      'btwc,bkch->btkwh',
      chosen_BTWC.astype(x_BKCH.dtype),
      x_BKCH,
      precision='highest',  # exact: a sum has at most one term other than 0
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
  """Returns the same cache as `_store`, by one scatter for each array."""
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
    # One flat index addresses pages, heads and positions. With an index for
    # each axis, the compiler would copy the whole cache to make the indexed
    # axes adjacent.
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
  """Returns the cache with some pages overwritten by copies of other pages.

  Callers donate the old cache. All pages are read before any is overwritten.

  Args:
    cache: all pages.
    from_A: int32, the numbers of the A pages to copy.
    to_A: int32, the numbers of the pages to overwrite. `NO_PAGE` drops a copy.
    mesh: mesh that the cache is laid out on; None: one device.
  """

  def copied(cache, from_A, to_A):
    return jax.tree.map(
      lambda x: x.at[to_A].set(x.at[from_A].get(mode='clip'), mode='drop'),
      cache,
    )

  return _on_devices(copied, mesh, (cache,), (from_A, to_A))
