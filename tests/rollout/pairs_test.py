"""The pairs of a file, their order, and files that are refused."""

import hashlib

import numpy as np
import pytest

from stppo_jax.rollout import pairs as pairs_lib

_REWARDS = (0.5, 1.0, 0.0, 1.0, 0.3, 0.3, 0.0, 0.9)
_GROUPS = (7, 7, 7, 7, 2, 2, 5, 5)


def arrays(rewards=_REWARDS, groups=_GROUPS, length=6):
  """Returns arrays with one turn, tokens 2..4, in every row."""
  shape = (len(rewards), length)
  mask = np.zeros(shape, bool)
  mask[:, 2:5] = True
  placed = np.zeros(shape, np.float32)
  placed[:, 4] = rewards
  rows = np.arange(len(rewards), dtype=np.int32)[:, None]
  return {
    'tokens_BL': np.broadcast_to(rows, shape),
    'loss_mask_BL': mask,
    'rewards_BL': placed,
    'group_ids_B': np.array(groups, np.int32),
  }


def _rows(found):
  """Returns the row numbers of the pairs."""
  return found.tokens_Q2L[:, :, 2].tolist()


def test_the_best_and_the_worst_of_each_group_are_a_pair():
  # Group 2 is all equal; of group 7 the first of the two best.
  found = pairs_lib.pairs(**arrays())
  assert _rows(found) == [[7, 6], [1, 2]]
  assert found.tokens_Q2L.dtype == np.int32
  assert found.loss_mask_Q2L.dtype == bool
  np.testing.assert_array_equal(found.loss_mask_Q2L[0, 0], [0, 0, 1, 1, 1, 0])


def test_failed_rows_are_in_no_pair():
  given = arrays()
  given['loss_mask_BL'][[1, 6]] = False
  given['rewards_BL'][[1, 6]] = np.nan
  # The other best is taken; group 5 has one row left.
  assert _rows(pairs_lib.pairs(**given)) == [[3, 2]]


def test_rewards_of_all_turns_count_and_none_off_the_mask():
  given = arrays((1.0, 0.9), (0, 0))
  given['rewards_BL'][1, 2] = 0.2
  given['rewards_BL'][:, 0] = np.nan
  given['rewards_BL'][0, 5] = 9.0
  assert _rows(pairs_lib.pairs(**given)) == [[1, 0]]


def test_tokens_after_the_last_loss_position_are_dropped():
  given = arrays()
  given['tokens_BL'] = given['tokens_BL'].copy()
  given['tokens_BL'][:, 5] = -(2**31)  # the padding's id has no meaning
  found = pairs_lib.pairs(**given)
  assert not found.tokens_Q2L[:, :, 5].any()
  np.testing.assert_array_equal(found.tokens_Q2L[0, 0, :5], [7] * 5)


@pytest.mark.parametrize(('bucket', 'length'), [(1, 5), (4, 8), (6, 6)])
def test_the_length_is_the_shortest_that_fits(bucket, length):
  whole = pairs_lib.pairs(**arrays())
  found = pairs_lib.resized(whole, bucket=bucket)
  for x, before in zip(found[:2], whole):
    assert x.shape == (2, 2, length)
    np.testing.assert_array_equal(x[:, :, :5], before[:, :, :5])
    assert not x[:, :, 5:].any()
  positions = found.loss_positions_Q2M[..., :3]
  np.testing.assert_array_equal(
    positions, np.broadcast_to([2, 3, 4], (2, 2, 3))
  )
  assert np.all(found.loss_positions_Q2M[..., 3:] == length)  # none
  assert np.all(found.lengths_Q2 == 5)


def test_an_epoch_sees_every_pair_once_and_is_filled_up():
  rewards = np.arange(14) % 2
  whole = pairs_lib.pairs(**arrays(rewards, np.arange(14) // 2))
  assert pairs_lib.updates_per_epoch(7, 3) == 3
  orders = []
  for epoch in range(2):
    seen = []
    for place in range(3):
      minibatch = pairs_lib.minibatch(whole, 3 * epoch + place, size=3, seed=0)
      assert minibatch.tokens_Q2L.shape == (3, 2, 6)
      there = minibatch.loss_mask_Q2L.any(axis=(1, 2))
      assert there.sum() == (3, 3, 1)[place]
      assert not minibatch.tokens_Q2L[~there].any()
      assert not minibatch.loss_positions_Q2M[~there].any()  # the first: none
      assert (minibatch.lengths_Q2 == 5 * there[:, None]).all()
      seen += minibatch.tokens_Q2L[there][:, 0, 0].tolist()
    assert sorted(seen) == list(range(1, 14, 2))
    orders.append(seen)
  assert orders[0] != orders[1]
  again = pairs_lib.minibatch(whole, 4, size=3, seed=0)
  assert again.tokens_Q2L[:, 0, 0].tolist() == orders[1][3:6]


def test_a_file_is_read_and_known_again(tmp_path):
  path = tmp_path / 'batch.npz'
  np.savez_compressed(path, **arrays(), values_BL=np.zeros(3))
  found, digest = pairs_lib.read(path)
  assert _rows(found) == [[7, 6], [1, 2]]
  assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def _changed(**changes):
  return {**arrays(), **changes}


@pytest.mark.parametrize(
  ('given', 'expected'),
  [
    ({'tokens_BL': np.zeros((8, 6), int)}, 'lacks loss_mask_BL, rewards_BL, g'),
    (_changed(tokens_BL=np.zeros(8, int)), r'tokens_BL has shape \(8,\)'),
    (_changed(rewards_BL=np.zeros((8, 5))), r'rewards_BL .* expected \(8, 6\)'),
    (_changed(loss_mask_BL=np.zeros((7, 6), bool)), r'loss_mask_BL .*\(7, 6\)'),
    (_changed(group_ids_B=np.zeros(7, int)), r'group_ids_B .* expected \(8,\)'),
    (_changed(tokens_BL=np.zeros((8, 6))), 'tokens_BL is float64, expected in'),
    (_changed(group_ids_B=np.array(['a'] * 8)), 'group_ids_B is <U1'),
    (_changed(rewards_BL=np.full((8, 6), np.nan)), 'row 0 sums to nan'),
    (_changed(rewards_BL=np.zeros((8, 6))), 'no pair: '),
    (_changed(group_ids_B=np.arange(8)), 'no pair: '),
    (_changed(loss_mask_BL=np.zeros((8, 6), bool)), 'no pair: '),
    (_changed(tokens_BL=np.full((8, 6), None)), 'not a sound npz file'),
    ({name: x[:0] for name, x in arrays().items()}, 'no pair: '),
  ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, given, expected):
  path = tmp_path / 'batch.npz'
  np.savez(path, **given)
  with pytest.raises(ValueError, match=expected) as error:
    pairs_lib.read(path)
  assert str(error.value).startswith(f'{path}: ')
  assert '\n' not in str(error.value)
