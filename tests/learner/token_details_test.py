"""Numbers of tokens after the updates, against a second computation of each."""

import functools

import jax
import numpy as np
import pytest

from stppo_jax.learner import token_details
from stppo_jax.parallel import hosts as hosts_lib
from tests.training import runs

_COUNT = 3
_CONFIG = {
  'writer__token_details': _COUNT,
  # One update that moves ratios out of the bounds.
  'policy_optimizer__learning_rate': 0.02,
  'policy_optimizer__warmup_updates': 0,
}


@functools.cache
def _updated():
  """Returns learner, state after an epoch of updates, and annotated batch."""
  learner = runs.learner(runs.config(**_CONFIG))
  state = learner.start()
  batch, _ = learner.annotate(
    state, runs.packed(), reference=learner.reference()
  )
  for rows in learner.minibatches(16, 0):
    state, _ = learner.update(state, batch, rows, 0)
  return learner, state, batch


@pytest.mark.slow
def test_the_numbers_of_tokens_are_those_of_the_new_policy():
  learner, state, batch = _updated()
  details = learner.token_details(state, batch, hosts_lib.ALONE)
  count = len(details.loss_mask_BL)
  assert count == 8  # one row for each device
  outputs = jax.device_get(learner.token_outputs(state, batch.tokens_BL))
  batch = jax.device_get(batch)
  mask_BL = batch.loss_mask_BL[:count]
  np.testing.assert_array_equal(details.loss_mask_BL, mask_BL)

  def at(x_BL):
    return x_BL[:count][mask_BL]

  log_ratio_BL = outputs.logprobs_BL - batch.old_logprobs_BL
  for name, expected in {
    'old_logprobs_BL': at(batch.old_logprobs_BL),
    'advantages_BL': at(batch.advantages_BL),
    'values_BL': at(batch.values_BL),
    'entropy_BL': at(outputs.entropy_BL),
    'ratio_BL': np.exp(at(log_ratio_BL)),
  }.items():
    np.testing.assert_allclose(
      getattr(details, name)[mask_BL], expected, rtol=1e-4, atol=1e-6
    )
  turn_ratio_BL = np.ones(log_ratio_BL.shape)
  for row in range(count):
    for turn in (1, 2):
      place = batch.turn_ids_BL[row] == turn
      turn_ratio_BL[row, place] = np.exp(log_ratio_BL[row, place].mean())
  np.testing.assert_allclose(
    details.turn_ratio_BL[mask_BL], at(turn_ratio_BL), rtol=1e-4
  )
  # st_ppo clips turn ratios, on the side where they would do harm.
  good_BL = batch.advantages_BL > 0
  cut_BL = np.where(good_BL, turn_ratio_BL > 1.2, turn_ratio_BL < 0.8)
  np.testing.assert_array_equal(details.cut_BL[mask_BL], at(cut_BL))
  assert 0 < at(cut_BL).sum() < mask_BL.sum()
  # Its correction gives one factor to the whole minibatch.
  assert len(np.unique(details.weights_BL[mask_BL])) == 1


@pytest.mark.slow
def test_each_host_gets_its_own_rows():
  learner, state, batch = _updated()
  rows = []
  for index in range(2):
    hosts = hosts_lib.Hosts(index, ('a', 'b'))
    details = learner.token_details(state, batch, hosts)
    rows.append(details.old_logprobs_BL)
  old_BL = jax.device_get(batch.old_logprobs_BL)
  expected = np.concatenate([old_BL[:4], old_BL[8:12]])
  np.testing.assert_array_equal(np.concatenate(rows), expected)


@pytest.mark.parametrize(
  ('num_rows', 'count', 'hosts', 'devices', 'expected'),
  [
    (16, 3, 1, 1, [0, 1, 2]),
    (16, 3, 1, 4, [0, 1, 2, 3]),
    (16, 3, 2, 2, [0, 1, 2, 8, 9, 10]),
    (16, 3, 2, 8, [0, 1, 2, 3, 8, 9, 10, 11]),
    (8, 100, 1, 2, list(range(8))),
    (8, 7, 1, 8, list(range(8))),
  ],
)
def test_rows_fill_devices(num_rows, count, hosts, devices, expected):
  rows = token_details.choose_rows(
    num_rows, count, num_hosts=hosts, num_devices=devices
  )
  assert rows.tolist() == expected
