"""Seconds and tokens per second, by hand."""

import pytest

from stppo_jax.training import metrics as metrics_lib


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
