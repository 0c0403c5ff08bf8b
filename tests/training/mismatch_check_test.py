"""The first step of a run: rounding passes, everything else does not."""

import math

import ml_collections
import pytest

from stppo_jax.training import checks


def _metrics(mean, tail):
  return {
    'mismatch/logprob_abs_diff_mean': mean,
    'mismatch/logprob_abs_diff_p99': tail,
  }


def _check(metrics, *, limit, dtype):
  config = ml_collections.ConfigDict(
    {'rollout': {'mismatch_limit': limit}, 'model': {'dtype': dtype}}
  )
  checks.check(config, metrics)


@pytest.mark.parametrize(
  ('dtype', 'mean', 'tail'),
  [
    ('float32', 0.0, 0.0),
    ('float32', 3e-6, 2e-5),
    ('bfloat16', 0.01, 0.1),
  ],
)
def test_rounding_is_agreement(dtype, mean, tail):
  _check(_metrics(mean, tail), limit=-1.0, dtype=dtype)


@pytest.mark.parametrize(
  ('mean', 'tail'),
  [(1.1, 2.0), (0.5, 10.1), (math.inf, 2.0), (math.nan, 2.0), (0.5, math.nan)],
)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_anything_else_is_one_line(dtype, mean, tail):
  metrics = _metrics(mean, tail)
  with pytest.raises(checks.Disagreement) as caught:
    _check(metrics, limit=-1.0, dtype=dtype)
  assert caught.value.exit_code == 2
  (line,) = str(caught.value).splitlines()
  assert f'_mean is {mean:.3g} (at most ' in line
  assert f'_p99 is {tail:.3g} (at most ' in line
  assert f'by the limit for model.dtype={dtype};' in line
  with pytest.raises(checks.Disagreement, match='by rollout.mismatch_l'):
    _check(metrics, limit=1.0, dtype=dtype)
  _check(metrics, limit=0.0, dtype=dtype)  # switched off


def test_the_value_that_the_message_asks_for_passes():
  metrics = _metrics(0.2, 5.0)
  with pytest.raises(checks.Disagreement) as caught:
    _check(metrics, limit=-1.0, dtype='bfloat16')
  assert 'set rollout.mismatch_limit above 0.5;' in str(caught.value)
  _check(metrics, limit=0.51, dtype='bfloat16')
