"""Seconds and tokens per second, by hand."""

import pytest

from stppo_jax.training import metrics as metrics_lib

_COUNTS = metrics_lib.Counts(
  policy=10.0, value=8.0, policy_again=3.0, value_again=2.0
)


def test_tokens_per_second():
  laps = {
    'timing_s/wait': 0.5,
    'timing_s/annotate': 1.0,
    'timing_s/update': 4.0,
  }
  metrics = metrics_lib.timings(
    laps,
    tokens=11.0,
    sampled=7.0,
    collect_seconds=3.5,
    save_seconds=0.25,
    num_epochs=2,
  )
  assert metrics == laps | {
    'timing_s/collect': 3.5,
    'timing_s/checkpoint': 0.25,
    # The step did not wait for all of its collection.
    'timing_s/step': 5.5,
    'perf/throughput': pytest.approx(11 / 5.5),
    'perf/collect_tokens_per_second': pytest.approx(7 / 3.5),
    'perf/update_tokens_per_second': pytest.approx(11 * 2 / 4.0),
  }


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
