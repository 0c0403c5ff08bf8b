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


@EACH
@pytest.mark.parametrize('level', segments.LEVELS)
def test_every_level_sums_its_members(level):
  batch, x, _ = batches.make()
  chosen = segments.level_segments(level, batch, num_turns=batches.T)
  run = jax.jit(
    lambda x: segments.segment_spread(
      segments.segment_totals(x, chosen), chosen
    )
  )
  expected = np.zeros(x.shape)
  for tokens in twins.members(level, batch):
    for b, i in tokens:
      expected[b, i] = sum(x[token] for token in tokens)
  np.testing.assert_allclose(run(x), expected, rtol=1e-13)


@EACH
def test_gradient_and_poison():
  three = segments.Segments(jnp.asarray(IDS), 3)
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
  two = segments.Segments(jnp.asarray(IDS), 2)
  totals = segments.segment_totals(X, two)
  np.testing.assert_array_equal(totals, [[3, 3], [0, 5]])
  spread = segments.segment_spread(totals, two)
  assert spread[0, 5] == 0


def test_starts_are_the_first_tokens_of_segments():
  starts = segments.segment_starts(segments.Segments(jnp.asarray(IDS), 3))
  np.testing.assert_array_equal(
    starts,
    np.array([[0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]], bool),
  )


def _hlo(num_segments, platform):
  """Returns the program of sums and means, and of their gradients."""
  own = segments.Segments(jnp.asarray(IDS), num_segments)
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
  two = segments.Segments(jnp.asarray(ids[None], jnp.int32), 2)
  totals = segments.segment_totals(x[None], two)
  exact = [math.fsum(x[ids == 1]), math.fsum(x[ids == 2])]
  np.testing.assert_allclose(totals, [exact], rtol=1e-6)


@EACH
def test_means_are_totals_over_counts_and_their_own_transpose():
  batch, x, pulled = batches.make()
  turns = segments.level_segments('turn', batch, num_turns=batches.T)
  poisoned = batches.poison_array(x, batch.loss_mask_BL, np.nan)

  def means(x):
    return segments.segment_means(x, turns)

  def twin(x):
    out = np.zeros(x.shape)
    for tokens in twins.members('turn', batch):
      for token in tokens:
        out[token] = sum(x[t] for t in tokens) / len(tokens)
    return out

  value, pull = jax.vjp(means, poisoned)
  np.testing.assert_allclose(value, twin(x), rtol=1e-13)
  np.testing.assert_allclose(pull(pulled)[0], twin(pulled), rtol=1e-13)
