"""Runs on TPU slices, in a cloud of stand-ins."""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest

from tests.launch import box as box_lib
from tests.training import bucket_hosts
from tests.training import runs

_NAME = 'stppo-one'


@pytest.fixture
def box(tmp_path, monkeypatch):
  """Yields a cloud whose runs only end."""
  monkeypatch.setenv('CLOUD', '')
  box = box_lib.Box(tmp_path, trains=False)
  (tmp_path / 'here' / 'mine.py').write_text(
    'from stppo_jax.configs import quickstart\n'
    'get_config = quickstart.get_config\n'
  )
  yield box
  box.close()


def _end(process):
  out, _ = process.communicate(timeout=300)
  return process.returncode, out


@pytest.mark.slow
@pytest.mark.parametrize(
  ('codes', 'expected'),
  [
    *[((0, 0), 0), ((2, 75), 2), ((75, 70), 70)],
    # It is not done because one of its hosts has ended well.
    ((0, 75), 75),
  ],
)
def test_the_exit_code_is_that_of_the_run(box, codes, expected):
  box.rules(**{f'exit-{n}': str(x) for n, x in enumerate(codes)})
  code, out = _end(box.submit('--restarts=0', '--secrets=tokens'))
  assert code == expected, out + box.console()
  secrets = [*box.folder.glob('vms/*/opt/secrets')]
  assert {x.read_text() for x in secrets} == {'WORD=tokens\n'}
  assert {x.stat().st_mode & 0o777 for x in secrets} == {0o600}
  assert box.slices() == []
  marker = box.bucket / 'runs' / 'one' / 'launched'
  assert marker.exists() == (expected == 0)
  if expected == 0:
    # Another start of the same command finds that marker.
    code, out = _end(box.submit('--restarts=0'))
    assert code == 0 and 'ended with exit code 0' in out
  assert len(box.calls('compute tpus queued-resources create')) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
  ('rules', 'expected', 'says', 'log'),
  [
    ({'create': 'PERMISSION_DENIED: tpu.nodes'}, 2, 'PERMISSION_D', False),
    ({'capacity': 'none'}, 75, 'no capacity', False),
    # Its workers have no right to write to the bucket.
    ({'mute': 'yes'}, 75, 'has written to the bucket', False),
    ({'curl': 99}, 75, 'gcloud storage cat gs://lab/runs/one.launch/0', True),
  ],
)
def test_a_slice_that_cannot_be_had_or_set_up_is_not_paid_for(
  box, rules, expected, says, log
):
  box.rules(**rules)
  code, out = _end(box.submit('--restarts=0'))
  assert code == expected and says in out, out
  assert box.slices() == []
  assert not (box.bucket / 'runs' / 'one' / 'launched').exists()
  setups = list(box.bucket.glob('runs/one.launch/0001/setup-*'))
  assert bool(setups) == log
  assert all('could not connect' in x.read_text() for x in setups)


@pytest.mark.slow
def test_the_budget_holds_over_all_starts(box):
  box.rules(seconds='600')
  flags = ['--max_slices=2', '--on_interrupt=keep']
  process = box.submit(*flags)
  runs.wait(lambda: 'running' in _state(box))
  process.send_signal(signal.SIGINT)
  code, out = _end(process)
  (first,) = box.slices()
  assert code == 130 and f'{first} is kept' in out
  box.preempt(first)
  process = box.submit(*flags)
  runs.wait(lambda: len(box.slices()) == 1 and box.slices() != [first])
  (second,) = box.slices()
  runs.wait(lambda: 'running' in _state(box, 2))
  box.preempt(second)
  code, out = _end(process)
  assert code == 75 and '--max_slices=2 is spent' in out
  assert box.slices() == []
  # Cores of v4-16: eight chips. The price is that of a chip for an hour.
  flags = ['--max_slices=9', '--price=1e6', '--max_cost=1']
  code, out = _end(box.submit(*flags))
  assert code == 75 and '--max_cost=1 is spent' in out
  assert len(box.calls('compute tpus queued-resources create')) == 2


