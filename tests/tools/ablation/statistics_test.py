"""The statistics of a study against those of scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from stppo_jax.tools.ablation import results
from stppo_jax.tools.ablation import statistics
from stppo_jax.tools.ablation import study as study_lib
from stppo_jax.tools.ablation import verdict

# Areas of eight seeds of two arms.
_A = [0.21, 0.34, 0.27, 0.45, 0.19, 0.31, 0.38, 0.25]
_B = [0.48, 0.33, 0.52, 0.61, 0.44, 0.29, 0.57, 0.50]


@pytest.mark.parametrize('values', [_A, [0.1, 0.5, 0.4]])
def test_intervals_are_those_of_scipy(values):
  found = statistics.mean(values)
  expected = stats.bootstrap(
    (np.array(values),),
    np.mean,
    method='percentile',
    n_resamples=100_000,
    rng=np.random.default_rng(1),
  ).confidence_interval
  assert found.mean == pytest.approx(np.mean(values))
  # 1,000 resamples: the ends have an error of some 0.004 of their own.
  np.testing.assert_allclose(found[1:], expected, atol=0.012)


@pytest.mark.parametrize(
  ('count', 'total'), [(0, 8), (3, 8), (8, 8), (1, 3), (0, 1)]
)
def test_the_interval_of_a_share_is_that_of_scipy(count, total):
  found = statistics.rate(count, total)
  expected = stats.binomtest(count, total).proportion_ci(method='wilson')
  np.testing.assert_allclose(found, [count / total, *expected], atol=1e-6)


def _permutations(values, others):
  """Returns the exact test of paired differences of scipy."""
  return stats.permutation_test(
    (values, others),
    lambda x, y, axis: np.mean(x - y, axis=axis),
    permutation_type='samples',
    vectorized=True,
    n_resamples=np.inf,
  )


@pytest.mark.parametrize('count', [3, 8])
def test_paired_differences_are_those_of_scipy(count):
  values, others = np.array(_B[:count]), np.array(_A[:count])
  found = statistics.difference(values, others)
  expected = _permutations(values, others)
  assert found.estimate.mean == pytest.approx(expected.statistic)
  assert found.p == pytest.approx(expected.pvalue)
  assert (found.seeds, found.larger) == (count, (values > others).sum())
  assert found.p >= 2 / 2**count
  turned = statistics.difference(others, values)
  assert turned.p == found.p
  assert turned.estimate.mean == pytest.approx(-found.estimate.mean)


def test_many_seeds_have_a_drawn_p_value():
  values = np.random.default_rng(0).normal(0.3, 1.0, 13)
  found = statistics.difference(values, np.zeros(13))
  expected = _permutations(values, np.zeros(13))
  assert found.p == pytest.approx(expected.pvalue, abs=0.015)


def test_missing_numbers_are_left_out():
  values = np.array([1.0, math.nan, 3.0, math.nan])
  assert statistics.over_numbers(np.mean, values) == 2
  assert statistics.over_numbers(statistics.last, values) == 3
  more = np.append(values, [100.0, 101.0])
  assert statistics.over_numbers(np.median, more) == 51.5
  assert statistics.over_numbers(np.max, values) == 3
  nothing = np.array([math.nan])
  for reduce in (np.mean, statistics.last, np.median, np.max):
    assert math.isnan(statistics.over_numbers(reduce, nothing))


def test_without_a_number_there_is_no_p_value():
  assert math.isnan(statistics.difference([0.1, math.nan], [0.9, 0.8]).p)


def _run(arm, seed, values):
  """Returns a run that has the same values in every column."""
  return results.Run('', arm, seed, 'x', dict.fromkeys(results.COLUMNS, values))


def test_a_run_without_success_has_no_difference():
  one, other = np.full(31, math.nan), np.full(31, 0.5)
  study = study_lib.parse(
    'pair', {'seeds': 2, 'arms': {'': {'token_ppo': {}, 'st_ppo': {}}}}
  )
  runs = [
    _run(arm, seed, one if seed and arm == 'st_ppo' else other)
    for arm in ('token_ppo', 'st_ppo')
    for seed in range(2)
  ]
  _, row = verdict.tables(study, runs)['Paired differences']
  assert row == ['st_ppo', 'token_ppo', '2', *[''] * 6]


def test_the_first_five_steps_have_a_table_of_their_own():
  study = study_lib.parse('one', {'seeds': 2, 'arms': {'': {'token_ppo': {}}}})
  # Step 0 has evaluations only; the numbers after step 5 are far away.
  firsts = np.linspace(0.1, 0.5, 5), np.linspace(0.5, 0.9, 5)
  runs = [
    _run('token_ppo', seed, np.array([math.nan, *first, *[9.0] * 5]))
    for seed, first in enumerate(firsts)
  ]
  tables = verdict.tables(study, runs)
  head, row = tables['In the first 5 steps']
  assert head[2:] == [
    *('outside, token', 'outside, turn', 'outside, sequence', 'cut'),
    'turn length',
  ]
  assert row[2:] == ['0.500'] * 4 + ['0.5']
  head, row = tables['What happened in the updates']
  assert row[head.index('cut')] == '4.750'


@pytest.mark.slow
@pytest.mark.parametrize(('seeds', 'expected'), [(3, 0.75), (8, 0.9)])
def test_how_often_an_interval_of_few_seeds_contains_the_mean(seeds, expected):
  # docs/collapse.md says so.
  rng = np.random.default_rng(0)
  found = [statistics.mean(rng.normal(size=seeds)) for _ in range(400)]
  share = np.mean([low <= 0 <= high for _, low, high in found])
  assert share == pytest.approx(expected, abs=0.04)
