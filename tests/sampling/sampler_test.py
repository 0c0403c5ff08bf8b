"""Draws against twins by loops: what is left, how often, how probable."""

import functools

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from stppo_jax.sampling import sampler

_V = 7
_truncate = jax.jit(sampler.truncate, static_argnums=1)
_draw = jax.jit(sampler.sample, static_argnums=3)


def _left(scores, top_k=0, top_p=1.0, min_p=0.0):
  """The slow twin: which of one row's tokens may be drawn, by loops."""
  left = set(range(len(scores)))

  def most_probable_first():
    return sorted(left, key=lambda n: -scores[n])

  def chances():
    total = sum(np.exp(scores[n]) for n in left)
    return {n: np.exp(scores[n]) / total for n in left}

  if top_k and top_k < len(left):
    least = scores[most_probable_first()[top_k - 1]]
    left = {n for n in left if scores[n] >= least}
  if top_p < 1:
    mass, least, chance = 0.0, None, chances()
    for n in most_probable_first():
      if mass >= top_p:
        break
      mass, least = mass + chance[n], scores[n]
    left = {n for n in left if scores[n] >= least}
  if min_p:
    chance = chances()
    left = {n for n in left if chance[n] >= min_p * max(chance.values())}
  return left


def _kept(scores_SV, sampling):
  left_SV = np.asarray(_truncate(jnp.asarray(scores_SV), sampling))
  kept_SV = np.isfinite(left_SV)
  np.testing.assert_array_equal(left_SV[kept_SV], scores_SV[kept_SV])
  assert (left_SV[~kept_SV] == -np.inf).all()
  return [set(np.flatnonzero(kept_V).tolist()) for kept_V in kept_SV]


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'top_k': 1},
    {'top_k': 3},
    {'top_k': _V},
    {'top_k': 99},
    {'top_p': 0.01},
    {'top_p': 0.5},
    {'top_p': 0.93},
    {'min_p': 0.11},
    {'min_p': 1.0},
    {'top_k': 4, 'top_p': 0.8},
    {'top_k': 4, 'min_p': 0.3},
    {'top_p': 0.9, 'min_p': 0.2},
    {'top_k': 5, 'top_p': 0.95, 'min_p': 0.15},
  ],
  ids=str,
)
def test_what_is_left_is_what_the_twin_leaves(options):
  scores_SV = np.random.default_rng(0).normal(0, 1.5, (64, _V))
  scores_SV = scores_SV.astype(np.float32)
  kept = _kept(scores_SV, sampler.Sampling(1.0, **options))
  assert kept == [_left(scores_V, **options) for scores_V in scores_SV]
  if options.get('top_k') == 1 or options.get('min_p') == 1:
    assert all(len(left) == 1 for left in kept)


def test_each_is_taken_of_what_the_one_before_left():
  # 0.4 0.3 0.2 0.1: half of the mass is two tokens of all four, but one of
  # the first two that top_k leaves (4/7).
  scores_SV = np.log([[0.4, 0.3, 0.2, 0.1]]).astype(np.float32)
  for options, left in (
    ({'top_p': 0.5}, {0, 1}),
    ({'top_k': 2, 'top_p': 0.5}, {0}),
    ({'top_k': 3, 'min_p': 0.6}, {0, 1}),
    ({'top_p': 0.95, 'min_p': 0.3}, {0, 1, 2}),
  ):
    assert _kept(scores_SV, sampler.Sampling(1.0, **options)) == [left]


@pytest.mark.parametrize(
  ('options', 'left'),
  [
    ({'top_k': 1}, {1, 4}),
    ({'top_k': 2}, {1, 4}),
    ({'top_k': 3}, {0, 1, 3, 4, 6}),
    ({'top_p': 0.2}, {1, 4}),
    ({'top_p': 0.7}, {0, 1, 3, 4, 6}),
    ({'min_p': 0.9}, {1, 4}),
  ],
)
def test_equal_scores_share_their_fate(options, left):
  scores_SV = np.array([[1, 2, 0, 1, 2, 0, 1]], np.float32)
  assert _kept(scores_SV, sampler.Sampling(1.0, **options)) == [left]
  assert _left(scores_SV[0], **options) == left


@given(
  st.lists(st.integers(-8, 8), min_size=_V, max_size=_V),
  st.sampled_from([0, 1, 2, 3, 5]),
  st.sampled_from([0.05, 0.37, 0.71, 0.993, 1.0]),
  st.sampled_from([0.0, 0.013, 0.27]),
)
def test_no_counterexample_is_found(scores, top_k, top_p, min_p):
  options = {'top_k': top_k, 'top_p': top_p, 'min_p': min_p}
  scores_SV = np.array([scores], np.float32)
  (kept,) = _kept(scores_SV, sampler.Sampling(1.0, **options))
  assert kept == _left(np.float64(scores), **options)


_TRUNCATED = [
  sampler.Sampling(1.0),
  sampler.Sampling(0.7),
  sampler.Sampling(1.3, top_k=3),
  sampler.Sampling(1.0, top_p=0.8),
  sampler.Sampling(1.6, min_p=0.25),
  sampler.Sampling(1.2, top_k=5, top_p=0.9, min_p=0.12),
]
_LOGITS_V = np.array([0.3, 1.1, -0.5, 0.9, -2.0, 0.0, 1.7], np.float32)


