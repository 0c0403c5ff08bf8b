"""Seconds and tokens per second, by hand."""

import time

import pytest

from stppo_jax.records import timing


def test_phases_are_measured_and_announced(monkeypatch):
  clock = iter([100.0, 101.5, 105.5])
  monkeypatch.setattr(time, 'monotonic', lambda: next(clock))
  phases = []
  timer = timing.Timer('wait', phases.append)
  timer.begin('update')
  timer.end()
  assert timer.laps == {'timing_s/wait': 1.5, 'timing_s/update': 4.0}
  assert phases == ['wait', 'update', '']


def test_tokens_per_second():
  laps = {
    'timing_s/wait': 0.5,
    'timing_s/annotate': 1.0,
    'timing_s/update': 4.0,
  }
  metrics = timing.step_metrics(
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
