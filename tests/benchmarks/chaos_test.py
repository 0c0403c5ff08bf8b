"""The chaos test strikes as its seed says, and finds every difference."""

import itertools
import json
import random
import shutil
import subprocess

import pytest

from benchmarks import chaos
from benchmarks import disturbed_run
from benchmarks import faults
from benchmarks import run_differences


@pytest.fixture
def folders(tmp_path):
  """Returns the folders of two equal runs, made by hand."""
  run = tmp_path / 'run'
  manifest = run / 'checkpoints' / '2' / 'manifest'
  manifest.mkdir(parents=True)
  (run / 'checkpoints' / '2.corrupt').mkdir()
  leaves = {'policy.params.norm': {'fingerprint': 7}}
  (manifest / 'metadata').write_text(json.dumps({'leaves': leaves}))
  (run / 'policy').mkdir()
  (run / 'policy' / 'model.safetensors').write_bytes(b'weights')
  lines = [{'step': n, 'loss': n / 2, 'timing_s/step': 0.1 * n} for n in (1, 2)]
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (run / 'metrics.jsonl').write_text(text)
  (run / 'trajectories-000001.jsonl').write_text('{}\n')
  return run, shutil.copytree(run, tmp_path / 'other')


def _found(folders, *, may_lack=False):
  return list(run_differences.differences(*folders, may_lack=may_lack))


def test_equal_runs_do_not_differ(folders):
  assert _found(folders) == []
  line = {'step': 2, 'loss': 1.0, 'timing_s/step': 9.0, 'goodput/restarts': 3.0}
  with open(folders[0] / 'metrics.jsonl', 'a') as file:  # a step made again
    file.write(json.dumps(line | {'writer/sink_errors': 5}) + '\n')
  assert _found(folders) == []


@pytest.mark.parametrize(
  ('file', 'text', 'expected'),
  [
    ('policy/model.safetensors', 'other', 'policy/model.safetensors'),
    (
      'checkpoints/2/manifest/metadata',
      '{"leaves": {"policy.params.norm": {"fingerprint": 8}}}',
      'the last checkpoint',
    ),
    ('trajectories-000001.jsonl', '{"a": 1}\n', 'trajectories-000001.jsonl'),
    (
      'metrics.jsonl',
      '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 1.5}\n',
      'metrics of step 2: loss',
    ),
  ],
)
def test_each_difference_is_found(folders, file, text, expected):
  (folders[0] / file).write_text(text)
  assert _found(folders) == _found(folders, may_lack=True) == [expected]


def test_only_a_full_disk_excuses_what_is_missing(folders):
  (folders[0] / 'metrics.jsonl').write_text('{"step": 2, "loss": 1.0}\n')
  (folders[0] / 'trajectories-000001.jsonl').write_text('')
  assert _found(folders, may_lack=True) == []
  assert _found(folders) == [
    'metrics of step 1: missing',
    'trajectories-000001.jsonl: missing',
  ]


def test_each_fault_comes_as_often_as_the_others_as_the_seed_says():
  draw = lambda seed: list(itertools.islice(chaos.schedule(seed, 4.0), 50))
  strikes = draw(3)
  assert strikes == draw(3) != draw(4)
  kinds = sorted(faults.FAULTS)
  for first in range(0, 50, len(kinds)):
    deck = strikes[first : first + len(kinds)]
    assert sorted(strike.name for strike in deck) == kinds
  assert {strike.early is None for strike in strikes} == {True, False}


@pytest.mark.parametrize(
  'name',
  ['kill -9', 'SIGTERM', pytest.param('paused run', marks=pytest.mark.slow)],
)
def test_a_fault_has_struck_only_a_process_that_goes_on(tmp_path, name):
  run = disturbed_run.DisturbedRun(tmp_path, hosts=1)
  with subprocess.Popen(['true']) as process:
    process.wait()
  run.processes = [process]
  assert not faults.FAULTS[name](run, random.Random(0))
  with subprocess.Popen(['sleep', '60']) as process:
    run.processes = [process]
    assert faults.FAULTS[name](run, random.Random(0))
    process.kill()


def test_an_exit_code_without_a_fault_is_a_failure(tmp_path):
  run = disturbed_run.DisturbedRun(tmp_path, hosts=1)
  with subprocess.Popen(['sleep', '60']) as process:
    run.processes = [process]
    process.kill()  # as the kernel does when memory is short
    with pytest.raises(disturbed_run.Failed, match='exit code -9'):
      run.wait()


def test_a_run_that_always_ends_without_a_step_is_a_failure(
  tmp_path, monkeypatch
):
  program = tmp_path / 'python'
  program.write_text('#!/bin/sh\nexit 75\n')
  program.chmod(0o700)
  monkeypatch.setattr('sys.executable', str(program))
  run = disturbed_run.DisturbedRun(tmp_path, hosts=1)
  with pytest.raises(disturbed_run.Failed, match='no step in 20 starts'):
    for _ in range(30):
      run.start(5)
      assert run.wait() == 75


@pytest.mark.slow
def test_a_run_survives_faults(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')  # as on a machine without it
  flags = ['--faults=10', '--pace=3', '--steps=10', '--seed=1']
  assert chaos.main([*flags, f'--folder={tmp_path}']) == 0
  output = capsys.readouterr().out
  assert output.endswith('equal, bit for bit\n') and '10 faults in' in output
  for name in faults.FAULTS:
    assert f'\n{name}: 1, missed' in output