@pytest.mark.slow
@pytest.mark.parametrize(('answer', 'left'), [('n', 0), ('', 1)])
def test_at_a_terminal_it_is_asked_whether_to_keep_the_slice(box, answer, left):
  box.rules(seconds='600')
  ours, theirs = pty.openpty()
  process = box.submit(stdin=theirs)
  runs.wait(lambda: 'running' in _state(box))
  os.write(ours, f'{answer}\n'.encode())
  process.send_signal(signal.SIGINT)
  code, out = _end(process)
  os.close(ours)
  os.close(theirs)
  assert code == 130 and 'Keep the slice' in out
  assert len(box.slices()) == left


@pytest.mark.slow
def test_workers_delete_a_slice_that_nobody_follows(box):
  """And the network fails now and then."""
  box.rules(seconds='5')
  process = box.submit()
  runs.wait(lambda: 'running' in _state(box))
  process.kill()
  box.rules(seconds='5', network=3)
  runs.wait(lambda: box.slices() == [])
  assert (box.bucket / 'runs' / 'one' / 'launched').exists()
  code, out = _end(box.submit())
  assert code == 0 and 'ended with exit code 0' in out


@pytest.mark.slow
def test_the_budget_holds_though_nobody_follows(box):
  box.rules(seconds='600')
  # Nine seconds of eight chips.
  process = box.submit('--price=1000', '--max_cost=20')
  runs.wait(lambda: 'running' in _state(box))
  process.kill()
  runs.wait(lambda: box.slices() == [])
  assert not (box.bucket / 'runs' / 'one' / 'launched').exists()


_SWEEP = """
from stppo_jax.configs import quickstart

get_config = quickstart.get_config

def sweep():
  return {'algorithm': ['turn_ppo'], 'seed': [0, 1, 2]}
"""


@pytest.mark.slow
def test_the_runs_of_a_sweep_spend_one_budget(google, box):
  (box.folder / 'here' / 'grid.py').write_text(_SWEEP)
  words = ['launch.sweep', '--on=tpu', '--config=grid.py', '--restarts=0']
  words.append('--out=gs://mine/grid')
  box.rules(seconds='1')
  code, out = _end(box.start([*words, '--jobs=2', '--max_slices=2']))
  assert code == 75, out
  assert len(box.calls('compute tpus queued-resources create')) == 2
  (logs,) = (box.folder / 'here').glob('*.logs')
  log = (logs / 'turn_ppo-seed2.log').read_text()
  assert '--max_slices=2 is spent' in log
  # A run that goes on is not ended because others have ended.
  for seed in range(2):
    assert google.data(f'grid/turn_ppo-seed{seed}/launched')
  # With more, the command goes on with what is left.
  code, out = _end(box.start([*words, '--jobs=1', '--max_slices=3']))
  assert code == 0 and box.slices() == [], out
  assert len(box.calls('compute tpus queued-resources create')) == 3


def _state(box, number=1):
  """Returns what the workers of a slice have said."""
  paths = box.bucket.glob(f'runs/one.launch/{number:04d}/state-*')
  return ''.join(x.read_text() for x in paths)


@pytest.fixture
def real_box(tmp_path, monkeypatch, google):
  """Yields a cloud with storage in which the config of a user is trained."""
  monkeypatch.setenv('CLOUD', '')
  box = box_lib.Box(tmp_path, trains=True)
  (tmp_path / 'here' / 'mine.py').write_text(
    'import sizes\n'
    'from stppo_jax.configs import quickstart\n'
    'def get_config(algorithm):\n'
    '  config = quickstart.get_config(algorithm)\n'
    '  config.num_steps = sizes.STEPS\n'
    "  config.env.prompt_template = 'prompt.txt'\n"
    '  return config\n'
  )
  (tmp_path / 'here' / 'sizes.py').write_text('STEPS = 20\n')
  prompt = runs.REPO / 'configs' / 'prompts' / 'quickstart.txt'
  shutil.copy(prompt, tmp_path / 'here' / 'prompt.txt')
  yield box
  box.close()


