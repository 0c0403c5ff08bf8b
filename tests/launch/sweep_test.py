"""A sweep runs each point of its grid once, and goes on where it was ended."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from launch import rendering
from launch import source
from launch import sweep
from stppo_jax.tools import run_state
from stppo_jax.workdir import lock
from tests.training import runs

# In place of Python: leaves the folder of a finished run, or waits for the file
# `go`, or for a signal.
_FAKE = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
flags = dict(w.split('=', 1) for w in sys.argv[5:])
workdir = pathlib.Path(flags['--workdir'])
workdir.mkdir(parents=True, exist_ok=True)
(workdir / 'lock').unlink(missing_ok=True)  # it takes it over
sections = dict.fromkeys(('algorithm', 'model', 'rollout'), {{}})
(workdir / 'config.json').write_text(json.dumps(sections | {{'num_steps': 1}}))
def beat(exit_code):
  beat = {{'time': time.time(), 'step': 1, 'exit_code': exit_code}}
  (workdir / 'heartbeat.json').write_text(json.dumps(beat))
def end(*_):
  beat(75)
  sys.exit(75)
signal.signal(signal.SIGHUP, end)
with open(workdir.parent / 'starts', 'a') as file:
  cores = sorted(os.sched_getaffinity(0))
  file.write(f'{{workdir.name}} {{cores}}\\n')
(workdir / 'cache').write_text(os.environ['JAX_COMPILATION_CACHE_DIR'])
go = workdir.parent / 'go'
while not go.exists():
  time.sleep(0.01)
beat(0)
"""
_GRID = """
from stppo_jax.configs import quickstart

get_config = quickstart.get_config

def sweep():
  return {'algorithm': ['token_ppo', 'st_ppo'], 'seed': [0, 1]}
"""
_NAMES = ['token_ppo-seed0', 'token_ppo-seed1', 'st_ppo-seed0', 'st_ppo-seed1']
_TPU = [
  *('--on=tpu', '--project=the-lab', '--zone=us-west4-a'),
  '--accelerator=v5litepod-8',
]


@pytest.fixture
def config(tmp_path, monkeypatch):
  # A small source: the package does not travel.
  monkeypatch.setattr(source, '_own', lambda: iter(()))
  path = tmp_path / 'grid.py'
  path.write_text(_GRID)
  return str(path)


@pytest.fixture
def python(tmp_path, monkeypatch):
  """Lets runs have the Python above."""
  path = tmp_path / 'python'
  path.write_text(_FAKE)
  path.chmod(0o755)
  monkeypatch.setenv('PYTHON', str(path))
  monkeypatch.setenv('DELAY', '0')
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)


