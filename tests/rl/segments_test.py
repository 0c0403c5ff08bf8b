import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.rl import segments
from tests.rl import batches
from tests.rl import twins

IDS = np.array([[0, 1, 1, 0, 2, 3], [2, 2, 2, 2, 0, 0]], np.int32)
X = np.array([[9.0, 1, 2, 9, 3, 4], [1, 1, 1, 2, 9, 9]])


@pytest.fixture(params=segments.IMPLEMENTATIONS)
def implementation(request):
  with batches.summing(request.param):
    yield request.param


EACH = pytest.mark.usefixtures('implementation')


def _twin(x, level, batch, mean=False):
  """Returns for every token the sum, or the mean, of its segment."""
  out = np.zeros(x.shape)
  for tokens in twins.members(level, batch):
    for token in tokens:
      out[token] = sum(x[t] for t in tokens) / (len(tokens) if mean else 1)
  return out


@EACH
def test_every_level_sums_its_members():
  batch, x, _ = batches.make()

  @jax.jit
  def run(x, batch):
    out = {}
    for level in segments.LEVELS:
      own = segments.level_segments(level, batch, num_turns=batches.T)
      out[level] = segments.segment_spread(segments.segment_totals(x, own), own)
    return out

  for level, actual in run(x, batch).items():
    expected = _twin(x, level, batch)
    np.testing.assert_allclose(actual, expected, rtol=1e-13, err_msg=level)


@EACH
def test_gradient_and_poison():
  three = segments.Segments(IDS, 3)
  weight = np.arange(6.0).reshape(2, 3)

  def loss(x):
    totals = segments.segment_totals(x, three)
    spread = segments.segment_spread(totals**2, three)
    return jnp.sum(weight * totals) + jnp.sum(spread)

  run = jax.jit(jax.value_and_grad(loss))
  expected = np.zeros(IDS.shape)
  counts = {(0, 1): 2, (0, 2): 1, (0, 3): 1, (1, 2): 4}
  for b, i in np.argwhere(IDS > 0):
    own = IDS[b, i]
    total = X[b][IDS[b] == own].sum()
    expected[b, i] = weight[b, own - 1] + 2 * total * counts[b, own]
  for x in (X, np.where(IDS > 0, X, np.nan), np.where(IDS > 0, X, np.inf)):
    value, gradient = run(x)
    assert np.isfinite(value)
    np.testing.assert_allclose(gradient, expected, rtol=1e-13)


@EACH
def test_ids_beyond_the_last_segment_are_in_none():
  two = segments.Segments(IDS, 2)

  @jax.jit
  def run(x):
    totals = segments.segment_totals(x, two)
    return totals, segments.segment_spread(totals, two)

  totals, spread = run(X)
  np.testing.assert_array_equal(totals, [[3, 3], [0, 5]])
  assert np.asarray(spread)[0, 5] == 0


def test_starts_are_the_first_tokens_of_segments():
  run = jax.jit(lambda ids: segments.segment_starts(segments.Segments(ids, 3)))
  np.testing.assert_array_equal(
    run(IDS),
    np.array([[0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]], bool),
  )


def _hlo(num_segments, platform):
  """Returns the program of sums and means, and of their gradients."""
  own = segments.Segments(IDS, num_segments)
  total = lambda x: (
    jnp.sum(segments.segment_totals(x, own) ** 2)
    + jnp.sum(segments.segment_means(x, own) ** 2)
  )
  traced = jax.jit(jax.value_and_grad(total)).trace(X)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def test_auto_scatters_on_cpu_only():
  assert 'scatter' in _hlo(3, 'cpu')
  for num_segments, platform in ((1, 'cpu'), (3, 'cuda'), (33, 'tpu')):
    assert 'scatter' not in _hlo(num_segments, platform)


@EACH
def test_a_small_segment_after_a_large_one_keeps_its_digits():
  # A running sum over all segments would lose these digits in float32.
  sizes = {1: (1e4, 150), 2: (1e-3, 366)}
  ids = np.concatenate([np.full(size, k) for k, (_, size) in sizes.items()])
  parts = [np.full(n, total / n) for total, n in sizes.values()]
  x = np.concatenate(parts).astype(np.float32)
  two = segments.Segments(ids[None].astype(np.int32), 2)
  totals = jax.jit(lambda x: segments.segment_totals(x, two))(x[None])
  exact = [math.fsum(x[ids == 1]), math.fsum(x[ids == 2])]
  np.testing.assert_allclose(totals, [exact], rtol=1e-6)


@EACH
def test_means_are_totals_over_counts_and_their_own_transpose():
  batch, x, pulled = batches.make()
  poisoned = batches.poison_array(x, batch.loss_mask_BL, np.nan)

  @jax.jit
  def run(x, batch, pulled):
    turns = segments.level_segments('turn', batch, num_turns=batches.T)
    value, pull = jax.vjp(lambda x: segments.segment_means(x, turns), x)
    return value, pull(pulled)[0]

  found = run(poisoned, batch, pulled)
  for actual, array in zip(found, (x, pulled), strict=True):
    expected = _twin(array, 'turn', batch, mean=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-13)
