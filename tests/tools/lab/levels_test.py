"""The ratios of a batch at every level, and how many are outside of bounds."""

import jax
import numpy as np
import pytest

from stppo_jax.rl import objectives
from stppo_jax.tools.lab import lab
from stppo_jax.tools.lab import levels
from stppo_jax.tools.lab import saved_batch
from tests.rl import batches
from tests.tools.lab import batch_arrays

_NAMES = ('token_ppo', 'turn_ppo', 'gspo', 'sspo')


@pytest.fixture(scope='module')
def measured():
  with jax.enable_x64(True):
    arrays, batch, logprobs, _ = batch_arrays.arrays()
    algorithms = {name: batches.algorithm(name) for name in _NAMES}
    needs = {
      name
      for algorithm in algorithms.values()
      for name in lab.required_arrays(algorithm, entropy_coefficient=0.0)
    }
    arrays = saved_batch.select(
      arrays, dict.fromkeys(needs, 'it'), dtype=np.float64
    )
    compared = {label: (x, arrays) for label, x in algorithms.items()}
    yield levels.measure(compared), batch, logprobs


def _means(ids, batch, logprobs):
  """Returns the mean log-ratio of each segment, by loops."""
  log_ratio = logprobs - batch.old_logprobs_BL
  found = []
  for b, row in enumerate(batch.loss_mask_BL):
    for number in np.unique(ids[b][row]):
      own = row & (ids[b] == number)
      found.append(log_ratio[b][own].mean())
  return found


def test_log_ratios_are_those_of_loops(measured):
  found, batch, logprobs = measured
  shape = batch.loss_mask_BL.shape
  for level, ids in {
    'token': np.broadcast_to(np.arange(shape[1]), shape),
    'turn': batch.turn_ids_BL,
    'sentence': batch.sentence_ids_BL,
    'sequence': np.zeros(shape),
  }.items():
    expected = _means(np.asarray(ids), batch, logprobs)
    np.testing.assert_allclose(
      np.sort(found.log_ratios[level]), np.sort(expected), rtol=1e-12
    )


def test_shares_outside_of_bounds_are_those_of_the_tokens(measured):
  found, batch, logprobs = measured
  bounds = found.bounds['token_ppo']
  ratio = np.exp(logprobs - batch.old_logprobs_BL)[batch.loss_mask_BL]
  assert bounds.level == 'token'
  assert (bounds.low, bounds.high) == pytest.approx((0.8, 1.2))
  assert bounds.below == (ratio < 0.8).mean() > 0
  assert bounds.above == (ratio > 1.2).mean() > 0
  # The bounds of GSPO are made for means over whole sequences.
  assert found.bounds['gspo'].level == 'sequence'
  assert 0.999 < found.bounds['gspo'].low < 1


def test_a_bound_below_every_ratio_is_none():
  wide = levels.Bounds('token', -9.0, 5.0, 0.0, 0.0)
  unread = levels.Bounds('token', *[float('nan')] * 4)
  found = levels.Levels({}, {'cispo': wide, 'rloo': unread})
  lines = [line.split() for line in levels.table(found).splitlines()]
  assert ['cispo', 'token', 'none', '5', '0.00%', '0.00%'] in lines
  assert ['rloo', 'token', *'————'] in lines


@pytest.mark.parametrize('objective', objectives.OBJECTIVES)
def test_bounds_are_shown_where_an_objective_reads_them(objective):
  arrays, batch, logprobs, entropy = batch_arrays.arrays()
  read = objective not in levels.WITHOUT_BOUNDS
  losses = []
  for high in (0.05, 0.9):
    algorithm = batches.algorithm(
      'turn_ppo', objective__name=objective, bounds__clip_high=high
    )
    with jax.enable_x64(True):
      loss = batches.policy_loss(algorithm, logprobs, entropy, batch)
    losses.append(float(loss.policy))
  assert (losses[0] != losses[1]) == read
