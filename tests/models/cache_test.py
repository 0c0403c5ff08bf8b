"""Reading from a cache, compared with one pass over the whole sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from tests.models import tiny

_B, _L, _C = 3, 14, 4
_BLOCKS = (5, 5, 4)


def _tokens(seed=0, shape=(_B, _L)):
  return np.random.default_rng(seed).integers(0, 11, shape).astype(np.int32)


def _poisoned(model, rows=_B):
  """Returns an empty cache with garbage in place of zeros."""
  empty = cache_lib.empty(model.config, rows, _BLOCKS)
  return jax.tree.map(lambda x: jnp.full_like(x, 1e3), empty)


# Other numbers of heads read from caches in parity_test.py.
@pytest.mark.parametrize(
  'num_kv_heads', [1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_reading_in_random_chunks_equals_one_pass(num_kv_heads):
  model = tiny.model(num_kv_heads=num_kv_heads)
  params, tokens_BL = tiny.params(model), _tokens()
  whole_BLD = np.asarray(tiny.hidden(model)(params, tokens_BL))
  rng = np.random.default_rng(1)
  for _ in range(3):
    cache = _poisoned(model)
    lengths_B = np.zeros(_B, np.int32)
    seen_counts = set()
    while (lengths_B < _L).any():
      counts_B = np.minimum(rng.integers(0, _C + 1, _B), _L - lengths_B)
      tokens_BC = _tokens(rng.integers(1000), (_B, _C))  # poison too
      for b, (length, count) in enumerate(zip(lengths_B, counts_B)):
        tokens_BC[b, :count] = tokens_BL[b, length : length + count]
      counts_B = counts_B.astype(np.int32)
      needed = int(np.searchsorted(np.cumsum(_BLOCKS), lengths_B.max()) + 1)
      hidden_BCD, cache = tiny.read_on(
        model,
        params,
        tokens_BC,
        cache,
        lengths_B,
        counts_B,
        num_blocks=needed,
      )
      for b, (length, count) in enumerate(zip(lengths_B, counts_B)):
        np.testing.assert_allclose(
          hidden_BCD[b, :count],
          whole_BLD[b, length : length + count],
          atol=1e-5,
        )
      seen_counts |= set(counts_B.tolist())
      lengths_B = lengths_B + counts_B
    assert {0, _C} <= seen_counts


@pytest.mark.slow
def test_keys_and_values_of_8_bits_are_near_those_of_32():
  params, tokens_BL = tiny.params(tiny.model()), _tokens()
  lengths_B = np.zeros(_B, np.int32)
  found = {}
  for kind in ('model', 'int8'):
    model = tiny.model(cache=kind)
    cache = cache_lib.empty(model.config, _B, _BLOCKS)
    # Read in two calls: the second one reads what the first has stored.
    for first in (0, _L // 2):
      found[kind], cache = tiny.read_on(
        model,
        params,
        tokens_BL[:, first : first + _L // 2],
        cache,
        lengths_B + first,
        lengths_B + _L // 2,
        num_blocks=3 if first else 0,
      )
    sizes = {x.dtype.name for x in jax.tree.leaves(cache)}
    assert sizes == ({'int8', 'float32'} if kind == 'int8' else {'float32'})
  # An entry is rounded by at most 1 / 254 of the largest one of its vector.
  distance = np.abs(found['int8'] - found['model'])
  assert 1e-4 < distance.max() < 0.1 * np.abs(found['model']).max()
  assert distance.mean() < 0.01 * np.abs(found['model']).mean()


def test_more_blocks_than_needed_change_no_bit():
  model = tiny.model()
  params = tiny.params(model)
  lengths_B, counts_B = np.zeros(_B, np.int32), np.array([4, 3, 1], np.int32)
  tokens_BC, further_BC = _tokens(1, (_B, _C)), _tokens(2, (_B, _C))
  _, cache = tiny.read_on(
    model,
    params,
    tokens_BC,
    _poisoned(model),
    lengths_B,
    counts_B,
    num_blocks=0,
  )
  found = [
    tiny.read_on(
      model, params, further_BC, cache, counts_B, counts_B, num_blocks=n
    )
    for n in (1, 2, 3)
  ]
  for other in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, found[0])
  # Blocks that are not needed are not even read.
  cache = tuple(
    (first, *jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), others))
    for first, *others in cache
  )
  hidden_BCD, _ = tiny.read_on(
    model, params, further_BC, cache, counts_B, counts_B, num_blocks=1
  )
  np.testing.assert_array_equal(hidden_BCD, found[0][0])


def test_storing_equals_a_plain_loop():
  model = tiny.model()
  cache = jax.tree.map(np.asarray, _poisoned(model, rows=4))
  rng = np.random.default_rng(0)
  N = 6
  recent = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32),
    cache_lib.nothing_recent(model.config, _B, N),
  )
  lengths_B, counts_B = np.array([0, 4, 9]), np.array([3, 6, 5])
  for rows_B in (
    np.array([2, 0, 1]),
    np.array([3, 4, 0]),
  ):  # slot 4 does not exist
    stored = jax.jit(cache_lib.store)(
      cache, recent, lengths_B, counts_B, slots_B=rows_B
    )
    for blocks, expected_blocks, layer in zip(stored, cache, recent):
      for part in (0, 1):
        expected = np.concatenate([b[part] for b in expected_blocks], axis=2)
        for b, row in enumerate(rows_B):
          if row < 4:
            end = lengths_B[b] + counts_B[b]
            kept = layer[part][b, :, : counts_B[b]]
            expected[row, :, lengths_B[b] : end] = kept
        found = np.concatenate([b[part] for b in blocks], axis=2)
        np.testing.assert_array_equal(found, expected)
