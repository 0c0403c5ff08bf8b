"""Attends to the live pages of a KV cache by a kernel for TPU.

A page is live if its row has begun to fill it. The kernel also attends to the
own tokens of a row, which are in no page yet: the tokens of the queries, and
the tokens that were decoded since pages were last written.

Shape letters: B rows, P pages of the cache, N pages that a row can have, K key
and value heads, R query heads that share one key and value head, C queries of a
row, Q = R * C, J positions of a page, T own tokens of a row, H size of a head,
E entries of the grid, Z = `_PLACES` places for pages in an entry.

Rows differ in length, and the kernel reads only live pages. Its grid is a list
of entries, each with a row and up to Z adjacent pages of the row. An entry has
several pages because a step of the grid takes some time, however little it
reads. If an entry has fewer than Z pages, each of its other places keeps the
page that an earlier entry had in this place. The page is not read again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

Array = jax.Array
# J, which equals the number of lanes of a vector.
PAGE_SIZE = 128
_PLACES = 4  # the most pages of an entry
# The most query vectors that a step of the grid computes, counted over all key
# and value heads. This number limits the memory of the kernel.
_MOST_QUERIES = 1024
_SUBLANES = 16  # rows of a tile of 16-bit numbers in the TPU's memory
# The logit of an invisible key. It is finite, so that a query which sees no key
# gets finite numbers and not nan.
MASKED = -1e30


class Work(NamedTuple):
  """Lists the E entries of the kernel's grid, in the order of the rows.

  Attributes:
    count_1: int32, the number of valid entries; later entries mean nothing.
    rows_E: int32, the row of each entry.
    firsts_E: int32, the index of an entry's first page among its row's pages.
    lengths_B: int32, the number of cached tokens of each row.
    pages_ZE: int32, the page number in each of the Z places of an entry.
  """

  count_1: Array
  rows_E: Array
  firsts_E: Array
  lengths_B: Array
  pages_ZE: Array


def supports(head_dim: int, page_size: int) -> bool:
  """Returns whether the kernel supports this head size and this page size."""
  return head_dim % PAGE_SIZE == 0 and page_size == PAGE_SIZE


def work_specs(rows: Any) -> Work:
  """Returns the partition specs of the arrays of `Work` on a mesh.

  Args:
    rows: the mesh axes along which rows are sharded.
  """
  by_row: Any = P(rows)  # Any, because `Work` declares its fields as arrays
  by_place: Any = P(None, rows)
  return Work(by_row, by_row, by_row, by_row, by_place)


def plan_work(
  lengths_B: Array, table_BN: Array, num_pages: int, window: int = 0
) -> Work:
  """Returns the entries for rows of these lengths.

  A row without cached tokens has an entry, too, so that its results are
  written. Pages before the window of the next token are in no entry.

  Args:
    lengths_B: int32, the number of cached tokens of each row.
    table_BN: int32, the page numbers of each row.
    num_pages: P, the number of pages of the cache. A number of P or more in the
      table stands for no page, and is replaced by the number of the last page.
      This is safe, because no query of the row sees a key through this entry of
      the table.
    window: the largest number of tokens that a query sees; 0: no limit.
  """
  B, N = table_BN.shape
  pages_B = counted_B = jnp.maximum(-(-lengths_B // PAGE_SIZE), 1)
  if window:
    hidden_B = jnp.maximum(lengths_B + 1 - window, 0) // PAGE_SIZE
    counted_B = jnp.maximum(pages_B - hidden_B, 1)
  entries_B = -(-counted_B // _PLACES)
  ends_B = jnp.cumsum(entries_B)
  index_E = jnp.arange(B * -(-N // _PLACES))
  rows_E = jnp.searchsorted(ends_B, index_E, side='right')
  rows_E = jnp.minimum(rows_E, B - 1).astype(jnp.int32)
  firsts_E = (index_E - (ends_B - entries_B)[rows_E]) * _PLACES
  if window:
    firsts_E += (pages_B - counted_B)[rows_E]
  wanted_ZE = firsts_E[None] + jnp.arange(_PLACES)[:, None]
  # For each place of an entry, the entry whose page is in the place: the entry
  # itself if it has a page there, or else the last earlier entry with a page
  # there.
  held_ZE = jnp.where(wanted_ZE < pages_B[rows_E][None], index_E[None], 0)
  held_ZE = jax.lax.cummax(held_ZE, axis=1)
  pages_ZE = table_BN[rows_E[None], jnp.minimum(wanted_ZE, N - 1)]
  pages_ZE = jnp.take_along_axis(pages_ZE, held_ZE, axis=1)
  int32 = lambda x: x.astype(jnp.int32)
  return Work(
    count_1=int32(ends_B[-1:]),
    rows_E=rows_E,
    firsts_E=int32(firsts_E),
    lengths_B=int32(lengths_B),
    pages_ZE=int32(jnp.minimum(pages_ZE, num_pages - 1)),
  )


def attend(
  q_BKRCH: Array,
  k_PKJH: Array,
  v_PKJH: Array,
  own_k_BKTH: Array,
  own_v_BKTH: Array,
  work: Work,
  first: Array | int,
  *,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks_KR: Array | None = None,
  interpret: bool = False,
) -> Array:
  """Returns attention to the cached tokens and the own tokens of each row.

  If a row has `length` cached tokens, query c of the row is at the position
  length + first + c. This query sees the cached tokens and the own tokens
  0..first + c.

  Args:
    q_BKRCH: queries, divided by √H.
    k_PKJH, v_PKJH: keys and values of the pages; all finite, J = `PAGE_SIZE`.
    own_k_BKTH, own_v_BKTH: keys and values of the own tokens; all finite. T is
      at most `PAGE_SIZE` or a multiple of it.
    work: the result of `plan_work`.
    first: int32, the number of own tokens before the first query.
    window: the largest number of tokens that a query sees, its own token and
      the tokens before it; None: no limit.
    soft_cap: the number c, if c tanh(logit / c) replaces each logit; None:
      logits stay unchanged.
    sinks_KR: for each query head, the logit of an additional key without a
      value, as in gpt-oss (OpenAI, 2025); None: no such key.
    interpret: whether to interpret the kernel, which then needs no TPU.

  Returns:
    The weighted means of the values [B, K, R, C, H], in the dtype of q.
  """
  # Imported here because the import takes a while and only a TPU needs it.
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  B, K, R, C, H = q_BKRCH.shape
  Q, T = R * C, own_k_BKTH.shape[2]
  N = len(work.rows_E) // B * _PLACES
  tile = min(_up(Q, _SUBLANES), _up(_MOST_QUERIES // K, _SUBLANES))
  padded = _up(Q, tile)
  pad = ((0, 0), (0, 0), (0, padded - Q), (0, 0))
  q_BKQH = jnp.pad(q_BKRCH.reshape(B, K, Q, H), pad)

  of_queries = pl.BlockSpec(
    (1, K, tile, H), lambda t, e, rows_E, *_: (rows_E[e], 0, t, 0)
  )
  own = pl.BlockSpec(
    (1, K, T, H), lambda t, e, rows_E, *_: (rows_E[e], 0, 0, 0)
  )

  def of_page(place):
    def index(t, e, rows_E, firsts_E, lengths_B, pages_ZE, first_1):
      return pages_ZE[place, e], 0, 0, 0

    return pl.BlockSpec((1, K, PAGE_SIZE, H), index)

  def in_memory(x_PKJH):
    # Without this constraint, the compiler may fetch all pages before the
    # kernel begins.
    if interpret:
      return x_PKJH
    return pltpu.with_memory_space_constraint(x_PKJH, pltpu.HBM)

  pages = [of_page(place) for place in range(_PLACES)]
  specs = [of_queries, *pages, *pages, own, own]
  arrays = [
    q_BKQH,
    *[in_memory(k_PKJH)] * _PLACES,
    *[in_memory(v_PKJH)] * _PLACES,
    own_k_BKTH,
    own_v_BKTH,
  ]
  if sinks_KR is not None:
    sinks_KQ = jnp.pad(jnp.repeat(sinks_KR, C, axis=1), pad[1:3])
    shape = K, padded, PAGE_SIZE
    arrays.append(jnp.broadcast_to(sinks_KQ[..., None], shape))
    specs.append(pl.BlockSpec((K, tile, PAGE_SIZE), lambda t, e, *_: (0, t, 0)))
  # The cost estimate counts all keys that a row can have, because the lengths
  # of rows are not known when the kernel is compiled.
  keys = N * PAGE_SIZE + T
  keys_bytes = K * keys * H * k_PKJH.dtype.itemsize
  mixed_BKQH = pl.pallas_call(
    functools.partial(_kernel, num_queries=C, window=window, soft_cap=soft_cap),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(padded // tile, work.count_1[0]),
      in_specs=specs,
      out_specs=of_queries,
      scratch_shapes=[
        pltpu.VMEM((K, tile, width), jnp.float32)
        for width in (H, PAGE_SIZE, PAGE_SIZE)
      ],
    ),
    out_shape=jax.ShapeDtypeStruct((B, K, padded, H), q_BKRCH.dtype),
    cost_estimate=pl.CostEstimate(
      flops=4 * B * K * Q * keys * H,
      bytes_accessed=2 * (padded // tile) * B * keys_bytes,
      transcendentals=B * K * Q * keys,
    ),
    interpret=interpret,
  )(*work[1:], jnp.full(1, first, jnp.int32), *arrays)
  return mixed_BKQH[:, :, :Q].reshape(B, K, R, C, H)


def _kernel(
  rows_E,
  firsts_E,
  lengths_B,
  pages_ZE,
  first_1,
  q_ref,
  *refs,
  num_queries,
  window,
  soft_cap,
):
  """Adds the keys and values of an entry to the sums of a tile of queries.

  The last entry of a row also adds the row's own tokens, and divides the sums
  of values by the sums of weights. A single number of a query, such as its
  largest logit, is repeated over all lanes of a vector.
  """
  from jax.experimental import pallas as pl

  del pages_ZE  # the page numbers are for the block specs, which fetch pages
  k_refs, v_refs = refs[:_PLACES], refs[_PLACES : 2 * _PLACES]
  own_k_ref, own_v_ref, *sinks_ref = refs[2 * _PLACES : -4]
  mixed_ref, sums, totals, tops = refs[-4:]
  _, K, tile, _ = q_ref.shape
  entry = pl.program_id(1)
  page, length = firsts_E[entry], lengths_B[rows_E[entry]]
  # The index of each query's token among the own tokens.
  start = pl.program_id(0) * tile
  query = jax.lax.broadcasted_iota(jnp.int32, (tile, PAGE_SIZE), 0) + start
  query = first_1[0] + query % num_queries

  begins = page == 0
  # With a window, the row's first entry may begin with a later page than 0.
  if window is not None:
    begins = rows_E[jnp.maximum(entry - 1, 0)] != rows_E[entry]
    begins |= entry == 0

  @pl.when(begins)
  def _():
    sums[...] = jnp.zeros_like(sums)
    if sinks_ref:
      totals[...] = jnp.ones_like(totals)
      tops[...] = sinks_ref[0][...]
    else:
      totals[...] = jnp.zeros_like(totals)
      tops[...] = jnp.full_like(tops, MASKED)

  def add(head, slices):
    """Adds slices of keys and values to the sums of a head.

    Each slice is a tuple (keys, values, mask of visible keys).
    """
    logits = []
    for k, _, visible in slices:
      x = _product(q_ref[0, head], k, transposed=True)
      if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
      logits.append(jnp.where(visible, x, MASKED))
    old = tops[head]
    top = old
    for x in logits:
      top = jnp.maximum(top, jnp.max(x, axis=1, keepdims=True))
    scale = jnp.exp(old - top)
    total = totals[head] * scale
    mixed = sums[head] * scale[:, :1]
    for x, (_, v, visible) in zip(logits, slices):
      weights = jnp.exp(x - top[:, : x.shape[1]])
      # With a window, a query may have seen no key yet. Its largest logit is
      # then MASKED, and the exponentials of its invisible keys would be 1.
      if window is not None:
        weights = jnp.where(visible, weights, 0.0)
      total += jnp.sum(weights, axis=1, keepdims=True)
      mixed += _product(weights.astype(v.dtype), v)
    sums[head], totals[head], tops[head] = mixed, total, top

  def lanes(start, size):
    lane = jax.lax.broadcasted_iota(jnp.int32, (tile, size), 1)
    return start + lane

  def cached(place):
    position = lanes((page + place) * PAGE_SIZE, PAGE_SIZE)
    visible = position < length
    if window is not None:
      visible &= position > length + query - window
    return visible

  masks = [cached(place) for place in range(_PLACES)]
  for head in range(K):
    pages = zip(k_refs, v_refs, masks)
    add(head, [(k[0, head], v[0, head], seen) for k, v, seen in pages])

  @pl.when((page + _PLACES) * PAGE_SIZE >= length)
  def _():
    for begin in range(0, own_k_ref.shape[2], PAGE_SIZE):
      size = min(PAGE_SIZE, own_k_ref.shape[2] - begin)
      part = pl.ds(begin, size)
      token = lanes(begin, size)
      visible = token <= query[:, :size]
      if window is not None:
        visible &= token > query[:, :size] - window
      for head in range(K):
        k, v = own_k_ref[0, head, part], own_v_ref[0, head, part]
        add(head, [(k, v, visible)])
    for head in range(K):
      mixed = sums[head] / totals[head][:, :1]
      mixed_ref[0, head] = mixed.astype(mixed_ref.dtype)


def _product(x, y, *, transposed: bool = False):
  axis = 1 if transposed else 0
  return jax.lax.dot_general(
    x, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
  )


def _up(count: int, unit: int) -> int:
  """Returns the count rounded up to a multiple of the unit."""
  return -(-count // unit) * unit
