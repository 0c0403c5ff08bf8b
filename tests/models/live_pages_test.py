"""The kernel that reads live pages equals the definition of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import live_pages

_SIZE = live_pages.PAGE_SIZE
_N = 6  # pages that a row can have


def _arrays(dtype, *, queries=5, rows=5, heads=2, head_dim=32):
  """Returns random queries, keys and values, and the pages of rows."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  q_BKQH = normal(rows, heads, queries, head_dim) * head_dim**-0.5
  pages = rows * _N
  shape = pages, heads, _SIZE, head_dim
  table_BN = rng.permutation(pages).reshape(rows, _N).astype(np.int32)
  return q_BKQH, normal(*shape), normal(*shape), table_BN


def _reference(q_BKQH, k_PKJH, v_PKJH, table_BN, lengths_B):
  """Returns attention of each row by loops, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q_BKQH, k_PKJH, v_PKJH))
  result = np.zeros(q.shape)
  for b, length in enumerate(lengths_B):
    for head in range(q.shape[1]):
      keys, values = (
        np.concatenate(
          [x[page, head] for page in table_BN[b, : -(-length // _SIZE)]]
        )[:length]
        for x in (k, v)
      )
      logits = q[b, head] @ keys.T
      weights = np.exp(logits - logits.max(axis=1, keepdims=True))
      weights /= weights.sum(axis=1, keepdims=True)
      result[b, head] = weights @ values
  return result


@pytest.mark.parametrize(
  ('dtype', 'tolerance'), [('float32', 1e-5), ('bfloat16', 2e-2)]
)
def test_the_kernel_equals_loops(dtype, tolerance):
  q, k, v, table_BN = _arrays(dtype)
  lengths_B = np.array([1, 128, 129, 700, 768])
  table_BN = np.where(
    np.arange(_N) * _SIZE < lengths_B[:, None], table_BN, cache_lib.NO_PAGE
  )
  work = live_pages.plan_work(lengths_B, table_BN, len(k))
  mixed, total, largest = live_pages.reduce(q, k, v, work, interpret=True)
  expected = _reference(q, k, v, table_BN, lengths_B)
  np.testing.assert_allclose(mixed / total, expected, atol=tolerance)
  assert np.isfinite(largest).all()


def test_queries_of_many_tiles():
  q, k, v, table_BN = _arrays('float32', queries=1100, rows=1, heads=1)
  lengths_B = np.array([300])
  work = live_pages.plan_work(lengths_B, table_BN, len(k))
  mixed, total, _ = live_pages.reduce(q, k, v, work, interpret=True)
  expected = _reference(q, k, v, table_BN, lengths_B)
  np.testing.assert_allclose(mixed / total, expected, atol=1e-5)


@pytest.mark.parametrize(
  ('dtype', 'tolerance'), [('float32', 1e-5), ('bfloat16', 2e-2)]
)
def test_each_query_sees_its_own_token_and_those_before_it(dtype, tolerance):
  shared, tokens = 2, 2 * _SIZE  # query heads of a head of keys; C
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  q_BKQH = normal(3, 2, shared * tokens, 32) * 32**-0.5
  k, v = normal(3, 2, tokens, 32), normal(3, 2, tokens, 32)
  mixed, total, largest = live_pages.reduce_own(q_BKQH, k, v, interpret=True)
  q, k, v = (np.asarray(x, np.float64) for x in (q_BKQH, k, v))
  seen = np.tile(np.tri(tokens, dtype=bool), (shared, 1))
  logits = np.where(seen, q @ k.swapaxes(2, 3), -np.inf)
  weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
  expected = weights @ v / weights.sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(mixed / total, expected, atol=tolerance)
  np.testing.assert_allclose(
    largest[..., 0], logits.max(axis=-1), atol=2 * tolerance
  )


def test_a_row_without_tokens_weighs_nothing():
  q, k, v, table_BN = _arrays('float32', rows=2)
  work = live_pages.plan_work(np.array([0, 200]), table_BN, len(k))
  mixed, total, largest = live_pages.reduce(q, k, v, work, interpret=True)
  np.testing.assert_array_equal(largest[0], np.float32(live_pages.MASKED))
  assert np.isfinite(mixed).all() and np.isfinite(total).all()


def test_only_begun_pages_are_read():
  lengths_B = np.array([0, 1, 128, 129, 513, 768])
  rng = np.random.default_rng(0)
  table_BN = rng.permutation(36).reshape(6, _N).astype(np.int32)
  work = jax.tree.map(np.asarray, live_pages.plan_work(lengths_B, table_BN, 36))
  count = work.count_1[0]
  # A place reads a page when it is another one than before.
  pages_ZE = work.pages_ZE[:, :count]
  read = pages_ZE[:, 0].tolist() + [
    page
    for places in pages_ZE
    for before, page in zip(places, places[1:])
    if page != before
  ]
  begun = [
    page
    for row, length in zip(table_BN, lengths_B)
    for page in row[: max(-(-length // _SIZE), 1)]
  ]
  # The places of the first entry hold some page in any case.
  assert len(read) <= len(begun) + pages_ZE.shape[0] - 1
  assert set(begun) <= set(read)
