"""Computes the hidden states of new tokens in rows whose prefix is cached.

Shape letters: B rows, C new tokens of a row in one call, D width of the states,
N pages that a row can have, K key and value heads, R query heads that share one
key and value head, H size of a head, J positions of a page or of the recent
tokens. See `cache` for pages and recent tokens.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.models import attention
from stppo_jax.models import cache as cache_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import rotary
from stppo_jax.models import transformer
from stppo_jax.models.kernels import live_pages_gpu
from stppo_jax.models.kernels import live_pages_tpu
from stppo_jax.parallel import activations
from stppo_jax.parallel import rows as rows_lib

Array = jax.Array


class Copied(NamedTuple):
  """Attends to copies of the first pages of each row.

  Attributes:
    layers: for each layer, a tuple of functions. Function n of a layer returns
      page n of every row.
    lengths_B: int32, the number of cached tokens of each row.
    count: the number of pages of each row that attention needs. If `count` is
      an int, the program has no code for further pages. If `count` is an array,
      a branch skips further pages when the program runs. An array suits
      platforms on which a branch is cheap, because one program then serves all
      numbers of pages.
  """

  layers: tuple[tuple[Callable[[], cache_lib.Block], ...], ...]
  lengths_B: Array
  count: Array | int

  def attend(
    self,
    layer: int,
    q_BCNH: Array,
    own: Sequence[Array],
    first: Array | int,
    window: int,
  ) -> Array:
    """Returns attention to the cached and the recent tokens [B, C, N, H].

    Args:
      layer: the index of the layer.
      q_BCNH: queries of the new tokens.
      own: keys and values of the recent tokens, new tokens included, each
        [B, K, J, H].
      first: the index of the first query's token among the recent tokens.
      window: the largest number of tokens that a query sees; 0: no limit.
    """
    places_C = first + jnp.arange(q_BCNH.shape[1])

    def read_page(n, page):
      k_BKJH, v_BKJH, *others = page()
      scales = (others[0], others[1]) if k_BKJH.dtype == jnp.int8 else None
      size = k_BKJH.shape[2]
      positions_J = n * size + jnp.arange(size)
      # True at the positions of this page that the row has filled.
      seen_BCJ = positions_J[None, None] < self.lengths_B[:, None, None]
      if window:
        queries_BC = self.lengths_B[:, None] + places_C[None]
        seen_BCJ &= positions_J[None, None] > queries_BC[..., None] - window
      return attention.KeySlice(k_BKJH, v_BKJH, seen_BCJ, scales)

    keys, values = own
    _, K, J, _ = keys.shape
    # A new token attends to itself and to the recent tokens before it.
    seen_1CJ = jnp.arange(J)[None, None] <= places_C[None, :, None]
    if window:
      seen_1CJ &= jnp.arange(J)[None, None] > places_C[None, :, None] - window
    return attention.attend_to_slices(
      q_BCNH,
      attention.KeySlice(keys, values, seen_1CJ),
      [
        attention.Page(n < self.count, functools.partial(read_page, n, page))
        for n, page in enumerate(self.layers[layer])
      ],
      num_kv_heads=K,
    )


class Live(NamedTuple):
  """Attends to the pages of the cache in place, by a kernel for TPU or GPU.

  Attributes:
    cache: all pages.
    works: for each window size of the layers, the result of the kernel's
      `plan_work`. On a mesh, its arrays hold the results of all devices.
    mesh: mesh that the cache is laid out on; None: one device.
    kernel: the module that defines the kernel.
  """

  cache: cache_lib.Cache
  works: Mapping[int, Any]
  mesh: jax.sharding.Mesh | None
  kernel: Any

  def attend(
    self,
    layer: int,
    q_BCNH: Array,
    own: Sequence[Array],
    first: Array | int,
    window: int,
  ) -> Array:
    """Returns attention to cached and recent tokens; see `Copied.attend`."""
    q_BKRCH = attention.split_heads(q_BCNH, own[0].shape[1])
    attend: Any = functools.partial(self.kernel.attend, window=window or None)
    if self.mesh is not None and self.mesh.size > 1:
      rows, heads = cache_lib.axes(own[0].shape[1], self.mesh)
      spec = P(rows, heads)
      attend = jax.shard_map(
        attend,
        mesh=self.mesh,
        in_specs=(*[spec] * 5, self.kernel.work_specs(rows), P()),
        out_specs=spec,
        # A kernel does not declare along which mesh axes its results differ,
        # so JAX cannot check these axes.
        check_vma=False,
      )
    pages = self.cache[layer][:2]
    mixed = attend(q_BKRCH, *pages, *own, self.works[window], jnp.int32(first))
    # The barriers keep the change of layout a separate operation. Otherwise,
    # the compiler for TPU would fuse the change of layout into the projection
    # that follows, and the projection would take four times as long.
    joined = attention.join_heads(jax.lax.optimization_barrier(mixed))
    flat = joined.reshape(*joined.shape[:2], -1)
    return jax.lax.optimization_barrier(flat).reshape(joined.shape)


def reads_live(config: model_config.ModelConfig, page_size: int) -> bool:
  """Returns whether a kernel reads the pages of a model's cache in place."""
  return _kernel(config, page_size) is not None


def _kernel(config: model_config.ModelConfig, page_size: int) -> Any:
  """Returns the kernel module for a model's cache, or None if no kernel fits.

  `config.attention` tells the platform: 'splash' runs only on TPU, and 'cudnn'
  runs only on GPU.
  """
  kernels = {'splash': live_pages_tpu, 'cudnn': live_pages_gpu}
  kernel = kernels.get(config.attention)
  if kernel is None or config.cache != 'model':
    return None
  return kernel if kernel.supports(config.head_dim, page_size) else None


