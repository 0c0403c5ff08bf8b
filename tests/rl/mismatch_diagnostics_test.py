"""The metrics of the sampler's mismatch, by hand and against plain numpy."""

import jax
import numpy as np
import pytest

from stppo_jax.rl import diagnostics
from tests.rl import batches

_measure = jax.jit(diagnostics.mismatch)


def test_metrics_are_those_of_numpy():
  rng = np.random.default_rng(0)
  mask = rng.random((20, 50)) < 0.4
  old, sampler = -np.abs(rng.normal(size=(2, *mask.shape)))
  logs = np.where(mask, old - sampler, 0)
  log_k = logs[mask]
  k = np.exp(log_k)
  expected = {
    'mismatch/logprob_abs_diff': np.abs(log_k).max(),
    'mismatch/logprob_abs_diff_mean': np.abs(log_k).mean(),
    # One token in a hundred is larger.
    'mismatch/logprob_abs_diff_p99': np.sort(np.abs(log_k))[
      -(k.size // 100) - 1
    ],
    'mismatch/k3': (k - 1 - log_k).mean(),
    'mismatch/weight_raw_mean': k.mean(),
    'mismatch/weight_raw_max': k.max(),
    'mismatch/sequence_log_weight_raw_max': np.abs(logs.sum(1)).max(),
    'mismatch/ess': k.sum() ** 2 / (k.size * (k**2).sum()),
  }
  found = _measure(old, sampler, mask)
  assert k.size >= 300 and found.keys() == expected.keys()
  for name, value in expected.items():
    assert found[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize('apart', [2.0, 50.0, 1000.0, -50.0, -1000.0])
def test_nothing_overflows_and_nothing_vanishes(apart):
  mask = np.ones((3, 4000), bool)
  old = np.full(mask.shape, apart / 2, np.float32)
  with jax.enable_x64(False):
    found = jax.device_get(_measure(old, -old, mask))
  assert all(np.isfinite(x) for x in found.values())
  assert found['mismatch/ess'] == pytest.approx(1, rel=1e-5)  # all are equal
  assert found['mismatch/logprob_abs_diff'] == abs(apart)
  product = found['mismatch/sequence_log_weight_raw_max']
  assert product == pytest.approx(4000 * abs(apart), rel=1e-5)
  largest = np.exp(min(apart, diagnostics.LOG_WEIGHT_LIMIT))
  assert found['mismatch/weight_raw_max'] == pytest.approx(largest, rel=1e-5)


def test_what_is_off_the_mask_does_not_count():
  batch, *_ = batches.make()
  mask = batch.loss_mask_BL
  arrays = batch.old_logprobs_BL, batch.sampler_logprobs_BL
  clean = _measure(*arrays, mask)
  for value in (np.nan, np.inf, -np.inf):
    poisoned = (batches.poison_array(x, mask, value) for x in arrays)
    assert _measure(*poisoned, mask) == clean
  nothing = _measure(*arrays, np.zeros_like(mask))
  assert {float(x) for x in nothing.values()} == {0.0}


_measure_segments = jax.jit(
  diagnostics.mismatch_of_segments, static_argnames='num_turns'
)


def _of_segments(log_k, turn_ids):
  batch, *_ = batches.make()
  batch = batch.replace(
    turn_ids_BL=turn_ids,
    loss_mask_BL=turn_ids > 0,
    old_logprobs_BL=log_k,
    sampler_logprobs_BL=np.zeros_like(log_k),
  )
  return _measure_segments(batch, num_turns=2)


def test_means_and_products_of_turns_and_sequences_by_hand():
  k = np.array([[2.0, 8.0, 0.5, np.nan], [1.0, np.nan, np.nan, 0.25]])
  turns = np.array([[1, 1, 2, 0], [1, 0, 0, 2]], np.int32)
  expected = {
    'turn/mean': (4, 4, 0.5, 1, 0.25),
    'turn/sum': (16, 16, 0.5, 1, 0.25),
    'sequence/mean': (2, 2, 2, 0.5, 0.5),
    'sequence/sum': (8, 8, 8, 0.25, 0.25),
  }
  assert _of_segments(np.log(k), turns) == pytest.approx(
    {
      f'mismatch/{name}/weight_raw_{kind}': value
      for name, values in expected.items()
      for kind, value in (('mean', np.mean(values)), ('max', max(values)))
    },
    rel=1e-12,
  )


@pytest.mark.parametrize('apart', [1000.0, -1000.0])
def test_a_product_that_overflows_is_shown_as_the_largest_weight(apart):
  turns = np.repeat(np.array([[1, 2]], np.int32), 2000, axis=1)
  with jax.enable_x64(False):
    found = jax.device_get(
      _of_segments(np.full(turns.shape, apart, np.float32), turns)
    )
  largest = np.exp(min(apart, diagnostics.LOG_WEIGHT_LIMIT))
  assert list(found.values()) == pytest.approx([largest] * 8, rel=1e-4)