@pytest.fixture
def start(tmp_path, config, python):
  """Yields a function that starts a sweep with the Python above."""

  def start(*flags):
    words = [sys.executable, '-m', 'launch.sweep', f'--config={config}']
    return subprocess.Popen(
      [*words, f'--out={tmp_path}/out', *flags],
      cwd=runs.REPO,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  yield start
  # What a failed test has left ends.
  (tmp_path / 'out').mkdir(exist_ok=True)
  (tmp_path / 'out' / 'go').touch()


def _starts(tmp_path):
  path = tmp_path / 'out' / 'starts'
  return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_a_sweep_that_was_stopped_goes_on(tmp_path, config, start, capsys):
  flags = [f'--config={config}', f'--out={tmp_path}/out']
  first = start('--jobs=2')
  runs.wait(lambda: len(_starts(tmp_path)) == 2)
  # A second one would start the same runs.
  assert sweep.main(flags) == 75
  assert 'locked by process' in capsys.readouterr().err
  assert sweep.main([*flags, '--stop']) == 0
  out, _ = first.communicate(timeout=60)
  assert first.returncode == 75
  assert out.count('ended with exit code 75') == 2
  assert out.count(': starts') == 2 and out.count('interrupted') == 2
  assert 'not started: st_ppo-seed0, st_ppo-seed1' in out
  if len(os.sched_getaffinity(0)) > 1:  # the runs do not share cores
    assert len({x.split(maxsplit=1)[1] for x in _starts(tmp_path)}) == 2
  (tmp_path / 'out' / 'go').touch()
  process = start('--jobs=2')
  assert process.communicate(timeout=60)[0].count('finished') == 4
  assert process.returncode == 0
  assert sweep.main(flags) == 0  # and again: nothing is left
  started = [line.split()[0] for line in _starts(tmp_path)]
  # Twice where it was interrupted, and never after the end.
  assert sorted(started) == sorted([*_NAMES[:2], *_NAMES])
  out = tmp_path / 'out'
  for name in _NAMES:
    assert (out / name / 'cache').read_text() == str(out / '.compiled')
  capsys.readouterr()
  assert sweep.main([*flags, '--status']) == 0
  assert capsys.readouterr().out.count('finished') == 4
  assert sweep.main([*flags, '--stop']) == 0
  assert 'no sweep runs here' in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_sweep_and_a_killed_run_are_no_obstacle(tmp_path, start):
  process = start()
  runs.wait(lambda: len(_starts(tmp_path)) == 1)
  process.kill()
  process.wait(timeout=60)
  process.stdout.close()
  (tmp_path / 'out' / 'go').touch()  # what was started ends by itself
  state = tmp_path / 'out' / _NAMES[0]
  runs.wait(lambda: (state / 'heartbeat.json').exists())
  process = start('--jobs=4')
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 0, out
  assert sorted(line.split()[0] for line in _starts(tmp_path)) == sorted(_NAMES)


def _write_run(folder, **beat):
  """Leaves the files of a run in a folder, with its last heartbeat if any."""
  folder.mkdir(parents=True, exist_ok=True)
  sections = dict.fromkeys(('algorithm', 'model', 'rollout'), {})
  (folder / 'config.json').write_text(json.dumps(sections))
  if beat:
    (folder / 'heartbeat.json').write_text(json.dumps(beat))


def test_a_run_that_another_process_runs_is_left_alone(
  tmp_path, config, python, capsys
):
  """Unlike one whose process was killed a moment ago on this machine."""
  run, killed = (tmp_path / 'out' / name for name in _NAMES[:2])
  holder = {'host': socket.gethostname(), 'pid': 4_000_000, 'started': '1'}
  _write_run(killed, time=time.time(), host=holder['host'], pid=holder['pid'])
  (killed / 'lock').write_text(json.dumps(holder | {'since': 'noon'}))
  flags = [f'--config={config}', f'--out={tmp_path}/out', '--jobs=4']
  with lock.held(run):  # as after a sweep was killed, but not its runs
    _write_run(run)
    assert run_state.read(killed).state == run_state.RUNNING
    (tmp_path / 'out' / 'go').touch()
    assert sweep.main(flags) == 75
    out = capsys.readouterr().out
    assert out.count('finished') == 3 and out.count('running') == 1
    assert sorted(x.split()[0] for x in _starts(tmp_path)) == sorted(_NAMES[1:])
    assert sweep.main(flags) == 75
    assert 'nothing is left to start' in capsys.readouterr().out


def test_the_array_of_slurm_has_what_is_left(tmp_path, config, capsys):
  _write_run(tmp_path / 'out' / _NAMES[0], exit_code=0)
  outside = f'/usr/..{tmp_path}/out'
  flags = [f'--config={config}', '--on=slurm', '--partition=gpu', '--dry_run']
  # No node but this one would see the folder, if it were in /tmp.
  assert sweep.main([*flags, f'--out={outside}', '--jobs=2']) == 0
  text = capsys.readouterr().out
  assert '#SBATCH --array=0-2%2' in text
  assert 'token_ppo-seed0' not in text.split('esac')[0].split('case')[1]
  (line,) = [x for x in text.splitlines() if x.startswith('  2) ')]
  assert '--config.seed=1' in line and line.endswith('/st_ppo-seed1 ;;')
  assert sweep.main([*flags[:-1], f'--out={tmp_path}/out']) == 2
  assert 'workers cannot share it' in capsys.readouterr().err


def test_runs_that_wait_in_slurm_are_not_submitted_twice(
  tmp_path, config, capsys, monkeypatch
):
  squeue = tmp_path / 'squeue'
  squeue.write_text('#!/bin/sh\necho "$*" | grep -o name=grid-.*PENDING\n')
  squeue.chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  flags = [f'--config={config}', '--on=slurm', '--partition=gpu']
  assert sweep.main([*flags, '--out=/shared/grid']) == 2
  assert 'runs of this sweep wait in the queue' in capsys.readouterr().err
  assert sweep.main([*flags, '--out=/shared/grid', '--dry_run']) == 0


def test_pod_jobs_are_one_for_each_run(config, capsys):
  flags = ['--on', 'jobset', '--image=i', '--topology=4x4', '--dry_run']
  flags += [f'--config={config}', '--out=/shared/grids']
  assert sweep.main([*flags, '--accelerator=tpu-v5-lite-podslice']) == 0
  out = capsys.readouterr().out
  for name in _NAMES:
    job = rendering.name_of(f'/shared/grids/{name}')
    assert f'name: "{job}"' in out
    assert f'--workdir=/shared/grids/{name}' in out


@pytest.mark.parametrize(
  'flags',
  [
    ['--on=slurm', '--partition=gpu', '--out=/shared/grid'],
    [*_TPU, '--out=gs://lab/grid'],
  ],
)
@pytest.mark.parametrize(
  'where', ['gs://lab', pytest.param('/shared', marks=pytest.mark.slow)]
)
def test_what_only_the_workers_have_is_not_asked_for(
  flags, where, config, capsys, google
):
  flags = [f'--config={config}', *flags, '--config.data.name=jsonl']
  flags += [f'--config.data.root={where}/data', '--config.data.train=a.jsonl']
  flags += ['--config.data.corpus=passages.jsonl']
  flags += [f'--config.model.path={where}/qwen', '--dry_run']
  assert sweep.main(flags) == 0, capsys.readouterr()
  out = capsys.readouterr().out
  assert all(f'/grid/{name}' in out for name in _NAMES)
  assert not google.requests


def test_a_sweep_on_slices_without_gcloud_is_refused(
  config, google, monkeypatch, refused
):
  monkeypatch.setenv('PATH', '')
  flags = [f'--config={config}', *_TPU, '--out=gs://mine/grid']
  assert refused(*flags, main=sweep.main).startswith('gcloud: not installed')
  assert not google.objects


@pytest.mark.parametrize(
  ('source', 'expected'),
  [
    ('get_config = None', 'has no function sweep'),
    ('def sweep():\n  return [1]', 'must return a dict of lists'),
    ('def sweep():\n  return 1 / 0', 'grid.py, line 2, fails with ZeroDiv'),
    ('def sweep():\n  return {"seed": []}', 'must return a dict of lists'),
    ('def sweep():\n  return {"seed": [1, 1]}', 'named grid-seed1'),
    (
      _GRID.replace("'seed': [0, 1]", "'num_steps': [0, 1]"),
      'token_ppo-num_steps0, st_ppo-num_steps0: config.num_steps=0: must be',
    ),
    (
      _GRID.replace("'seed': [0, 1]", "'sed': [0]"),
      "all runs: --config.sed=0: no key 'sed' in config",
    ),
  ],
)
def test_a_wrong_grid_is_refused(tmp_path, source, expected, refused):
  path = tmp_path / 'grid.py'
  path.write_text(source)
  flags = [f'--config={path}', f'--out={tmp_path}/out', '--dry_run']
  assert expected in refused(*flags, main=sweep.main)
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
  ('flags', 'problem'),
  [
    (['--out=gs://lab/grid'], '--out=gs://lab/grid: must be a folder of this'),
    (['--out=grid', *_TPU], '--out=grid: must be gs://BUCKET/FOLDER'),
  ],
)
def test_the_runs_are_where_their_machines_write(
  flags, problem, config, tmp_path, monkeypatch, refused
):
  monkeypatch.chdir(tmp_path)
  err = refused(f'--config={config}', *flags, main=sweep.main)
  assert err.startswith(problem)
  assert not (tmp_path / 'gs:').exists() and not (tmp_path / 'grid').exists()


@pytest.mark.parametrize('name', ['quickstart_2x2', 'nq_2x2'])
def test_the_sweep_of_the_paper_has_paired_seeds(name):
  grid = sweep.grid(f'{runs.REPO}/configs/sweeps/{name}.py')
  pairs = {tuple(flags) for flags in grid.values()}
  assert len(pairs) == len(grid)
  seeds = {
    algorithm: [run for run in grid if run.startswith(f'{algorithm}-')]
    for algorithm in ('token_ppo', 's_ppo', 'turn_ppo', 'st_ppo')
  }
  assert len({len(of_one) for of_one in seeds.values()}) == 1
  assert sum(map(len, seeds.values())) == len(grid)


def test_a_run_with_a_size_has_a_plain_name(tmp_path):
  path = tmp_path / 'grid.py'
  path.write_text(_GRID.replace("'token_ppo', 'st_ppo'", "'gspo,7b', '7b'"))
  found = sweep.grid(str(path))
  names = [
    f'{name}-seed{seed}' for name in ('gspo-7b', '7b') for seed in (0, 1)
  ]
  assert list(found) == names
  assert found['gspo-7b-seed0'][0] == f'--config={path}:gspo,7b'
