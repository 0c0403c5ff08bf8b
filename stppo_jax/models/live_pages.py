"""Attention to the live pages of a cache, by a kernel for TPU.

The kernel also reads tokens that are in no page yet, as if they were pages.

B rows, P pages of the cache, N pages that a row can have, K heads of keys and
of values, R query heads that share one of them, C queries of a row, Q = R * C,
J positions of a page, H head size.

Rows differ in length, and the kernel reads only the pages that a row has begun.
Its grid is a list of work: an entry is a row and up to `_PLACES` adjacent pages
of it, because a step of the grid takes some time, however little it reads. A
place without a page of this row keeps the page that it had before, which is not
read again.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
# J: as many positions as a vector has lanes.
PAGE_SIZE = 128
_PLACES = 4  # pages of an entry
# Query vectors of all heads of an entry, which limits the memory of the kernel.
_MOST_QUERIES = 1024
_SUBLANES = 16  # a tile of 16-bit numbers has so many rows
# The logit of an invisible key. It is finite, so that a query which sees
# nothing gets finite numbers, not nan.
MASKED = -1e30


class Work(NamedTuple):
  """The E entries of the kernel's grid, in the order of the rows.

  Attributes:
    count_1: int32, the number of entries; further ones have no meaning.
    rows_E: int32, the row of each entry.
    firsts_E: int32, the number of its first page among those of the row.
    lengths_B: int32, the cached tokens of each row.
    pages_ZE: int32, the page of the cache in each of the Z places.
  """

  count_1: Array
  rows_E: Array
  firsts_E: Array
  lengths_B: Array
  pages_ZE: Array


def plan_work(lengths_B: Array, table_BN: Array, num_pages: int) -> Work:
  """Returns the entries for rows of these lengths.

  A row without tokens has an entry, too, so that its results are written.

  Args:
    lengths_B: int32, the cached tokens of each row.
    table_BN: int32, the pages of each row.
    num_pages: P; a larger number in the table stands for any page.
  """
  B, N = table_BN.shape
  pages_B = jnp.maximum(-(-lengths_B // PAGE_SIZE), 1)
  entries_B = -(-pages_B // _PLACES)
  ends_B = jnp.cumsum(entries_B)
  index_E = jnp.arange(B * -(-N // _PLACES))
  rows_E = jnp.searchsorted(ends_B, index_E, side='right')
  rows_E = jnp.minimum(rows_E, B - 1).astype(jnp.int32)
  firsts_E = (index_E - (ends_B - entries_B)[rows_E]) * _PLACES
  wanted_ZE = firsts_E[None] + jnp.arange(_PLACES)[:, None]
  # The entry whose page a place holds: this one, or the last with a page.
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


def reduce(
  q_BKQH: Array,
  k_PKJH: Array,
  v_PKJH: Array,
  work: Work,
  *,
  interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """Reduces the cached keys and values that each row has.

  Args:
    q_BKQH: queries, divided by √H. Each of them sees all cached tokens of its
      row.
    k_PKJH, v_PKJH: keys and values; all finite, and J = `PAGE_SIZE`.
    work: the entries, of `plan_work`.
    interpret: whether to run the kernel's program without a TPU.

  Returns:
    The sums of the values weighted by exp(logit - largest), float32
    [B, K, Q, H]; the sums of the weights, and the largest logits
    [B, K, Q, 1]. The largest logit of a row without tokens is `MASKED`.
  """
  return _reduce(
    q_BKQH, k_PKJH, v_PKJH, work, num_queries=0, interpret=interpret
  )


def reduce_own(
  q_BKQH: Array, k_BKCH: Array, v_BKCH: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
  """Reduces the tokens of the queries themselves, which no page holds yet.

  Args:
    q_BKQH: queries, divided by √H; Q is [R, C] as one axis. Each of them sees
      its own token and those before it.
    k_BKCH, v_BKCH: keys and values; all finite, and J divides C.
    interpret: whether to run the kernel's program without a TPU.

  Returns:
    See `reduce`.
  """
  B, _, C, _ = k_BKCH.shape
  parts = C // PAGE_SIZE
  table_BN = jnp.arange(B * parts).reshape(B, parts)
  work = plan_work(jnp.full(B, C), table_BN, B * parts)
  return _reduce(
    q_BKQH, k_BKCH, v_BKCH, work, num_queries=C, interpret=interpret
  )


def _reduce(
  q_BKQH: Array,
  k_PKJH: Array,
  v_PKJH: Array,
  work: Work,
  *,
  num_queries: int,
  interpret: bool,
) -> tuple[Array, Array, Array]:
  """Returns `reduce`, or `reduce_own` of `num_queries` tokens if not 0."""
  # Imported here because it takes a while and only a TPU needs it.
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  B, K, Q, H = q_BKQH.shape
  N = len(work.rows_E) // B * _PLACES
  tile = min(_up(Q, _SUBLANES), _up(_MOST_QUERIES // K, _SUBLANES))
  padded = _up(Q, tile)
  q_BKQH = jnp.pad(q_BKQH, ((0, 0), (0, 0), (0, padded - Q), (0, 0)))

  def of_row(width):
    return pl.BlockSpec(
      (1, K, tile, width),
      lambda t, e, rows_E, *_: (rows_E[e], 0, t, 0),
    )

  parts = k_PKJH.shape[2] // PAGE_SIZE  # pages that are one array

  def of_page(place):
    def index(t, e, rows_E, firsts_E, lengths_B, pages_ZE):
      page = pages_ZE[place, e]
      return page // parts, 0, page % parts, 0

    return pl.BlockSpec((1, K, PAGE_SIZE, H), index)

  def in_memory(x_PKJH):
    # Otherwise the compiler may fetch all pages before the kernel begins.
    if interpret:
      return x_PKJH
    return pltpu.with_memory_space_constraint(x_PKJH, pltpu.HBM)

  pages = [of_page(place) for place in range(_PLACES)]
  mixed_BKQH, numbers = pl.pallas_call(
    functools.partial(_kernel, num_queries=num_queries),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(padded // tile, work.count_1[0]),
      in_specs=[of_row(H), *pages, *pages],
      out_specs=[of_row(H), of_row(PAGE_SIZE)],
      scratch_shapes=[
        pltpu.VMEM((K, tile, width), jnp.float32)
        for width in (H, PAGE_SIZE, PAGE_SIZE)
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((B, K, padded, width), jnp.float32)
      for width in (H, PAGE_SIZE)
    ],
    # At most, because lengths are not known here.
    cost_estimate=pl.CostEstimate(
      flops=4 * B * K * Q * N * PAGE_SIZE * H,
      bytes_accessed=2
      * (padded // tile)
      * B
      * K
      * N
      * PAGE_SIZE
      * H
      * k_PKJH.dtype.itemsize,
      transcendentals=B * K * Q * N * PAGE_SIZE,
    ),
    interpret=interpret,
  )(
    *work[1:],
    q_BKQH,
    *[in_memory(k_PKJH)] * _PLACES,
    *[in_memory(v_PKJH)] * _PLACES,
  )
  numbers = numbers[:, :, :Q]
  return mixed_BKQH[:, :, :Q], numbers[..., :1], numbers[..., -1:]


def _kernel(rows_E, firsts_E, lengths_B, pages_ZE, q_ref, *refs, num_queries):
  """Adds an entry to the sums of its row, for a tile of queries.

  The numbers of a query fill a whole vector of lanes, all of them equal.
  """
  from jax.experimental import pallas as pl

  del pages_ZE  # the specifications of the blocks have used it
  k_refs, v_refs = refs[:_PLACES], refs[_PLACES : 2 * _PLACES]
  mixed_ref, numbers_ref, sums, totals, tops = refs[2 * _PLACES :]
  entry = pl.program_id(1)
  first, length = firsts_E[entry], lengths_B[rows_E[entry]]

  @pl.when(first == 0)
  def _():
    sums[...] = jnp.zeros_like(sums)
    totals[...] = jnp.zeros_like(totals)
    tops[...] = jnp.full_like(tops, MASKED)

  def visible(place, shape):
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = length
    if num_queries:
      query = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
      seen = (pl.program_id(0) * shape[0] + query) % num_queries + 1
    return (first + place) * PAGE_SIZE + lane < seen

  for head in range(q_ref.shape[1]):
    logits = []
    for place, k_ref in enumerate(k_refs):
      x = _product(q_ref[0, head], k_ref[0, head], transposed=True)
      logits.append(jnp.where(visible(place, x.shape), x, MASKED))
    old = tops[head]
    top = old
    for x in logits:
      top = jnp.maximum(top, jnp.max(x, axis=1, keepdims=True))
    scale = jnp.exp(old - top)
    total = totals[head] * scale
    mixed = sums[head] * scale[:, :1]
    for x, v_ref in zip(logits, v_refs):
      weights = jnp.exp(x - top)
      total += jnp.sum(weights, axis=1, keepdims=True)
      mixed += _product(weights.astype(v_ref.dtype), v_ref[0, head])
    sums[head], totals[head], tops[head] = mixed, total, top

  @pl.when((first + _PLACES) * PAGE_SIZE >= length)
  def _():
    mixed_ref[0] = sums[...]
    lane = jax.lax.broadcasted_iota(jnp.int32, totals.shape, 2)
    numbers_ref[0] = jnp.where(lane < PAGE_SIZE // 2, totals[...], tops[...])


def _product(x, y, *, transposed: bool = False):
  axis = 1 if transposed else 0
  return jax.lax.dot_general(
    x, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
  )


def _up(count: int, unit: int) -> int:
  """Returns the smallest multiple of the unit that is not below the count."""
  return -(-count // unit) * unit
