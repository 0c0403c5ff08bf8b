"""Batches are cut off behind some tokens."""

import numpy as np

from tests.learner import updates


def test_first_tokens_cut_what_has_a_token_axis():
  batch = updates.batch(updates.sums())
  positions_BM = np.tile(np.arange(1, 6), (updates.B, 1))
  expert_ids = np.arange(updates.B * updates.L * 6).reshape(-1, updates.L, 2, 3)
  batch = batch.replace(loss_positions_BM=positions_BM, expert_ids=expert_ids)
  cut = batch.first_tokens(4)
  for name, array in vars(batch).items():
    if array is None:
      assert getattr(cut, name) is None
      continue
    expected = array if name.endswith('_B') else array[:, :4]
    np.testing.assert_array_equal(getattr(cut, name), expected, err_msg=name)