def read(
  config: model_config.ModelConfig,
  cache: cache_lib.Cache,
  table_BN: Array,
  lengths_B: Array,
  *,
  count: Array | int,
  once: bool,
  mesh: jax.sharding.Mesh | None,
) -> Copied | Live:
  """Returns the cached tokens in the form that `extend` reads.

  Args:
    config: the model's config.
    cache: all pages.
    table_BN: int32, the page numbers of each row.
    lengths_B: int32, the number of cached tokens of each row.
    count: the number of pages that hold all tokens of the longest row; see
      `Copied`.
    once: whether only one call of `extend` reads the result. If so, each page
      is copied inside this call, just before attention reads the page. If not,
      `read` copies the pages, before the loop that calls `extend`.
    mesh: mesh that the cache is laid out on; None: one device.
  """
  num_pages, _, size, _ = cache[0][0].shape
  shards = 1 if mesh is None else cache_lib.row_shards(config, mesh)
  if kernel := _kernel(config, size):
    works = {}
    for window in set(config.layer_windows):
      plan = functools.partial(
        kernel.plan_work, num_pages=num_pages // shards, window=window
      )
      if mesh is not None and mesh.size > 1:
        rows, _ = cache_lib.axes(config.num_kv_heads, mesh)
        plan = jax.shard_map(
          plan,
          mesh=mesh,
          in_specs=P(rows),
          out_specs=kernel.work_specs(rows),
          check_vma=False,
        )
      works[window] = plan(lengths_B, table_BN)
    return Live(cache, works, mesh, kernel)

  def copied(pages, n):
    index = table_BN[:, n]
    index = index if shards == 1 else index.reshape(shards, -1)
    copy = lambda: jax.tree.map(
      lambda x: rows_lib.take_clipped(x, index), pages
    )
    if once:
      return copy
    zeros = lambda: jax.tree.map(
      lambda x: jnp.zeros((index.size, *x.shape[1:]), x.dtype), pages
    )
    block = jax.lax.cond(n < count, copy, zeros)
    return lambda: block

  numbers = range(count if isinstance(count, int) else table_BN.shape[1])
  # The arrays of a layer that are copied: keys, values and, with int8, scales.
  parts = 4 if config.cache == 'int8' else 2
  layers = tuple(
    tuple(copied(pages[:parts], n) for n in numbers) for pages in cache
  )
  return Copied(layers, lengths_B, count)


def extend(
  module: transformer.Transformer,
  layers: Sequence[transformer.DecoderLayer],
  tokens_BC: Array,
  *,
  cached: Copied | Live,
  lengths_B: Array,
  recent: cache_lib.Recent,
  first: Array | int,
) -> tuple[Array, cache_lib.Recent]:
  """Returns the hidden states of the next C tokens of each row.

  A decode step has C = 1.

  Args:
    module: the transformer. Its own layers are not used.
    layers: the decoder layers, each a module of its own.
    tokens_BC: token ids. If a row has fewer than C new tokens, any ids may
      follow them, because later ids do not change earlier states.
    cached: the cached tokens, which `read` returned.
    lengths_B: the number of cached tokens of each row.
    recent: keys and values of the tokens that follow the cached tokens. Only
      the first `first` of them are valid.
    first: the index in `recent` of the first new token, the same in all rows.

  Returns:
    The final hidden states [B, C, D], and `recent` with the new tokens added.
  """
  C = tokens_BC.shape[1]
  places_C = first + jnp.arange(C)  # indices of the new tokens in `recent`
  positions_BC = lengths_B[:, None] + places_C[None]
  windows = module.config.layer_windows
  rotations = {
    window: rotary.rotation(module.config, positions_BC, local=window > 0)
    for window in set(windows)
  }
  mesh = module.mesh
  rows, heads = (
    (None, None)
    if mesh is None
    else cache_lib.axes(module.config.num_kv_heads, mesh)
  )
  x_BCD, updated = module.embed(tokens_BC), []
  for n, (layer, old_block) in enumerate(zip(layers, recent, strict=True)):
    new_block = []

    # Default arguments bind the values of this layer, because a closure looks
    # its variables up only when it is called.
    def append(new_BCKH, old_block=old_block, new_block=new_block):
      old = old_block[len(new_block)]
      new = new_BCKH.swapaxes(1, 2).astype(old.dtype)
      new = activations.constrain(new, mesh, rows, heads)
      new = jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=2)
      new_block.append(activations.constrain(new, mesh, rows, heads))
      return new_block[-1]

    def attend(q, k, v, append=append, n=n):
      own = append(k), append(v)
      q = activations.constrain(q, mesh, rows, None, heads)
      mixed = cached.attend(n, q, own, first, windows[n])
      # The layout changes in two steps. With the second step alone, the
      # compiler would move the partial results of every slice between devices
      # instead of the mean over all slices.
      mixed = activations.constrain(mixed, mesh, rows, None, heads)
      return activations.constrain(
        mixed, mesh, activations.ROWS, None, activations.TENSOR
      )

    x_BCD, routing = layer(x_BCD, rotations[windows[n]], attend)
    # The experts' ids are stored in the same way as keys and values, as an
    # array with one head.
    if routing is not None:
      append(routing.expert_ids[:, :, None])
    updated.append(tuple(new_block))
  return module.norm(x_BCD), tuple(updated)
