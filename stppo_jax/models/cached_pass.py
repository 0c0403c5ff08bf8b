"""Passes that continue from a cache.

B rows, C tokens read at once, D width, N pages that a row can have, K heads of
keys and of values, R query heads that share one of them, H head size, J
positions of a page or of the recent tokens. See `cache` for pages.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from stppo_jax.models import attention
from stppo_jax.models import cache as cache_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import live_pages
from stppo_jax.models import rotary
from stppo_jax.models import transformer
from stppo_jax.parallel import activations
from stppo_jax.parallel import rows as rows_lib

Array = jax.Array


class Copied(NamedTuple):
  """The first pages of each row, copied together.

  Attributes:
    layers: for each layer, functions that return the first, second, ... page of
      all rows.
    lengths_B: int32, tokens of each row that the cache holds.
    count: how many of these pages are needed. An int leaves the others out of
      the program. An array skips them by a branch when the program runs, which
      saves compiling a program for each number, where a branch is cheap.
  """

  layers: tuple[tuple[Callable[[], cache_lib.Block], ...], ...]
  lengths_B: Array
  count: Array | int

  def pages(self, layer: int) -> list[attention.Page]:
    """Returns the pages of a layer for `attention.attend_to_slices`."""

    def read(n, page):
      k_BKJH, v_BKJH, *others = page()
      scales = (others[0], others[1]) if k_BKJH.dtype == jnp.int8 else None
      filled = self._filled(n, k_BKJH.shape[2])
      return attention.KeySlice(k_BKJH, v_BKJH, filled, scales)

    return [
      attention.Page(n < self.count, functools.partial(read, n, page))
      for n, page in enumerate(self.layers[layer])
    ]

  def reads_own(self, num_queries: int) -> bool:
    """Returns False: the recent tokens are a slice, too."""
    return False

  def reduce(
    self, layer: int, q_BKRCH: Array, own: Sequence[Array] = ()
  ) -> Sequence[attention.Reduced]:
    """Returns nothing: all pages are slices."""
    return ()

  def _filled(self, number: int, size: int) -> Array:
    """Returns which positions of a page each row has reached [B, 1, J]."""
    positions_J = number * size + jnp.arange(size)
    return positions_J[None, None] < self.lengths_B[:, None, None]


class Live(NamedTuple):
  """All pages, which the kernel of `live_pages` reads in place.

  Attributes:
    cache: all pages.
    work: see `live_pages.Work`; on a mesh, the entries of all devices.
    mesh: mesh that the cache is laid out on; None: one device.
  """

  cache: cache_lib.Cache
  work: live_pages.Work
  mesh: jax.sharding.Mesh | None

  def pages(self, layer: int) -> list[attention.Page]:
    """Returns nothing: the kernel reads all pages."""
    return []

  def reads_own(self, num_queries: int) -> bool:
    """Returns whether the kernel also reads the tokens of the queries."""
    return num_queries % live_pages.PAGE_SIZE == 0

  def reduce(
    self, layer: int, q_BKRCH: Array, own: Sequence[Array] = ()
  ) -> Sequence[attention.Reduced]:
    """Returns what the kernel makes of the pages of a layer.

    Args:
      layer: the number of the layer.
      q_BKRCH: queries, divided by √H.
      own: the keys and values of the queries' own tokens [B, K, C, H], if the
        kernel reads them.
    """
    pages = self.cache[layer][:2]
    reduced = [self._on_devices(live_pages.reduce, q_BKRCH, *pages, self.work)]
    if own:
      reduced.append(self._on_devices(live_pages.reduce_own, q_BKRCH, *own))
    return reduced

  def _on_devices(
    self, reduce: Callable[..., Any], q_BKRCH: Array, *arrays: Any
  ) -> attention.Reduced:
    """Returns the results of a kernel that each device runs on its rows."""
    B, K, R, C, H = q_BKRCH.shape
    inputs = (q_BKRCH.reshape(B, K, R * C, H), *arrays)
    if self.mesh is not None and self.mesh.size > 1:
      rows, heads = cache_lib.axes(K, self.mesh)
      spec = P(rows, heads)
      reduce = jax.shard_map(
        reduce,
        mesh=self.mesh,
        in_specs=tuple(
          _work_specs(rows) if isinstance(x, live_pages.Work) else spec
          for x in inputs
        ),
        out_specs=spec,
        check_vma=False,  # the kernel does not declare which axes vary
      )
    mixed, total, largest = (x.reshape(B, K, R, C, -1) for x in reduce(*inputs))
    return mixed, total, largest


def _work_specs(rows: activations.Axes) -> live_pages.Work:
  by_row: Any = P(rows)  # layouts in place of arrays
  by_place: Any = P(None, rows)
  return live_pages.Work(by_row, by_row, by_row, by_row, by_place)


def reads_live(config: model_config.ModelConfig, page_size: int) -> bool:
  """Returns whether the kernel of `live_pages` reads caches like this."""
  return (
    config.attention == 'splash'
    and config.cache == 'model'
    and config.head_dim % live_pages.PAGE_SIZE == 0
    and page_size == live_pages.PAGE_SIZE
  )


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
  """Returns the cached tokens of rows, as `extend` reads them.

  Args:
    config: the model's shape.
    cache: all pages.
    table_BN: int32, the pages of each row.
    lengths_B: int32, tokens of each row that the cache holds.
    count: how many pages hold all tokens of the longest row; see `Copied`.
    once: whether the result is read by one call of `extend`, which then copies
      pages where it needs them. For a loop of calls they are copied before it.
    mesh: mesh that the cache is laid out on; None: one device.
  """
  num_pages, _, size, _ = cache[0][0].shape
  shards = 1 if mesh is None else cache_lib.row_shards(config, mesh)
  if reads_live(config, size):
    plan = functools.partial(
      live_pages.plan_work, num_pages=num_pages // shards
    )
    if mesh is not None and mesh.size > 1:
      rows, _ = cache_lib.axes(config.num_kv_heads, mesh)
      plan = jax.shard_map(
        plan,
        mesh=mesh,
        in_specs=P(rows),
        out_specs=_work_specs(rows),
        check_vma=False,
      )
    return Live(cache, plan(lengths_B, table_BN), mesh)

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
  parts = 4 if config.cache == 'int8' else 2  # without the experts' ids
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
  """Returns the states of the next tokens of each row; decoding has C = 1.

  Args:
    module: the transformer, whose own layers are not used.
    layers: the layers.
    tokens_BC: token ids. A row with fewer new tokens may end with any ids,
      which change nothing before them.
    cached: the cached tokens, from `read`.
    lengths_B: tokens of each row that the cache holds.
    recent: keys and values of the tokens that follow the cached ones; the
      first `first` of them are valid.
    first: index in `recent` of the first new token; the same in all rows.

  Returns:
    Final hidden states [B, C, D], and the recent tokens with the new ones.
  """
  C = tokens_BC.shape[1]
  places_C = first + jnp.arange(C)  # indices of the new tokens in `recent`
  rotation = rotary.rotation(module.config, lengths_B[:, None] + places_C[None])
  mesh = module.mesh
  rows, heads = (
    (None, None)
    if mesh is None
    else cache_lib.axes(module.config.num_kv_heads, mesh)
  )
  x_BCD, updated = module.embed(tokens_BC), []
  for n, (layer, old_block) in enumerate(zip(layers, recent, strict=True)):
    new_block = []

    # Defaults bind this layer's values: a closure would see the last layer's.
    def append(new_BCKH, old_block=old_block, new_block=new_block):
      old = old_block[len(new_block)]
      new = new_BCKH.swapaxes(1, 2).astype(old.dtype)
      new = activations.constrain(new, mesh, rows, heads)
      new = jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=2)
      new_block.append(activations.constrain(new, mesh, rows, heads))
      return new_block[-1]

    def attend(q, k, v, append=append, n=n):
      keys, values = append(k), append(v)
      # Among the recent tokens, each attends to itself and those before it.
      seen_1CJ = (
        jnp.arange(keys.shape[2])[None, None] <= places_C[None, :, None]
      )
      slices, own = [], ()
      if cached.reads_own(C):
        # The kernel counts from the first of the keys that it is given.
        assert keys.shape[2] == C
        own = keys, values
      else:
        slices.append(attention.KeySlice(keys, values, seen_1CJ))
      q = activations.constrain(q, mesh, rows, None, heads)
      mixed = attention.attend_to_slices(
        q,
        slices,
        cached.pages(n),
        num_kv_heads=module.config.num_kv_heads,
        reduce_others=functools.partial(cached.reduce, n, own=own),
      )
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
