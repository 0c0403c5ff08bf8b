"""Attends to the live pages of a KV cache by a kernel for GPU.

A page is live if its row has begun to fill it. The own tokens of a row are the
recent tokens that are in no page yet. The kernel computes the same function as
`live_pages_tpu` without `soft_cap` and `sinks_KR`, but divides the work in a
way that suits a GPU. Each program of the grid handles some queries of one row
and one key and value head. The program goes through the live pages of the row,
then through the row's own tokens, and keeps the sums in registers. It reads
pages where they are in the cache: no page is copied or gathered before the
kernel.

Shape letters: B rows, P pages of the cache, N pages that a row can have, K key
and value heads, R query heads that share one key and value head, C queries of a
row, Q = R * C, J positions of a page, T own tokens of a row, H size of a head.
The matrix units of a GPU need tiles whose sides are at least 16, and the
compiler needs sides that are powers of two.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

Array = jax.Array
# The most keys that a program reads at once, and the most queries of a program.
# Both were chosen by measurements on an H100 with heads of size 64 and 128.
_KEYS, _QUERIES = 64, 64
_LEAST = 16  # the smallest side of a tile in a matrix product
# The logit of an invisible key. It is finite, so that a query which sees no key
# gets finite numbers and not nan.
MASKED = -1e30


class Work(NamedTuple):
  """Holds the lengths and the pages of rows for the programs of the kernel.

  Attributes:
    lengths_B: int32, the number of cached tokens of each row.
    table_BN: int32, the page numbers of each row.
  """

  lengths_B: Array
  table_BN: Array


def supports(head_dim: int, page_size: int) -> bool:
  """Returns whether the kernel supports this head size and this page size."""
  power_of_two = head_dim & (head_dim - 1) == 0
  return power_of_two and head_dim >= _LEAST and page_size % _LEAST == 0


def work_specs(rows: Any) -> Work:
  """Returns the partition specs of the arrays of `Work` on a mesh.

  Args:
    rows: the mesh axes along which rows are sharded.
  """
  by_row: Any = P(rows)  # Any, because `Work` declares its fields as arrays
  return Work(by_row, by_row)


def plan_work(
  lengths_B: Array, table_BN: Array, num_pages: int, window: int = 0
) -> Work:
  """Returns the lengths and pages, in the form that the kernel reads.

  Args:
    lengths_B: int32, the number of cached tokens of each row.
    table_BN: int32, the page numbers of each row.
    num_pages: P, the number of pages of the cache. A number of P or more in the
      table stands for no page, and is replaced by the number of the last page.
      This is safe, because no query of the row sees a key through this entry of
      the table.
    window: ignored; `plan_work` of `live_pages_tpu` uses it.
  """
  del window
  table_BN = jnp.minimum(table_BN, num_pages - 1)
  return Work(lengths_B.astype(jnp.int32), table_BN.astype(jnp.int32))


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
  interpret: bool = False,
) -> Array:
  """Returns attention to the cached tokens and the own tokens of each row.

  If a row has `length` cached tokens, query c of the row is at the position
  length + first + c. This query sees the cached tokens and the own tokens
  0..first + c.

  Args:
    q_BKRCH: queries, divided by √H; `supports` says which H and J are possible.
    k_PKJH, v_PKJH: keys and values of the pages; all finite.
    own_k_BKTH, own_v_BKTH: keys and values of the own tokens; all finite.
    work: the result of `plan_work`.
    first: int32, the number of own tokens before the first query.
    window: the largest number of tokens that a query sees, its own token and
      the tokens before it; None: no limit.
    interpret: whether to interpret the kernel, which then needs no GPU.

  Returns:
    The weighted means of the values [B, K, R, C, H], in the dtype of q.
  """
  # Imported here because the import takes a while and only a GPU needs it.
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  B, K, R, C, H = q_BKRCH.shape
  Q, T, J = R * C, own_k_BKTH.shape[2], k_PKJH.shape[2]
  tile = min(max(pl.next_power_of_2(Q), _LEAST), _QUERIES)
  kernel = functools.partial(
    _kernel,
    num_queries=C,
    tile=tile,
    size=min(J & -J, _KEYS),  # the largest power of two that divides J
    own_size=min(max(pl.next_power_of_2(T), _LEAST), _KEYS),
    window=window,
  )
  mixed_BKQH = pl.pallas_call(
    kernel,
    grid=(B, K, pl.cdiv(Q, tile)),
    out_shape=jax.ShapeDtypeStruct((B, K, Q, H), q_BKRCH.dtype),
    compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    interpret=interpret,
  )(
    *work,
    jnp.full(1, first, jnp.int32),
    q_BKRCH.reshape(B, K, Q, H),
    *(k_PKJH, v_PKJH, own_k_BKTH, own_v_BKTH),
  )
  return mixed_BKQH.reshape(B, K, R, C, H)


def _kernel(
  lengths_ref,
  table_ref,
  first_ref,
  q_ref,
  k_ref,
  v_ref,
  own_k_ref,
  own_v_ref,
  mixed_ref,
  *,
  num_queries,
  tile,
  size,
  own_size,
  window,
):
  """Computes attention for `tile` queries that share a row and a key head.

  The program reads `size` keys of a page at once, or `own_size` keys of own
  tokens.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton

  row, head, start = (pl.program_id(axis) for axis in range(3))
  start *= tile
  length = lengths_ref[row]
  _, _, Q, H = q_ref.shape
  _, _, J, _ = k_ref.shape
  T = own_k_ref.shape[2]

  def load(ref, begin, count, most):
    """Returns the vectors begin..begin + count - 1 of this row and head.

    Vectors with the index `most` or a larger one are zeros.
    """
    some = (begin + jnp.arange(count) < most)[:, None]
    part = ref.at[row, head, pl.ds(begin, count), :]
    return triton.load(part, mask=some, other=0.0)

  q = load(q_ref, start, tile, Q)
  # The index of each query's token among the own tokens. `lax.rem` and
  # `lax.div` are used because the compiler does not support % of integers.
  query = first_ref[0] + jax.lax.rem(start + jnp.arange(tile), num_queries)

  def add(sums_total_top, k, v, visible):
    sums, total, top = sums_total_top
    logits = jnp.where(visible, triton.dot(q, k.T), MASKED)
    new = jnp.maximum(top, jnp.max(logits, axis=1))
    scale = jnp.exp(top - new)
    weights = jnp.exp(logits - new[:, None])
    sums = sums * scale[:, None] + triton.dot(weights.astype(v.dtype), v)
    return sums, total * scale + jnp.sum(weights, axis=1), new

  def add_cached(n, carry):
    page, part = jax.lax.div(n, J // size), jax.lax.rem(n, J // size)
    place = table_ref[row, page], head, pl.ds(part * size, size)
    positions = n * size + jnp.arange(size)[None]
    visible = positions < length
    if window is not None:
      visible &= positions > length + query[:, None] - window
    return add(carry, k_ref[place], v_ref[place], visible)

  def add_own(n, carry):
    begin = n * own_size
    k, v = (load(ref, begin, own_size, T) for ref in (own_k_ref, own_v_ref))
    token = begin + jnp.arange(own_size)[None]
    visible = token <= query[:, None]
    if window is not None:
      visible &= token > query[:, None] - window
    return add(carry, k, v, visible)

  # Until a query meets a key that it sees, invisible keys count in its sums as
  # if it saw them. At the first key that it sees, which is its own key at the
  # latest, all earlier sums are scaled by 0.
  carry = (
    jnp.zeros((tile, H), jnp.float32),
    jnp.zeros(tile, jnp.float32),
    jnp.full(tile, MASKED, jnp.float32),
  )
  begin = 0
  if window is not None:  # skips keys before the windows of all queries
    begin = jnp.maximum(length + first_ref[0] + 1 - window, 0) // size
  carry = jax.lax.fori_loop(begin, pl.cdiv(length, size), add_cached, carry)
  seen = jnp.minimum(jnp.max(query) + 1, T)
  sums, total, _ = jax.lax.fori_loop(0, pl.cdiv(seen, own_size), add_own, carry)
  triton.store(
    mixed_ref.at[row, head, pl.ds(start, tile), :],
    (sums / total[:, None]).astype(mixed_ref.dtype),
    mask=(start + jnp.arange(tile) < Q)[:, None],
  )
