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
  seconds = {'collect': 3.5, 'wait': 0.5, 'annotate': 1.0, 'update': 4.0}
  metrics = {f'timing_s/{name}': x for name, x in seconds.items()}
  assert timing.speed(packed, metrics, num_epochs=2) == {
    # The step did not wait for all of its collection.
    'perf/throughput': pytest.approx(11 / 5.5),
    'perf/collect_tokens_per_second': pytest.approx(7 / 3.5),
    'perf/update_tokens_per_second': pytest.approx(11 * 2 / 4.0),
  }
