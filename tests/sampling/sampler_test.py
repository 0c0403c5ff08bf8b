"""The sampler equals loops over single tokens, in truncation and frequency."""

import functools

import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats

from stppo_jax.sampling import sampler

_V = 7
_ROWS = 64
_SAMPLES = 8192


def _left(logits, top_k=0, top_p=1.0, min_p=0.0):
  """Returns the tokens of one row that truncation leaves, by loops."""
  left = set(range(len(logits)))

  def most_probable_first():
    return sorted(left, key=lambda n: -logits[n])

  def probs():
    total = sum(np.exp(logits[n]) for n in left)
    return {n: np.exp(logits[n]) / total for n in left}

  if top_k and top_k < len(left):
    least = logits[most_probable_first()[top_k - 1]]
    left = {n for n in left if logits[n] >= least}
  if top_p < 1:
    mass, least, probs_left = 0.0, None, probs()
    for n in most_probable_first():
      if mass >= top_p:
        break
      mass, least = mass + probs_left[n], logits[n]
    left = {n for n in left if logits[n] >= least}
  if min_p:
    probs_left = probs()
    left = {
      n for n in left if probs_left[n] >= min_p * max(probs_left.values())
    }
  return left


@jax.jit
def _truncated(logits_SV):
  """Returns what each truncation leaves of logits."""
  return [
    sampler.truncate(logits_SV, sampler.Sampling(1.0, **options))
    for options in _OPTIONS
  ]


_OPTIONS = [
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
]


