"""The first step of a run: rounding passes, everything else does not."""

import math

import pytest

from stppo_jax.training import mismatch_check


@pytest.mark.parametrize('difference', [0.0, 3e-6, 1e-4])
def test_rounding_is_agreement(difference):
  mismatch_check.check({'mismatch/logprob_abs_diff': difference}, limit=1e-4)


@pytest.mark.parametrize('difference', [1.1e-4, 2.5, math.inf, math.nan])
def test_anything_else_is_one_line(difference):
  metrics = {'mismatch/logprob_abs_diff': difference}
  with pytest.raises(mismatch_check.Disagreement) as caught:
    mismatch_check.check(metrics, limit=1e-4)
  assert caught.value.exit_code == 2
  (line,) = str(caught.value).splitlines()
  assert f'is {difference:.3g}, more than rollout.mismatch_limit=0.0001' in line
  mismatch_check.check(metrics, limit=0.0)  # switched off
