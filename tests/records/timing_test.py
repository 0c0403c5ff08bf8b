"""Seconds and tokens per second, by hand."""

import time

import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax.records import timing


def test_laps_are_apart(monkeypatch):
  clock = iter([100.0, 101.5, 105.5])
  monkeypatch.setattr(time, 'monotonic', lambda: next(clock))
  timer = timing.Timer()
  timer.lap('wait')
  timer.lap('update')
  assert timer.laps == {'timing_s/wait': 1.5, 'timing_s/update': 4.0}


def test_tokens_per_second():
  turn_ids = np.array([[0, 1, 1, 0, 2, 0], [0, 0, 1, 1, 1, 1]])
  packed = batch_lib.TokenBatch(
    tokens_BL=turn_ids,
    lengths_B=np.array([5, 6]),
    turn_ids_BL=turn_ids,
    loss_mask_BL=turn_ids > 0,
    sampler_logprobs_BL=turn_ids,
    rewards_BL=turn_ids,
    group_ids_B=np.arange(2),
  )
  laps = {
    'timing_s/wait': 0.5,
    'timing_s/annotate': 1.0,
    'timing_s/update': 4.0,
  }
  metrics = timing.step_metrics(
    laps, packed, collect_seconds=3.5, save_seconds=0.25, num_epochs=2
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
