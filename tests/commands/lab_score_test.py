"""`lab score` as users call it: numbers, options and errors."""

import json
import math

import numpy as np
import pytest

from tests import processes
from tests.commands import lab_calls
from tests.rl import batches
from tests.rl import loss_twin
from tests.tools.lab import batch_arrays


def test_score_gives_the_numbers_of_the_plain_loops(file, tmp_path, printed):
  _, batch, logprobs, entropy = batch_arrays.arrays()
  out = tmp_path / 'O.npz'
  metrics = printed(
    'score', '--batch', file, '--algorithm=s_ppo', '--float64',
    '--set', f'{lab_calls.TAU}=1.1', '--set=ratio.level=turn',
    '--set', 'bounds.clip_low=0.1', f'--out={out}',
  )  # fmt: skip
  row = batches.algorithm_options(
    's_ppo',
    correction__clipping_bias__tau=1.1,
    ratio__level='turn',
    bounds__clip_low=0.1,
  )
  twin = loss_twin.policy_loss(row, logprobs, entropy, batch, 0.0)
  assert metrics['loss'] == pytest.approx(twin.loss, rel=1e-12)
  found = lab_calls.arrays(out)
  assert found['dloss_dlogprobs_BL'].dtype == np.float64
  np.testing.assert_array_equal(found['clipped_BL'], twin.cut)
  np.testing.assert_allclose(found['weights_BL'], twin.scales, rtol=1e-12)
  assert metrics['actor/entropy'] == pytest.approx(
    entropy[batch.loss_mask_BL].mean()
  )
  assert {'stab/rho', 'actor/pg_clipfrac', 'mismatch/k3'} <= metrics.keys()


def test_an_entropy_bonus_is_in_the_loss(file, printed):
  flags = 'score', f'--batch={file}', '--algorithm=st_ppo'
  without = printed(*flags)
  bonus = printed(*flags, '--entropy_coefficient', '0.25')
  lower = without['loss'] - 0.25 * without['actor/entropy']
  assert bonus['loss'] == pytest.approx(lower)


@pytest.mark.slow
def test_a_choice_brings_its_options(file, printed):
  metrics = printed(
    'score', f'--batch={file}', '--algorithm=token_ppo',
    '--set=bounds.positive_share=0.99', '--set=bounds.name=balanced',
    '--set=correction.names=("tis", "icepop")', '--set=kl.where=nowhere',
  )  # fmt: skip
  assert metrics['bounds/high'] == pytest.approx(3.0)


@pytest.mark.slow
def test_an_algorithm_has_the_options_of_a_run(file, config, printed):
  flags = 'score', f'--batch={file}', '--float64'
  changes = '--set=bounds.clip_low=0.05', f'--set={lab_calls.TAU}=1.1'
  table = printed(*flags, '--algorithm=st_ppo', *changes)
  assert table != printed(*flags, '--algorithm=st_ppo')
  flag = f'--config={config}'
  assert printed(*flags, '--algorithm=st_ppo', flag) == table
  assert printed(*flags, f'{flag}:st_ppo') == table
  # A flag goes before the algorithm of the file, a setting before both.
  assert printed(*flags, '--algorithm=st_ppo', f'{flag}:gspo') == table
  other = printed(*flags, f'{flag}:st_ppo', f'--set={lab_calls.TAU}=inf')
  assert other['stab/scale'] == 1 > table['stab/scale']

  chosen = f'--algorithms=st_ppo,st_ppo:{lab_calls.TAU}=inf'
  found = printed(
    'compare', f'--batch={file}', '--float64', '--json', chosen, flag
  )['rows']
  for metrics, expected in zip(found.values(), (table, other), strict=True):
    del metrics['silenced']
    assert metrics == expected


def test_an_invalid_config_is_one_line_and_2(file, config, refused):
  flags = 'score', f'--batch={file}', f'--config={config}:st_ppo'
  for old, new, expected in (
    ('tau = 1.1', "tau = 'high'", ' fails with TypeError: '),
    ('tau = 1.1', 'tau = -1.0', '--algorithm=st_ppo: algorithm.correction.'),
    ('return config', 'return config.optimizer', 'fails with AttributeError'),
    ('return config', 'return config.sft', 'has no algorithm.advantage.name'),
  ):
    config.write_text(lab_calls.CONFIG.replace(old, new), encoding='utf-8')
    assert expected in refused('lab', *flags)


def test_an_invalid_array_that_is_not_required_is_left_out(
  tmp_path, capsys, printed, refused
):
  arrays, *_ = batch_arrays.arrays()
  flags = 'score', f'--batch={tmp_path}/F.npz', '--algorithm=turn_ppo'
  np.savez(tmp_path / 'F.npz', **arrays)
  whole = printed(*flags)
  arrays['sampler_logprobs_BL'][:] = np.nan
  arrays['sentence_ids_BL'][:] = 0
  arrays['state_ids_BL'] = np.array(['a'])
  np.savez(tmp_path / 'F.npz', **arrays)
  found, err = lab_calls.metrics_and_warnings(capsys, *flags)
  first, second = err.splitlines()
  assert first.startswith(f'--batch={tmp_path}/F.npz: sentence_ids_BL: must be')
  assert 'sampler_logprobs_BL: not finite in float32' in second
  assert all(x.endswith('; array left out') for x in (first, second))
  gone = set(whole) - set(found)
  assert gone and all(
    x.partition('/')[0] == 'mismatch' or 'sentence' in x for x in gone
  )
  assert found == pytest.approx({n: whole[n] for n in found}, rel=1e-6)
  sspo = '--algorithm=sspo'
  assert 'sentence_ids_BL: must be in 1..' in refused('lab', *flags, sspo)


@pytest.mark.slow
def test_score_runs_on_cpu_in_any_environment(tmp_path):
  environment = {'JAX_PLATFORMS': 'tpu', 'PATH': ''}
  arrays, *_ = batch_arrays.arrays()
  np.savez(tmp_path / 'F.npz', **arrays)
  words = 'lab', 'score', f'--batch={tmp_path}/F.npz', '--algorithm=token_ppo'
  done = processes.python('-m', 'stppo_jax', *words, env=environment)
  assert (done.returncode, done.stderr) == (0, '')
  assert math.isfinite(json.loads(done.stdout)['loss'])
