"""Runs on pairs learn, resume bit for bit, and export a policy."""

import math
import signal

import numpy as np
import pytest

from stppo_jax import exits
from stppo_jax.training import preference
from stppo_jax.workdir import run_record
from tests.training import faults
from tests.training import runs

_GROUPS, _LENGTH = 11, 32
_SMALL = {
  'preference__batch_size': 8,
  'preference__num_epochs': 3,
  'policy_optimizer__learning_rate': 5e-3,
  'policy_optimizer__warmup_updates': 0,
  'checkpoint__every': 99,
  'writer__tensorboard': False,
}


def _write(path, seed=0):
  """Writes eleven groups of three rows of two turns."""
  rng = np.random.default_rng(seed)
  shape = (3 * _GROUPS, _LENGTH)
  mask = np.zeros(shape, bool)
  mask[:, 8:14] = mask[:, 20:26] = True
  rewards = np.zeros(shape, np.float32)
  rewards[:, 25] = np.tile([0.0, 1.0, 0.5], _GROUPS)
  np.savez(
    path,
    tokens_BL=rng.integers(0, 290, shape).astype(np.int32),
    loss_mask_BL=mask,
    rewards_BL=rewards,
    group_ids_B=np.arange(len(mask), dtype=np.int32) // 3,
  )
  return path


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  return _write(tmp_path_factory.mktemp('batch') / 'batch.npz')


@pytest.fixture(scope='module')
def whole(file, tmp_path_factory):
  """Returns the folder of an uninterrupted run."""
  folder = tmp_path_factory.mktemp('whole')
  assert preference.prefer(runs.config(**_SMALL), file, folder) == 0
  return folder


def _interrupted_at(update):
  """Returns a context in which a run ends when that update is written."""
  stop = faults.send_at(('printed', 1), signal.SIGTERM)
  return faults.printed(f'step {update}/', stop)


def test_the_preferred_becomes_likelier_than_the_other(whole):
  lines = runs.metrics(whole)
  # Two updates an epoch; the second holds what the first left.
  assert [line['step'] for line in lines] == list(range(1, 7))
  assert [line['preference/pairs'] for line in lines] == [8, 3] * 3
  first, last = lines[0], lines[-1]
  assert first['preference/loss'] == pytest.approx(math.log(2), abs=1e-5)
  assert first['preference/margin'] == pytest.approx(0, abs=1e-5)
  assert first['preference/preferred/kl'] == pytest.approx(0, abs=1e-5)
  margins = [line['preference/margin'] for line in lines]
  assert margins[-1] > 0.5 and margins[-1] > margins[3] > margins[0]
  assert last['preference/accuracy'] == 1
  assert last['preference/loss'] < 0.5
  assert last['preference/dispreferred/kl'] > 0
  assert not any(line['update/skipped'] for line in lines)


def test_an_interrupted_run_resumes_as_the_same_run(
  file, whole, tmp_path, capsys
):
  with _interrupted_at(3):
    code = preference.prefer(runs.config(**_SMALL), file, tmp_path)
  assert code == 75
  assert 'interrupted after update 3, saved' in capsys.readouterr().out
  assert len(runs.metrics(tmp_path)) == 3
  # Written but not saved, as if the process was killed in between.
  with open(tmp_path / 'metrics.jsonl', 'a', encoding='utf-8') as lines:
    lines.write('{"step": 4}\n')
  assert preference.prefer(runs.config(**_SMALL), file, tmp_path) == 0
  assert runs.repeated(tmp_path) == runs.repeated(whole)
  assert runs.weights(tmp_path) == runs.weights(whole)


@pytest.mark.slow
def test_adapters_alone_learn_beside_the_reference(file, tmp_path):
  lora = {'model__lora__rank': 4, 'model__lora__targets': '(q|down)_proj'}
  config = runs.config(
    **(_SMALL | lora | {'policy_optimizer__learning_rate': 0.02})
  )
  with _interrupted_at(3):
    assert preference.prefer(config, file, tmp_path) == 75
  assert preference.prefer(config, file, tmp_path) == 0
  first, *_, last = runs.metrics(tmp_path)
  # The base is the reference.
  for name in ('preferred/kl', 'dispreferred/kl', 'margin'):
    assert first[f'preference/{name}'] == pytest.approx(0, abs=1e-6)
  assert last['preference/margin'] > 0.01
  leaves = runs.leaves(tmp_path, 6)
  adapters = [name for name in leaves if name.startswith('params.')]
  assert adapters == [
    f'params.layers.{layer}.{leaf}'
    for layer in ('down_proj', 'q_proj')
    for leaf in ('lora_a', 'lora_b')
  ]


def test_another_file_or_config_is_another_run(file, whole, tmp_path):
  before = runs.repeated(whole)
  other = _write(tmp_path / 'other.npz', seed=1)
  with pytest.raises(run_record.OtherRun, match='^batch_sha256='):
    preference.prefer(runs.config(**_SMALL), other, whole)
  changed = runs.config(**_SMALL, preference__beta=0.2)
  with pytest.raises(run_record.OtherRun, match=r'^preference\.beta=0\.2'):
    preference.prefer(changed, file, whole)
  assert runs.repeated(whole) == before


@pytest.mark.parametrize(
  ('sizes', 'expected'),
  [
    ({'batch_size': 12}, 'batch_size=12: must be a multiple of the 8 devices'),
    (
      {'microbatch_size': 4},
      'microbatch_size=4: must be a multiple of the 8 d',
    ),
  ],
)
def test_batch_sizes_must_fit_the_devices(file, tmp_path, sizes, expected):
  changes = {'preference__batch_size': 16} | {
    f'preference__{key}': size for key, size in sizes.items()
  }
  with pytest.raises(exits.Misconfigured, match=rf'^preference\.{expected}'):
    preference.prefer(runs.config(**{**_SMALL, **changes}), file, tmp_path)
  assert not (tmp_path / 'config.json').exists()


def test_token_ids_must_fit_the_vocabulary(file, tmp_path):
  foreign = tmp_path / 'foreign.npz'
  with np.load(file) as arrays:
    np.savez(foreign, **{**arrays, 'tokens_BL': arrays['tokens_BL'] + 9000})
  with pytest.raises(
    exits.Misconfigured, match=r'tokens_BL has the id 9\d+, .* vocabulary'
  ):
    preference.prefer(runs.config(**_SMALL), foreign, tmp_path)
  assert not (tmp_path / 'config.json').exists()
