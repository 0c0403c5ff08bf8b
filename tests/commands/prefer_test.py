"""`prefer` as users call it: a whole run, and every error in a line."""

import math

import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.configs import base
from stppo_jax.rl import preferences
from stppo_jax.training import preference
from tests.training import runs

_SOURCE = runs.REPO / 'assets' / 'quickstart'

# The shapes of tests/training/preference_test.py: the same programs.
_FLAGS = {
  'num_steps': None,
  'preference__batch_size': 8,
  'rollout__length_bucket': 32,
  'checkpoint__every': 99,
  'writer__tensorboard': False,
}


def _arrays():
  """Returns nine pairs of one turn each."""
  rng = np.random.default_rng(0)
  shape = (18, 32)
  mask = np.zeros(shape, bool)
  mask[:, 6:18] = True
  rewards = np.zeros(shape, np.float32)
  rewards[::2, 17] = 1.0
  return {
    'tokens_BL': rng.integers(0, 290, shape).astype(np.int32),
    'loss_mask_BL': mask,
    'rewards_BL': rewards,
    'group_ids_B': np.arange(18, dtype=np.int32) // 2,
  }


def _prefer(workdir, file, **changes):
  flags = runs.flags(**{**_FLAGS, **changes})
  batch = [f'--batch={file}'] if file else []
  return __main__.main(['prefer', *flags, *batch, f'--workdir={workdir}'])


@pytest.mark.slow
def test_a_run_trains_and_prints_where_its_policy_is(tmp_path, capsys):
  np.savez(tmp_path / 'batch.npz', **_arrays())
  code = _prefer(
    tmp_path / 'run', tmp_path / 'batch.npz', preference__name='tdpo2'
  )
  out, err = capsys.readouterr()
  assert (code, err) == (0, '')
  assert '9 pairs' in out and 'done. metrics: ' in out
  shown = [line.split()[:4] for line in out.splitlines() if '/2 ' in line]
  assert shown == [['step', f'{n}/2', 'preference', 'loss'] for n in (1, 2)]
  lines = runs.metrics(tmp_path / 'run')
  assert [line['preference/pairs'] for line in lines] == [8, 1]
  assert lines[0]['preference/loss'] == pytest.approx(math.log(2), abs=1e-5)
  assert all(math.isfinite(x) for line in lines for x in line.values())
  assert (tmp_path / 'run' / 'policy' / 'model.safetensors').is_file()


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({'rewards_BL': None}, 'lacks rewards_BL'),
    ({'rewards_BL': np.zeros((18, 9))}, 'rewards_BL has shape (18, 9), expec'),
    ({'rewards_BL': np.zeros((18, 32))}, 'no pair: no group_ids_B has two row'),
    ({'tokens_BL': np.full((18, 32), -1)}, 'tokens_BL has the id -1, which is'),
  ],
)
def test_a_wrong_file_is_one_line_and_2(tmp_path, capsys, changes, expected):
  arrays = {n: x for n, x in {**_arrays(), **changes}.items() if x is not None}
  np.savez(tmp_path / 'batch.npz', **arrays)
  assert _prefer(tmp_path / 'run', tmp_path / 'batch.npz') == 2
  out, err = capsys.readouterr()
  assert out == '' and err.count('\n') == 1
  assert err.startswith(f'{tmp_path}/batch.npz: {expected}')
  assert not (tmp_path / 'run').exists()


def test_a_file_that_cannot_be_read_is_one_line_and_2(tmp_path, capsys):
  (tmp_path / 'text').write_text('no archive', encoding='utf-8')
  for file, expected in (
    ('', '--batch: missing'),
    (tmp_path / 'absent', f'{tmp_path}/absent: No such file or directory\n'),
    (tmp_path, f'{tmp_path}: Is a directory\n'),
    (tmp_path / 'text', f'{tmp_path}/text: not an npz file'),
  ):
    assert _prefer(tmp_path / 'run', file) == 2
    out, err = capsys.readouterr()
    assert out == '' and err.count('\n') == 1
    assert expected in err


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({'preference__name': 'dpo'}, 'must be one of tdpo1, tdpo2'),
    ({'preference__betta': 1.0}, 'did you mean beta?'),
    (
      {'num_steps': 2},
      '--config.num_steps=2: prefer does not use it; set preference.num_epochs',
    ),
    ({'preference__beta': 0.0}, 'preference.beta=0.0: must be greater than 0'),
    ({'preference__alpha': -1.0}, 'must be 0 or greater'),
    (
      {'init_from': 'a/run'},
      'init_from=a/run: must be empty for prefer, which starts from model.path',
    ),
  ],
)
def test_a_wrong_config_is_one_line_and_2(tmp_path, capsys, changes, expected):
  assert _prefer(tmp_path / 'run', 'absent', **changes) == 2
  out, err = capsys.readouterr()
  assert out == '' and err.count('\n') == 1
  assert expected in err


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    (
      {'model__reference_memory': 'host'},
      'model.reference_memory=host: must be device for prefer, which does not',
    ),
    (
      {'updates__routing_replay': 'trainer', 'model__path': _SOURCE},
      'updates.routing_replay=trainer: must be nowhere for prefer',
    ),
    (
      {'loss__load_balance_coefficient': 0.5},
      'loss.load_balance_coefficient=0.5: must be 0.0 or 0.001 for prefer',
    ),
    (
      {'model__lora__rank': 2, 'model__lora__targets': 'absent'},
      "lora targets='absent': matches none of layers/",
    ),
    ({'mesh__tensor': 8}, 'mesh tensor=8 does not divide num_heads=2'),
  ],
)
def test_an_unsupported_option_is_refused_before_the_folder_is_made(
  tmp_path, capsys, changes, expected
):
  np.savez(tmp_path / 'batch.npz', **_arrays())
  code = _prefer(tmp_path / 'run', tmp_path / 'batch.npz', **changes)
  out, err = capsys.readouterr()
  assert (code, out) == (2, '') and err.count('\n') == 1
  assert err.startswith(expected)
  assert not (tmp_path / 'run').exists()


def test_the_default_config_has_no_unsupported_option():
  config = base.get_config()
  for key, allowed in preference._UNUSED.items():
    block, name = key.split('.')
    assert config[block][name] in allowed


def test_the_error_lists_every_loss(tmp_path, capsys):
  assert _prefer(tmp_path / 'run', 'absent', preference__name='?') == 2
  choices = ', '.join(preferences.PREFERENCES)
  assert f'must be one of {choices}\n' in capsys.readouterr().err