# Orbax reads the leaves side by side, see conftest.py.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.slow
def test_a_whole_life_is_bit_for_bit_an_undisturbed_run(
  real_box, tmp_path, google
):
  """Its setup fails twice, it is taken away in a step, and killed in a save."""
  box = real_box
  flags = ['--config=mine.py:st_ppo', *runs.flags(evaluate__every=10)[1:]]
  flags = [x for x in flags if not x.startswith('--config.num_steps')]
  box.rules(curl=1, pip=1)

  def beat():
    beats = [{'phase': '', 'step': 0, 'time': 0.0}]
    for path in box.folder.glob('vms/*-w-0/tmp/**/heartbeat.json'):
      with contextlib.suppress(OSError, ValueError):
        beats.append(json.loads(path.read_text()))
    return max(beats, key=lambda beat: beat['time'])

  def saves():
    return sum('checkpoints%2F' in line for line in [*google.requests])

  process = box.submit('--watch', *flags, workdir=bucket_hosts.ADDRESS)

  def wait(holds):
    runs.wait(lambda: process.poll() is not None or holds())
    assert process.poll() is None

  try:
    wait(lambda: beat()['phase'] == 'update' and beat()['step'] >= 2)
    (first,) = box.slices()
    box.preempt(first)
    wait(lambda: box.slices() not in ([], [first]))
    (second,) = box.slices()
    step = beat()['step']
    wait(lambda: beat()['step'] > step)
    processes = box.gcloud.processes(f'{second}-w-1')
    before = saves()
    wait(lambda: saves() > before)
    for pid in processes:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    box.reset(second, 1)
    code, out = _end(process)
  except AssertionError:
    process.terminate()
    raise AssertionError(_end(process)[1] + box.console()) from None
  print(out, box.console())
  assert code == 0
  assert (first[-2:], second[-2:]) == ('-1', '-2')
  assert 'study/run/launched' in google.objects and box.slices() == []
  assert 'was taken away' in out
  assert 'step 20/20' in out  # the log of the run, of --watch
  setups = b''.join(
    x.data for name, x in google.objects.items() if '/setup-' in name
  )
  assert b'could not connect' in setups and b'failed to fetch jax' in setups
  # Nothing lies elsewhere: in the bucket, and on disks that are gone.
  starts = {'/'.join(name.split('/')[:2]) for name in google.objects}
  assert starts == {'study/run', 'study/run.launch'}
  files = {x.name for x in (tmp_path / 'here').glob('*.*')}
  assert files == {'mine.py', 'prompt.txt', 'sizes.py'}
  words = [sys.executable, '-m', 'launch.submit', 'local', *flags]
  done = subprocess.run(
    [*words, f'--workdir={tmp_path}/alone'],
    cwd=tmp_path / 'here',
    env=os.environ | box.environment | {'PYTHONPATH': str(runs.REPO)},
  )
  assert done.returncode == 0
  bucket_hosts.assert_same_run(google, tmp_path / 'alone')


@pytest.mark.slow
def test_the_first_hour_of_a_slice_reports_to_the_bucket(real_box, google):
  box = real_box
  flags = ['--command=first_hour', '--config=mine.py:st_ppo']
  flags += [x for x in runs.flags()[1:] if 'num_steps' not in x]
  code, out = _end(box.submit(*flags, workdir=bucket_hosts.ADDRESS))
  assert code == 0, out + box.console()
  place = f'{bucket_hosts.ADDRESS.removeprefix("gs://mine/")}.first_hour'
  report = json.loads(google.data(f'{place}/report.json'))
  lines = {line['check']: line for line in report}
  assert lines['hosts']['found'] == 2
  for host in range(2):
    assert lines[f'workdir, written by host {host}']['found'] > 0
  assert google.data(f'{place}/launched') and box.slices() == []
  # The folder of the run is as it was.
  assert all(name.startswith(f'{place}') for name in google.objects)
