"""`lab values` reads sampled values of a saved batch."""

import numpy as np
import pytest

from stppo_jax.rollout import batch_file
from tests.commands import lab_calls
from tests.tools.lab import batch_arrays


@pytest.fixture
def sampled(tmp_path):
  """Returns a file with sampled values at all policy tokens, and its arrays."""
  arrays, *_ = batch_arrays.arrays(poison=0.0)
  mask, rng = arrays['loss_mask_BL'] > 0, np.random.default_rng(0)
  arrays['group_ids_B'] = np.arange(len(mask)) // 2
  arrays['state_ids_BL'] = arrays['turn_ids_BL']
  noise = rng.normal(size=(2, *mask.shape))
  values = arrays['old_values_BL'] + 0.8 * noise[0]
  arrays |= {
    'oracle_values_BL': np.where(mask, values, 0.0),
    'oracle_variances_BL': np.where(mask, 0.1 + noise[1] ** 2, 0.0),
    'oracle_counts_BL': np.where(mask, 8, 0),
  }
  batch_file.save(tmp_path / 'V.npz', arrays)
  return str(tmp_path / 'V.npz'), arrays


def test_the_figures_are_those_of_the_formulas(sampled, printed):
  file, arrays = sampled
  found = printed('values', f'--batch={file}', '--json', '--float64')
  mask = arrays['loss_mask_BL'] > 0
  m, s2, critic = (
    arrays[name][mask].astype(float)
    for name in ('oracle_values_BL', 'oracle_variances_BL', 'old_values_BL')
  )
  luck, noise = s2.mean(), s2.mean() / 8
  spread = m.var(ddof=1) - noise
  error = ((critic - m) ** 2).mean() - noise
  expected = {
    'mean': m.mean(),
    'spread': spread**0.5,
    'luck': luck**0.5,
    'ceiling': spread / (spread + luck),
  }
  of_all = found['turns']['all']
  assert of_all['prefixes'] == mask.sum()
  for name, value in expected.items():
    assert of_all[name] == pytest.approx(value, rel=1e-6), name
  explained = 1 - (error + luck) / (spread + luck)
  assert of_all['critic']['explained'] == pytest.approx(explained, rel=1e-6)
  turns = {str(turn) for turn in arrays['turn_ids_BL'][mask]}
  assert turns >= found['turns'].keys() - {'all'}
  advantages = found['advantages']
  assert {'gae', 'monte_carlo', 'gigpo'} <= advantages['estimators'].keys()
  for by_turn in [advantages['most'], *advantages['estimators'].values()]:
    assert len(by_turn) == len(advantages['turns'])


@pytest.mark.slow
def test_the_table_and_the_picture_have_every_turn(sampled, tmp_path, capsys):
  file, _ = sampled
  out = tmp_path / 'P.png'
  assert lab_calls.lab('values', f'--batch={file}', f'--plot={out}') == 0
  assert out.read_bytes().startswith(b'\x89PNG')
  printed = capsys.readouterr().out
  assert 'ceiling' in printed and 'monte_carlo' in printed


def test_estimators_that_lack_an_array_are_left_out(sampled, tmp_path, capsys):
  _, arrays = sampled
  arrays.pop('state_ids_BL')
  batch_file.save(tmp_path / 'W.npz', arrays)
  found, warning = lab_calls.metrics_and_warnings(
    capsys, 'values', f'--batch={tmp_path / "W.npz"}', '--json', '--float64'
  )
  assert 'gigpo' in warning
  assert 'gigpo' not in found['advantages']['estimators']
