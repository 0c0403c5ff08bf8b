"""`lab advantages` as users call it: numbers, options and errors."""

import numpy as np
import pytest

from stppo_jax.tools.lab import saved_batch
from tests.commands import lab_calls
from tests.tools.lab import batch_arrays


def test_advantages_are_those_computed_by_hand(tmp_path, printed):
  arrays = {
    'turn_ids_BL': np.array([[0, 1, 0, 3, 3, 0]]),  # turn 2 is empty
    'loss_mask_BL': np.array([[0, 1, 0, 1, 1, 0]]),
    'rewards_BL': np.array([[9.0, 0, 9, 0, 1, 9]]),
    'values_BL': np.array([[9.0, 0.5, np.nan, 0.25, 0, 9]]),
  }
  np.savez(tmp_path / 'F.npz', **arrays)
  metrics = printed(
    'advantages', f'--batch={tmp_path}/F.npz', '--estimator', 'gae',
    '--set', 'gamma=1', '--set', 'lambda_=0.5', '--set', 'whiten=none',
    '--out', tmp_path / 'A.npz', '--float64',
  )  # fmt: skip
  # delta = 0.25 - 0.5, 0 - 0.25, 1 - 0
  third, second = 1.0, -0.25 + 0.5 * 1.0
  first = -0.25 + 0.5 * second
  found = lab_calls.arrays(tmp_path / 'A.npz')
  assert found.keys() == {'advantages_BL', 'returns_BL', 'value_mask_BL'}
  assert found['advantages_BL'].tolist() == [[0, first, 0, second, third, 0]]
  returns = [0, first + 0.5, 0, second + 0.25, third, 0]
  assert found['returns_BL'].tolist() == [returns]
  assert metrics['advantages/max'] == 1 and metrics['returns/min'] == 0.375
  spread = np.std([first, second, third], ddof=1)
  assert metrics['advantages/std'] == pytest.approx(spread)


def test_an_estimator_has_the_options_of_a_run(file, config, printed):
  flags = 'advantages', f'--batch={file}'
  expected = printed(*flags, '--estimator=gae', '--set=lambda_=0.5')
  assert expected != printed(*flags, '--estimator=gae')
  for its in (f'{config}', f'{config}:st_ppo'):
    for more in ((), ('--estimator=gae',)):
      found = printed(*flags, f'--config={its}', *more)
      assert found == expected
  turn = printed(*flags, f'--config={config}:turn_ppo')
  assert turn == printed(*flags, '--estimator=gae')


def test_algorithms_are_scored_on_advantages_of_another_file(
  file, tmp_path, printed
):
  out = tmp_path / 'A.npz'
  printed('advantages', f'--batch={file}', '--estimator=gae', f'--out={out}')
  given = saved_batch.load(out)['advantages_BL']
  arrays, *_ = batch_arrays.arrays()
  np.savez(tmp_path / 'F.npz', **(arrays | {'advantages_BL': given}))
  del arrays['advantages_BL']
  np.savez(tmp_path / 'G.npz', **arrays)
  expected = printed(
    'score', f'--batch={tmp_path}/F.npz', '--algorithm=turn_ppo'
  )
  flags = f'--batch={tmp_path}/G.npz', f'--advantages={out}'
  found = printed('score', *flags, '--algorithm=turn_ppo')
  assert found == expected
  # They come before those of the batch.
  flags = f'--batch={file}', f'--advantages={out}'
  found = printed('compare', *flags, '--algorithms=turn_ppo', '--json')
  assert found['rows']['turn_ppo']['loss'] == expected['loss']


def test_the_kl_penalty_is_subtracted_from_the_rewards(
  tmp_path, printed, refused
):
  mask = np.ones((1, 3), int)
  arrays = {
    'turn_ids_BL': mask,
    'loss_mask_BL': mask,
    'rewards_BL': np.array([[0.0, 0.0, 1.0]]),
    'old_logprobs_BL': np.array([[-1.0, -2.0, -3.0]]),
    'ref_logprobs_BL': np.array([[-1.5, -2.0, -2.0]]),
    'kl_coefficient': np.asarray(0.1),
  }
  np.savez(tmp_path / 'F.npz', **arrays)
  flags = (
    'advantages', f'--batch={tmp_path}/F.npz', '--estimator=monte_carlo',
    '--set=whiten=none', f'--out={tmp_path}/A.npz', '--float64',
  )  # fmt: skip
  for more, expected in (
    ((), [1, 1, 1]),
    (('--kl=k1',), [1.05, 1.1, 1.1]),
    (('--kl=k1', '--kl_coefficient=1'), [1.5, 2, 2]),
    (('--kl=k2', '--kl_coefficient=1'), [1 - 0.625, 0.5, 0.5]),
    (('--kl=k2', '--kl_coefficient=0'), [1, 1, 1]),
  ):
    printed(*flags, *more)
    found = lab_calls.arrays(tmp_path / 'A.npz')['advantages_BL']
    np.testing.assert_allclose(found, [expected], rtol=1e-12)
  del arrays['kl_coefficient']
  np.savez(tmp_path / 'F.npz', **arrays)
  line = refused('lab', *flags, '--kl=k1')
  assert 'lacks kl_coefficient, which --kl without --kl_coefficient r' in line
  printed(*flags, '--kl=k1', '--kl_coefficient=1')
  del arrays['ref_logprobs_BL']
  np.savez(tmp_path / 'F.npz', **arrays)
  line = refused('lab', *flags, '--kl=k1', '--kl_coefficient=1')
  assert 'lacks ref_logprobs_BL, which --kl reads' in line


@pytest.mark.parametrize(
  ('name', 'lacks'),
  [
    ('gae', 'old_values_BL'),
    ('group_centered', 'group_ids_B'),
    ('gigpo', 'state_ids_BL'),
    ('monte_carlo', 'rewards_BL'),
  ],
)
def test_an_estimator_names_the_array_it_lacks(tmp_path, name, lacks, refused):
  arrays, *_ = batch_arrays.arrays()
  np.savez(
    tmp_path / 'F.npz', **{n: x for n, x in arrays.items() if n != lacks}
  )
  line = refused(
    'lab', 'advantages', f'--batch={tmp_path}/F.npz', f'--estimator={name}'
  )
  assert f'lacks {lacks}, which {name} reads' in line
