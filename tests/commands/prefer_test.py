"""`prefer` as users call it: a whole run, and every error in a line."""

import math

import numpy as np
import pytest

from stppo_jax import __main__
from tests.training import runs

# The shapes of tests/training/preference_test.py: the same programs.
_FLAGS = {
  'num_steps': None,
  'preference__batch_size': 8,
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
