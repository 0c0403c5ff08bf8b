"""The ratios of a batch at every level, and how many are outside of bounds."""

import jax
import numpy as np
import pytest

from stppo_jax.rl import objectives
from stppo_jax.tools.lab import lab
from stppo_jax.tools.lab import levels
from tests.rl import batches
from tests.tools.lab import batch_arrays


@pytest.fixture(scope='module')
def measured():
  with jax.enable_x64(True):
    arrays, batch, logprobs, _ = batch_arrays.arrays()
    compared = {}
    # The ratios are those of the first arrays, which have sentences.
    for name, more in (('gspo', {'sentence_ids_BL'}), ('token_ppo', set())):
      algorithm = batches.algorithm(name)
      needs = lab.required_arrays(algorithm, entropy_coefficient=0.0) | more
      compared[name] = algorithm, batch_arrays.selected(arrays, needs)
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


@pytest.mark.slow
def test_bounds_are_shown_where_an_objective_reads_them():
  _, batch, logprobs, entropy = batch_arrays.arrays()
  algorithms = {}
  for name in objectives.OBJECTIVES:
    pair = (
      batches.algorithm('turn_ppo', objective__name=name, bounds__clip_high=x)
      for x in (0.05, 0.9)
    )
    algorithms[name] = jax.tree.map(lambda *x: np.array(x), *pair)

  def loss(algorithm):
    return batches.policy_loss(algorithm, logprobs, entropy, batch).policy

  @jax.jit
  def losses(algorithms):
    return {name: jax.vmap(loss)(pair) for name, pair in algorithms.items()}

  with jax.enable_x64(True):
    found = jax.device_get(losses(algorithms))
  for name, (narrow, wide) in found.items():
    assert (narrow != wide) == (name not in levels.WITHOUT_BOUNDS), name
