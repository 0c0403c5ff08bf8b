"""A run that is cut in two is compared with the run in one piece."""

import json
import re

import jax.numpy as jnp
import pytest

from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.tools import resume_check
from tests.training import runs


def _save(folder, **changes):
  state = {'w': jnp.ones(3), 'v': jnp.zeros(2)}
  saver = checkpoint.Checkpointer(folder)
  host = {'kl_coefficient': 0.1, 'line': str(folder)} | changes
  saver.save(4, state | host.pop('state', {}), host)
  saver.close()


def test_every_array_and_number_that_differs_is_named(tmp_path):
  for name in ('one', 'other'):
    _save(tmp_path / name)
  one, other = tmp_path / 'one', tmp_path / 'other'
  assert resume_check.differences(one, other, 4) == ([], 2)
  _save(tmp_path / 'third', kl_coefficient=0.2, state={'v': jnp.ones(2)})
  lines, _ = resume_check.differences(one, tmp_path / 'third', 4)
  assert lines == [
    'step 4: v differs',
    'step 4: kl_coefficient is 0.1 if the run is in one piece, and 0.2 if it '
    'is cut',
  ]
  with pytest.raises(resume_check.NothingToCompare, match='checkpoints/5: '):
    resume_check.differences(one, other, 5)


@pytest.mark.slow
def test_a_run_of_ones_own_config_resumes_bit_for_bit(tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
  flags = runs.flags('st_ppo', num_steps=2, loss__entropy_coefficient=0.002)
  command = [*flags, f'--workdir={tmp_path / "run"}', '--verify_resume=1']
  process = runs.start('train', *command)
  out, errors = process.communicate()
  assert process.returncode == 0, errors
  assert out.splitlines()[-1].startswith('ok     1 + 1 steps against 2: ')
  whole = tmp_path / 'run' / 'whole' / 'checkpoints' / '2' / 'manifest'
  manifest = json.loads((whole / 'metadata').read_text())
  assert f' {len(manifest["leaves"])} arrays' in out.splitlines()[-1]


_FORGETFUL = """
calls = 0


def reward(question, texts, scores):
  global calls
  calls += 1  # a process that resumes begins again
  return calls % 7
"""


@pytest.mark.slow
def test_a_run_that_does_not_resume_bit_for_bit_is_named(tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  (tmp_path / 'forgetful.py').write_text(_FORGETFUL)
  flags = runs.flags(
    num_steps=2, evaluate__every=0, env__reward_function='forgetful:reward'
  )
  command = [*flags, f'--workdir={tmp_path / "run"}', '--verify_resume=1']
  process = runs.start('train', *command)
  out, errors = process.communicate()
  assert process.returncode == 3, errors
  assert '\nok     ' not in out
  differs = re.findall('^WRONG  step 2: (.*)$', out, re.MULTILINE)
  assert any(name.startswith('policy.params.') for name in differs)
  assert len(differs) == len(set(differs))
