"""Reading from a cache, compared with one pass over the whole sequence."""

import jax
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from tests.models import tiny

_B, _L, _C = 3, 14, 4
_SIZE = 5  # tokens of a page
_N = 3  # pages of a row


def _tokens(seed=0, shape=(_B, _L)):
  return np.random.default_rng(seed).integers(0, 11, shape).astype(np.int32)


def _shapes(make, *args):
  return jax.eval_shape(lambda: make(*args))


def _poisoned(model):
  """Returns an empty cache with garbage in place of zeros."""
  return tiny.cache_of(model.config, _B * _N, _SIZE, 1e3)


def test_reading_in_random_chunks_equals_one_pass():
  model = tiny.model()
  params, tokens_BL = tiny.params(model), _tokens()
  whole_BLD = np.asarray(tiny.hidden(model)(params, tokens_BL))
  rng = np.random.default_rng(1)
  for _ in range(3):
    cache = _poisoned(model)
    lengths_B = np.zeros(_B, np.int32)
    seen_counts = set()
    while (lengths_B < _L).any():
      counts_B = np.minimum(rng.integers(0, _C + 1, _B), _L - lengths_B)
      counts_B = counts_B.astype(np.int32)
      tokens_BC = _tokens(rng.integers(1000), (_B, _C))  # poison too
      for b, (length, count) in enumerate(zip(lengths_B, counts_B)):
        tokens_BC[b, :count] = tokens_BL[b, length : length + count]
      needed = min(n for n in (0, 1, _N) if n * _SIZE >= lengths_B.max())
      hidden_BCD, cache = tiny.read_on(
        model, params, tokens_BC, cache, lengths_B, counts_B, num_pages=needed
      )
      hidden_BCD = np.asarray(hidden_BCD)
      for b, (length, count) in enumerate(zip(lengths_B, counts_B)):
        np.testing.assert_allclose(
          hidden_BCD[b, :count],
          whole_BLD[b, length : length + count],
          atol=1e-5,
        )
      seen_counts |= set(counts_B.tolist())
      lengths_B = lengths_B + counts_B
    assert {0, _C} <= seen_counts


def test_more_pages_than_needed_change_no_bit():
  model = tiny.model()
  params, cache = tiny.params(model), _poisoned(model)
  lengths_B, counts_B = np.zeros(_B, np.int32), np.array([4, 3, 1], np.int32)
  read = lambda tokens_BC, cache, lengths_B, pages: tiny.read_on(
    model, params, tokens_BC, cache, lengths_B, counts_B, num_pages=pages
  )
  _, cache = read(_tokens(1, (_B, _C)), cache, lengths_B, 0)
  further_BC = _tokens(2, (_B, _C))
  found, more = (read(further_BC, cache, counts_B, n) for n in (1, _N))
  jax.tree.map(np.testing.assert_array_equal, more, found)
  # Pages that are not needed are not even read.
  others = tiny.table(cache, _B)[:, 1:]
  cache = jax.tree.map(np.array, cache)
  for x in jax.tree.leaves(cache):
    x[others] = np.nan
  hidden_BCD, _ = read(further_BC, cache, counts_B, 1)
  np.testing.assert_array_equal(hidden_BCD, found[0])


def _store(cache, cases):
  """Returns a cache for each case, traced anew for the platform."""
  stored = lambda cache, cases: [cache_lib.store(cache, *x) for x in cases]
  return jax.jit(stored)(cache, cases)


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_storing_equals_a_plain_loop(platform, monkeypatch):
  monkeypatch.setattr(cache_lib.mesh_lib, 'platform', lambda mesh: platform)
  model = tiny.model()
  cache = _poisoned(model)
  rng = np.random.default_rng(0)
  cases = []
  for C in (1, 12):  # within a page, and up to all three
    recent = jax.tree.map(
      lambda x: rng.normal(size=x.shape).astype(np.float32),
      _shapes(cache_lib.nothing_recent, model.config, _B, C),
    )
    lengths_B = rng.integers(0, _N * _SIZE - C + 1, _B)
    counts_B = rng.integers(0, C + 1, _B)
    table_BN = rng.permutation(_B * _N).reshape(_B, _N).astype(np.int32)
    table_BN[1] = cache_lib.NO_PAGE  # nothing of this row is stored
    cases.append((recent, table_BN, lengths_B, counts_B))
  for stored, case in zip(_store(cache, cases), cases):
    recent, table_BN, lengths_B, counts_B = case
    for found, old, layer in zip(stored, cache, recent):
      for part in (0, 1):
        expected = np.array(old[part])
        for b in (0, 2):
          for n in range(counts_B[b]):
            page, place = divmod(lengths_B[b] + n, _SIZE)
            expected[table_BN[b, page], :, place] = layer[part][b, :, n]
        np.testing.assert_array_equal(found[part], expected)


def test_a_scatter_stores_what_the_loop_stores(monkeypatch):
  shape = tiny.MIXED | dict(num_layers=2, num_heads=4, num_kv_heads=2)
  model = tiny.model(**shape, cache='int8')
  rng = np.random.default_rng(0)
  drawn = lambda tree: jax.tree.map(
    lambda x: (rng.normal(size=x.shape) * 9).astype(x.dtype), tree
  )
  B, N, C, size = 6, 3, 11, 5
  table_BN = rng.permutation(B * N).reshape(B, N).astype(np.int32)
  table_BN[1], table_BN[2, 2] = cache_lib.NO_PAGE, cache_lib.NO_PAGE
  lengths_B = np.array([0, 3, 9, N * size, N * size - 2, 7])
  pages = drawn(_shapes(cache_lib.empty, model.config, B * N, size))
  recent = drawn(_shapes(cache_lib.nothing_recent, model.config, B, C))
  case = recent, table_BN, lengths_B, rng.integers(0, C + 1, B)
  found = []
  for platform in ('cpu', 'gpu'):
    monkeypatch.setattr(cache_lib.mesh_lib, 'platform', lambda _: platform)
    found.append(_store(pages, [case]))
  jax.tree.map(np.testing.assert_array_equal, *found)