@pytest.mark.parametrize('options', _OPTIONS, ids=str)
def test_truncation_equals_loops(options):
  rng = np.random.default_rng(0)
  # In the second half, logits are often equal.
  logits_SV = np.concatenate(
    [
      rng.normal(0, 1.5, (_ROWS // 2, _V)),
      rng.integers(-4, 5, (_ROWS // 2, _V)) / 2,
    ]
  ).astype(np.float32)
  left_SV = np.asarray(_truncated(logits_SV)[_OPTIONS.index(options)])
  kept_SV = np.isfinite(left_SV)
  np.testing.assert_array_equal(left_SV[kept_SV], logits_SV[kept_SV])
  assert (left_SV[~kept_SV] == -np.inf).all()
  kept = [set(np.flatnonzero(kept_V).tolist()) for kept_V in kept_SV]
  assert kept == [
    _left(np.float64(logits_V), **options) for logits_V in logits_SV
  ]
  if options.get('top_k') == 1 or options.get('min_p') == 1:
    assert all(len(left) == 1 for left in kept[: _ROWS // 2])


_TRUNCATED = [
  sampler.Sampling(1.0),
  sampler.Sampling(0.7),
  sampler.Sampling(1.3, top_k=3),
  sampler.Sampling(1.0, top_p=0.8),
  sampler.Sampling(1.6, min_p=0.25),
  sampler.Sampling(1.2, top_k=5, top_p=0.9, min_p=0.12),
]
_LOGITS_V = np.array([0.3, 1.1, -0.5, 0.9, -2.0, 0.0, 1.7], np.float32)


def _probs(sampling):
  """Returns the probabilities of `_LOGITS_V`, untruncated and truncated."""
  logits_V = np.float64(_LOGITS_V) / sampling.temperature
  options = {n: getattr(sampling, n) for n in ('top_k', 'top_p', 'min_p')}
  left_V = np.full(_V, -np.inf)
  for n in _left(logits_V, **options):
    left_V[n] = logits_V[n]
  return scipy.special.softmax(logits_V), scipy.special.softmax(left_V)


def _draw(sampling, greedy, logits_SV, key_data_S2, positions_S):
  keys_S = jax.random.wrap_key_data(key_data_S2)
  return sampler.sample(
    logits_SV, keys_S, positions_S, sampling, greedy, branches=True
  )


@jax.jit
def _draw_all(greedy, *rows):
  return [_draw(sampling, greedy, *rows) for sampling in _TRUNCATED]


def _keys(seed, count=_SAMPLES):
  """Returns the data of a key for each row."""
  return np.random.default_rng(seed).integers(
    2**32, size=(count, 2), dtype='u4'
  )


def _sample(sampling, greedy, *rows):
  """Returns a sample of each row.

  Args:
    sampling: one of `_TRUNCATED`.
    greedy: whether to take the most probable token.
    *rows: logits, keys and, unless they are 0, 1, 2 and so on, positions. The
      rows are repeated up to `_SAMPLES`, so that one program samples them all.
  """
  rows = *rows, np.arange(_SAMPLES, dtype=np.int32)
  padded = [np.resize(x, (_SAMPLES, *x.shape[1:])) for x in rows[:3]]
  sampled = _draw_all(greedy, *padded)[_TRUNCATED.index(sampling)]
  return jax.tree.map(lambda x: np.asarray(x)[: len(rows[0])], sampled)


@functools.cache
def _samples(sampling):
  """Returns samples of `_LOGITS_V`, each with a key of its own."""
  return _sample(sampling, False, np.tile(_LOGITS_V, (_SAMPLES, 1)), _keys(3))


@pytest.mark.parametrize('sampling', _TRUNCATED, ids=str)
def test_tokens_are_as_frequent_as_they_are_probable(sampling):
  tokens_S = _samples(sampling).tokens_S
  counts_V = np.bincount(tokens_S, minlength=_V)
  _, probs_V = _probs(sampling)
  possible_V = probs_V > 0
  assert not counts_V[~possible_V].any()
  expected_V = probs_V[possible_V] * len(tokens_S)
  assert expected_V.min() > 5
  assert scipy.stats.chisquare(counts_V[possible_V], expected_V).pvalue > 1e-2
  # A wrong temperature would be noticed.
  other_V = probs_V[possible_V] ** 1.3
  other_V *= len(tokens_S) / other_V.sum()
  assert scipy.stats.chisquare(counts_V[possible_V], other_V).pvalue < 1e-3


@pytest.mark.parametrize('sampling', _TRUNCATED, ids=str)
def test_both_logprobs_are_exact(sampling):
  sampled = _samples(sampling)
  whole_V, truncated_V = _probs(sampling)
  np.testing.assert_allclose(
    sampled.logprobs_S, np.log(whole_V)[sampled.tokens_S], atol=1e-5
  )
  np.testing.assert_allclose(
    sampled.truncated_logprobs_S,
    np.log(truncated_V[sampled.tokens_S]),
    atol=1e-5,
  )
  # Over the tokens that are left, only the truncated distribution sums to 1.
  seen, first = np.unique(sampled.tokens_S, return_index=True)
  assert set(seen) == set(np.flatnonzero(truncated_V))
  assert np.exp(sampled.truncated_logprobs_S[first]).sum() == pytest.approx(1)
  mass = np.exp(sampled.logprobs_S[first]).sum()
  assert mass == pytest.approx(whole_V[seen].sum())


@pytest.mark.parametrize('sampling', _TRUNCATED, ids=str)
def test_greedy_takes_the_most_probable_token_with_any_key(sampling):
  logits_SV = np.random.default_rng(1).normal(size=(32, _V)).astype(np.float32)
  sampled = _sample(sampling, True, logits_SV, _keys(0, 32))
  np.testing.assert_array_equal(sampled.tokens_S, logits_SV.argmax(1))
  probs_SV = scipy.special.softmax(logits_SV / sampling.temperature, axis=1)
  np.testing.assert_allclose(
    sampled.logprobs_S, np.log(probs_SV.max(1)), atol=1e-5
  )


def test_the_noise_is_new_at_every_position():
  # Were it a function of the row alone, a row would repeat its choice.
  logits_SV = np.zeros((_SAMPLES, _V), np.float32)
  tokens = []
  for seed in (0, 0, 1):
    sampled = _sample(_TRUNCATED[0], False, logits_SV, _keys(seed, 1))
    tokens.append(sampled.tokens_S)
  first, again, other = tokens
  np.testing.assert_array_equal(first, again)
  # All pairs are as frequent: of neighbouring positions, and of two keys.
  for one, two in ((first[:-1], first[1:]), (first, other)):
    pairs = np.bincount(_V * one + two, minlength=_V**2)
    assert scipy.stats.chisquare(pairs).pvalue > 1e-2


def test_a_sample_depends_on_key_and_position_only():
  sampling = _TRUNCATED[2]
  rng = np.random.default_rng(2)
  rows = (
    rng.normal(size=(16, _V)).astype(np.float32),
    _keys(5, 16),
    rng.integers(0, 99, 16).astype(np.int32),
  )
  sampled = _sample(sampling, False, *rows)
  order = rng.permutation(16)
  moved = _sample(sampling, False, *(x[order] for x in rows))
  for x_S, moved_S in zip(sampled, moved):
    np.testing.assert_array_equal(x_S[order], moved_S)


def test_greedy_takes_the_first_of_equal_tokens_and_an_id_among_nans():
  logits_SV = np.zeros((_ROWS, _V), np.float32)
  logits_SV[0, [2, 5]] = 1.0
  logits_SV[1] = -np.inf
  logits_SV[2, 3] = np.nan
  tokens_S = _sample(_TRUNCATED[0], True, logits_SV, _keys(0)).tokens_S
  assert tokens_S.dtype == np.int32
  assert tokens_S[0] == 2
  assert tokens_S[1] == tokens_S[3] == 0
  assert 0 <= tokens_S[2] < _V
