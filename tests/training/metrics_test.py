"""The shares of the peak of the devices, by hand."""

import pytest

from stppo_jax.training import metrics as metrics_lib

_COUNTS = metrics_lib.Counts(
  policy=10.0, value=8.0, policy_again=3.0, value_again=2.0
)


@pytest.mark.parametrize(
  ('value', 'adapters', 'extra', 'needed', 'again'),
  [
    (False, False, False, 3 * 10, 3),
    (True, False, False, 3 * (10 + 8), 3 + 2),
    (True, True, False, 2 * (10 + 8), 3 + 2),
    (False, False, True, 3 * 10, 3 + 10),
  ],
)
def test_shares_of_the_peak(value, adapters, extra, needed, again):
  found = metrics_lib.shares(
    _COUNTS,
    peak_operations=100.0,
    has_value_model=value,
    trains_adapters=adapters,
    extra_pass=extra,
  )
  assert found == {
    'perf/mfu': needed / 100,
    'perf/hfu': pytest.approx((needed + again) / 100),
  }