def _chances(sampling):
  """Exact probabilities of `_LOGITS_V`, untruncated and truncated."""
  scores_V = np.float64(_LOGITS_V) / sampling.temperature
  options = {n: getattr(sampling, n) for n in ('top_k', 'top_p', 'min_p')}
  left_V = np.full(_V, -np.inf)
  for n in _left(scores_V, **options):
    left_V[n] = scores_V[n]
  return scipy.special.softmax(scores_V), scipy.special.softmax(left_V)


@functools.cache
def _drawn(sampling, count=8192):
  """Draws of one distribution, each with a key of its own."""
  keys_S = jax.random.split(jax.random.key(3), count)
  logits_SV = jnp.broadcast_to(_LOGITS_V, (count, _V))
  positions_S = jnp.arange(count, dtype=jnp.int32)
  drawn = _draw(logits_SV, keys_S, positions_S, sampling, False)
  return jax.tree.map(np.asarray, drawn)


@pytest.mark.parametrize('sampling', _TRUNCATED, ids=str)
def test_tokens_come_as_often_as_they_should(sampling):
  tokens_S = _drawn(sampling).tokens_S
  counts_V = np.bincount(tokens_S, minlength=_V)
  _, chances_V = _chances(sampling)
  possible_V = chances_V > 0
  assert not counts_V[~possible_V].any()
  wanted_V = chances_V[possible_V] * len(tokens_S)
  assert wanted_V.min() > 5
  assert scipy.stats.chisquare(counts_V[possible_V], wanted_V).pvalue > 1e-2
  # The statistic can tell: another temperature would have been seen.
  other_V = chances_V[possible_V] ** 1.3
  other_V *= len(tokens_S) / other_V.sum()
  assert scipy.stats.chisquare(counts_V[possible_V], other_V).pvalue < 1e-3


@pytest.mark.parametrize('sampling', _TRUNCATED, ids=str)
def test_both_logprobs_are_exact(sampling):
  drawn = _drawn(sampling)
  whole_V, truncated_V = _chances(sampling)
  np.testing.assert_allclose(
    drawn.logprobs_S, np.log(whole_V)[drawn.tokens_S], atol=1e-5
  )
  np.testing.assert_allclose(
    drawn.truncated_logprobs_S, np.log(truncated_V[drawn.tokens_S]), atol=1e-5
  )
  # What was drawn from sums to one over what is left, the rest does not.
  seen, first = np.unique(drawn.tokens_S, return_index=True)
  assert set(seen) == set(np.flatnonzero(truncated_V))
  assert np.exp(drawn.truncated_logprobs_S[first]).sum() == pytest.approx(1)
  mass = np.exp(drawn.logprobs_S[first]).sum()
  assert mass == pytest.approx(whole_V[seen].sum())


@pytest.mark.parametrize('sampling', _TRUNCATED, ids=str)
def test_greedy_is_the_likeliest_whatever_the_key(sampling):
  logits_SV = np.random.default_rng(1).normal(size=(32, _V)).astype(np.float32)
  keys_S = jax.random.split(jax.random.key(0), 32)
  positions_S = jnp.arange(32, dtype=jnp.int32)
  drawn = _draw(logits_SV, keys_S, positions_S, sampling, True)
  np.testing.assert_array_equal(drawn.tokens_S, logits_SV.argmax(1))
  chances_SV = scipy.special.softmax(logits_SV / sampling.temperature, axis=1)
  np.testing.assert_allclose(
    drawn.logprobs_S, np.log(chances_SV.max(1)), atol=1e-5
  )


def test_the_noise_is_new_at_every_position():
  # Were it a function of the row alone, a row would repeat its choice.
  keys_S = jax.random.split(jax.random.key(0), 2)
  noise = [
    np.asarray(sampler._gumbel(keys_S, jnp.full(2, position), 5))
    for position in (3, 3, 4)
  ]
  np.testing.assert_array_equal(noise[0], noise[1])
  assert not np.isclose(noise[0], noise[2]).any()
  assert not np.isclose(noise[0][0], noise[0][1]).any()


def test_a_draw_depends_on_key_and_position_only():
  sampling = sampler.Sampling(1.0, top_k=5)
  rng = np.random.default_rng(2)
  logits_SV = rng.normal(size=(16, _V)).astype(np.float32)
  keys_S = jax.random.split(jax.random.key(5), 16)
  positions_S = jnp.asarray(rng.integers(0, 99, 16), jnp.int32)
  drawn = _draw(logits_SV, keys_S, positions_S, sampling, False)
  order = rng.permutation(16)
  moved = _draw(
    logits_SV[order], keys_S[order], positions_S[order], sampling, False
  )
  for x_S, moved_S in zip(drawn, moved):
    np.testing.assert_array_equal(np.asarray(x_S)[order], moved_S)
  # Half of them in a batch of another size.
  few = _draw(logits_SV[:8], keys_S[:8], positions_S[:8], sampling, False)
  np.testing.assert_array_equal(few.tokens_S, drawn.tokens_S[:8])
