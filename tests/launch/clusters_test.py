"""Sweeps on TPU slices, in a cloud of stand-ins."""

import time

import pytest

from tests.launch import box as box_lib
from tests.storage import emulator

_SWEEP = """
from stppo_jax.configs import quickstart

get_config = quickstart.get_config

def sweep():
  return {'algorithm': ['turn_ppo'], 'seed': [0, 1, 2]}
"""


@pytest.fixture
def cloud(tmp_path, monkeypatch):
  """Yields a cloud whose runs only end, and its storage."""
  with emulator.served() as storage:
    for name, value in storage.environment.items():
      monkeypatch.setenv(name, value)
    monkeypatch.setenv('CLOUD', '')
    box = box_lib.Box(tmp_path, trains=False)
    (tmp_path / 'here' / 'grid.py').write_text(_SWEEP)
    yield box, storage
    box.close()


def _sweep(box, *flags):
  words = ['launch.sweep', '--on=tpu', '--config=grid.py', '--restarts=0']
  return box.start([*words, f'--out=gs://{emulator.BUCKET}/grid', *flags])


@pytest.mark.slow
def test_each_run_of_a_sweep_has_a_slice_and_few_exist_at_once(cloud):
  box, storage = cloud
  box.rules(seconds='3')
  process, most = _sweep(box, '--jobs=2'), 0
  while process.poll() is None:
    most = max(most, len(box.slices()))
    time.sleep(0.05)
  out = process.stdout.read()
  assert process.returncode == 0, out + box.console()
  assert most == 2 and box.slices() == []
  assert len(box.calls('compute tpus queued-resources create')) == 3
  for seed in range(3):
    assert storage.data(f'grid/turn_ppo-seed{seed}/launched')


@pytest.mark.slow
def test_the_runs_of_a_sweep_spend_one_budget(cloud):
  box, storage = cloud
  box.rules(seconds='1')
  process = _sweep(box, '--jobs=2', '--max_slices=2')
  out, _ = process.communicate(timeout=600)
  assert process.returncode == 75, out
  assert len(box.calls('compute tpus queued-resources create')) == 2
  (logs,) = (box.folder / 'here').glob('*.logs')
  log = (logs / 'turn_ppo-seed2.log').read_text()
  assert '--max_slices=2 is spent' in log
  # A run that goes on is not ended because others have ended.
  for seed in range(2):
    assert storage.data(f'grid/turn_ppo-seed{seed}/launched')
  # With more, the command goes on with what is left.
  process = _sweep(box, '--jobs=1', '--max_slices=3')
  out, _ = process.communicate(timeout=600)
  assert process.returncode == 0, out
  assert len(box.calls('compute tpus queued-resources create')) == 3
