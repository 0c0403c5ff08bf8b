"""Algorithms are told apart by the tokens that they cut, keep or amplify."""

import numpy as np
import pytest

from stppo_jax.tools.lab import token_changes
from tests.rl import batches
from tests.tools.lab import batch_arrays

pytestmark = pytest.mark.usefixtures('double_precision')


def _row(log_ratio, advantages, turns):
  """Returns the arrays of one row whose tokens are all of the policy."""
  shape = (1, len(log_ratio))
  return {
    'turn_ids_BL': np.array([turns]),
    'loss_mask_BL': np.ones(shape, bool),
    'logprobs_BL': np.array([log_ratio]) - 2.0,
    'old_logprobs_BL': np.full(shape, -2.0),
    'advantages_BL': np.array([advantages], float),
  }


def test_a_token_ratio_multiplies_its_token():
  ratio = np.array([0.5, 0.5, 1.0, 1.1, 1.5, 1.5, 1.0])
  arrays = _row(np.log(ratio), [1, -1, 1, 1, 1, -1, 0], [1] * 4 + [2] * 3)
  found = token_changes.multipliers(batches.algorithm('token_ppo'), arrays)
  # Cut below the bounds where the advantage is negative, above them where it is
  # positive; the median of 0.5, 1, 1.1 and 1.5 is 1.05.
  expected = np.array([0.5, 0, 1, 1.1, 0, 1.5, np.nan]) / 1.05
  np.testing.assert_allclose(found[0], expected, rtol=1e-12)


def test_a_factor_of_all_tokens_is_no_change():
  arrays = _row(np.full(7, 0.1), [1, -2, 3, 1, -1, 2, 1], [1] * 4 + [2] * 3)
  for name in ('token_ppo', 'turn_ppo'):
    found = token_changes.multipliers(batches.algorithm(name), arrays)
    np.testing.assert_allclose(found, 1, rtol=1e-12)


def test_a_divergence_in_the_loss_hides_no_cut():
  arrays = _row(np.log([0.5, 1, 1.1]), [-1, 1, 1], [1] * 3)
  arrays['ref_logprobs_BL'] = np.full((1, 3), -1.0)
  found = token_changes.multipliers(batches.algorithm('grpo'), arrays)
  np.testing.assert_allclose(found[0] * 1.05, [0, 1, 1.1], rtol=1e-12)


def test_the_shares_of_a_group_are_of_its_tokens_with_a_multiplier():
  multipliers = np.array([[0, -1, 0.5, 1.05, 1.2, np.nan, 3]])
  groups = token_changes.Groups(
    ['a', 'b', 'c'], np.array([[0, 0, 0, 0, 1, 2, -1]])
  )
  found = token_changes.shares(multipliers, groups)
  np.testing.assert_array_equal(found.cut, [0.5, 0, np.nan])
  np.testing.assert_array_equal(found.weakened, [0.25, 0, np.nan])
  np.testing.assert_array_equal(found.amplified, [0, 1, np.nan])


def test_tokens_are_grouped_by_turn_length_and_log_ratio():
  arrays = _row([-0.6, -0.1, 0, 0, 0.3, 9], [1] * 6, [1, 2, 2, 3, 3, 3])
  turn, length, log_ratio = token_changes.groupings(arrays).values()
  assert turn.labels == ['1', '2', '3']
  np.testing.assert_array_equal(turn.ids_BL, [[0, 1, 1, 2, 2, 2]])
  assert length.labels == ['1', '2', '3']
  np.testing.assert_array_equal(length.ids_BL, [[0, 1, 1, 2, 2, 2]])
  shown = [log_ratio.labels[n] for n in log_ratio.ids_BL[0]]
  middle = '-0.01 … 0.01'
  assert shown == [
    *('< -0.5', '-0.2 … -0.05', middle, middle, '0.2 … 0.5', '> 0.5')
  ]


def test_later_turns_are_one_group():
  arrays = _row(np.zeros(20), [1] * 20, np.arange(1, 21))
  turn = token_changes.groupings(arrays)['turn']
  assert turn.labels[-1] == '8+'
  np.testing.assert_array_equal(turn.ids_BL[0], np.minimum(np.arange(20), 7))


def test_tokens_off_the_mask_are_in_no_group():
  arrays, batch, *_ = batch_arrays.arrays(poison=np.nan)
  arrays['loss_mask_BL'] = mask = batch.loss_mask_BL
  for groups in token_changes.groupings(arrays).values():
    assert (groups.ids_BL[~mask] == -1).all()
    assert (groups.ids_BL[mask] >= 0).all()
    assert groups.ids_BL.max() < len(groups.labels)
