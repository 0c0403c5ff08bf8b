"""A worker's script restarts, passes on signals, and hides secrets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.launch import rendered
from tests.training import runs

_SCRIPT = runs.REPO / 'launch' / 'run.sh'
# In place of Python: writes down its arguments and the environment, and ends
# with the next exit code of a file; at 'wait' it waits for a signal, and at
# 'deaf' for one that ends it, as before it has loaded what listens.
_FAKE = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ['FOLDER'])
if 'serve' in sys.argv:
  import socket
  server = socket.socket()
  server.bind(('127.0.0.1', int(sys.argv[-1].removeprefix('--port='))))
  server.listen()
  print('http://127.0.0.1:%d' % server.getsockname()[1], flush=True)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit((folder / 'ended').touch()))
  with open(folder / 'servers', 'a') as file:
    file.write(f'{{os.getpid()}}\\n')
  is_first = len((folder / 'servers').read_text().split()) == 1
  while not (is_first and 'DIES' in os.environ and (folder / 'calls').exists()):
    time.sleep(0.01)
  sys.exit(1)
name = 'calls' + os.environ.get('SLURM_PROCID', '')
calls = folder / name
count = calls.read_text().count('\\n') if calls.exists() else 0
code = (folder / 'codes').read_text().split()[count]

def end(number, frame):
  print('told by', signal.Signals(number).name, flush=True)
  with open(folder / 'told', 'a') as file:
    file.write(f'{{number}}\\n')
  time.sleep(0.2)  # it saves
  sys.exit(75)

for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
  if code != 'deaf':
    signal.signal(number, end)
(folder / 'pid').write_text(str(os.getpid()))
with open(calls, 'a') as file:
  file.write(' '.join(sys.argv[1:]) + '|' + os.environ.get('WORD', '') + '\\n')
print('call', count, flush=True)
if 'DIES' in os.environ:  # the first server ends before this process does
  first, *_ = (folder / 'servers').read_text().split()
  while pathlib.Path('/proc', first).exists():
    time.sleep(0.01)
while code in ('wait', 'deaf'):
  time.sleep(0.01)
sys.exit(int(code))
"""


@pytest.fixture
def fake(tmp_path):
  """Yields a function that starts a command with that Python."""
  python = tmp_path / 'python'
  python.write_text(_FAKE)
  python.chmod(0o755)
  started = []

  def start(words, codes, **environment):
    (tmp_path / 'codes').write_text(codes)
    process = subprocess.Popen(
      words,
      env=os.environ
      | {'PYTHON': str(python), 'FOLDER': str(tmp_path), 'DELAY': '0'}
      | environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    started.append(process)
    return process

  yield start
  for process in started:  # a failed test may leave some
    process.terminate()
    process.wait(timeout=60)
    process.stdout.close()


def _run(fake, tmp_path, codes, *flags, **environment):
  """Returns the exit code of run.sh, its output, and the calls of Python."""
  words = [_SCRIPT, f'--workdir={tmp_path}/run', *flags]
  process = fake(words, codes, **environment)
  out, _ = process.communicate(timeout=60)
  calls = tmp_path / 'calls'
  return process.returncode, out, calls.read_text().splitlines()


@pytest.mark.parametrize(
  ('codes', 'restarts', 'code', 'count'),
  [
    ('0', '9', 0, 1),
    ('75 75 0', '9', 0, 3),
    ('75 75 75 75', '2', 75, 3),
    ('75', '0', 75, 1),
    ('75 2', '9', 2, 2),
    ('76', '9', 76, 1),
    ('70', '9', 70, 1),
  ],
)
def test_only_exit_code_75_is_tried_again(
  fake, tmp_path, codes, restarts, code, count
):
  found, out, calls = _run(fake, tmp_path, codes, RESTARTS=restarts)
  assert (found, len(calls)) == (code, count)
  (log,) = (tmp_path / 'run.logs').iterdir()
  assert log.read_text() == out  # and the whole of it
  assert out.count('call') == count


@pytest.mark.parametrize(
  ('number', 'code'), [(signal.SIGTERM, 75), (signal.SIGINT, 130)]
)
@pytest.mark.parametrize(
  'to',
  [
    'script',
    *(pytest.param(x, marks=pytest.mark.slow) for x in ('group', 'all')),
  ],
)
def test_a_signal_is_passed_on_once_and_ends_it(
  fake, tmp_path, number, code, to
):
  """It is sent by a container, by a terminal, or by Slurm to every process.

  In the last case the run hears that signal first, and then perhaps SIGHUP,
  which `train` does not take for a wish to abandon what it saves.
  """
  words = [_SCRIPT, f'--workdir={tmp_path}/run']
  process = fake(['setsid', *words], 'wait wait')
  assert process.stdout.readline() == 'call 0\n'
  if to == 'all':
    os.kill(int((tmp_path / 'pid').read_text()), number)
  (os.killpg if to == 'group' else os.kill)(process.pid, number)
  process.communicate(timeout=60)
  assert process.returncode == code
  told = [int(x) for x in (tmp_path / 'told').read_text().split()]
  assert told == [number if to == 'all' else signal.SIGHUP]
  assert (tmp_path / 'calls').read_text().count('\n') == 1


@pytest.mark.parametrize(
  ('command', 'codes'), [(['nohup'], 'wait'), ([], 'deaf'), (['nohup'], 'deaf')]
)
def test_a_run_under_nohup_or_that_does_not_listen_yet_is_stopped_too(
  fake, tmp_path, command, codes
):
  process = fake([*command, _SCRIPT, f'--workdir={tmp_path}/run'], codes)
  runs.wait((tmp_path / 'calls').exists)
  process.terminate()
  process.communicate(timeout=60)
  assert process.returncode == 75
  if codes == 'wait':
    assert (tmp_path / 'told').read_text() == f'{int(signal.SIGTERM)}\n'


def test_secrets_are_no_arguments(fake, tmp_path):
  secrets = tmp_path / 'secrets'
  # No word of it is a word of the shell.
  secrets.write_text('# of the lab\n\nWORD=o$HOME; p"en')
  flags = ['--config=x', '--process_id=3']
  code, out, calls = _run(fake, tmp_path, '0', *flags, SECRETS=str(secrets))
  assert code == 0 and 'p"en' not in out
  assert calls == [
    f'-u -m stppo_jax train --workdir={tmp_path}/run --config=x --process_id=3'
    '|o$HOME; p"en'
  ]
  (log,) = (tmp_path / 'run.logs').iterdir()
  assert log.name.endswith('-3.log')


@pytest.mark.parametrize(
  ('flags', 'environment', 'expected'),
  [
    ([], {}, '--workdir=DIR is missing'),
    (['--workdir=a', '--restart'], {}, '--restart: every start would begin'),
    (['--workdir=a'], {'SECRETS': '/nowhere'}, 'SECRETS=/nowhere: no such'),
    (['--workdir=a'], {'PYTHON': '/nowhere'}, 'PYTHON=/nowhere: no such'),
  ],
)
def test_wrong_usage_is_one_line(flags, environment, expected):
  done = subprocess.run(
    [_SCRIPT, *flags],
    env=os.environ | environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2
  assert expected in done.stderr and done.stderr.count('\n') == 1


_RETRIEVER = {'RETRIEVER': '--index=x'}


def _url(call):
  """Returns the address of the retriever in the arguments of a call."""
  return call.partition(' --config.retrieval.url=')[2].partition('|')[0]


def test_a_retriever_runs_beside_the_run(fake, tmp_path):
  code, _, (call,) = _run(fake, tmp_path, '0', **_RETRIEVER)
  assert code == 0
  assert re.fullmatch(r'http://127\.0\.0\.1:\d{4,5}', _url(call))
  runs.wait((tmp_path / 'ended').exists)


def test_a_retriever_that_cannot_start_ends_it(fake, tmp_path):
  with socket.socket() as other:
    other.bind(('127.0.0.1', 0))
    other.listen()
    # PORT is that of the first process.
    port = {'PORT': str(other.getsockname()[1] - 3)}
    words = [_SCRIPT, '--workdir', f'{tmp_path}/run', '--process_id', '3']
    process = fake(words, '0', **_RETRIEVER, **port)
    out, _ = process.communicate(timeout=60)
  assert process.returncode == 1 and 'Address already in use' in out
  assert not (tmp_path / 'calls').exists()


@pytest.mark.slow
def test_a_retriever_that_ended_is_started_again(fake, tmp_path):
  code, _, calls = _run(fake, tmp_path, '75 0', DIES='yes', **_RETRIEVER)
  assert code == 0 and len(calls) == 2
  assert (tmp_path / 'servers').read_text().count('\n') == 2
  assert all(map(_url, calls))


def test_runs_that_start_together_have_retrievers_of_their_own(fake, tmp_path):
  words = [_SCRIPT, f'--workdir={tmp_path}/run']
  processes = [
    fake(words, 'wait', SLURM_PROCID=number, **_RETRIEVER) for number in '01'
  ]
  calls = [tmp_path / f'calls{number}' for number in '01']
  # A file is there before its line is.
  runs.wait(lambda: all(path.exists() and path.read_text() for path in calls))
  urls = {_url(path.read_text()) for path in calls}
  assert len(urls) == 2 and all(urls)
  for process in processes:
    process.terminate()
    assert process.wait(timeout=60) == 75


_SRUN = """#!/bin/bash
# As srun: the command once for each task, and the worst exit code.
shift
for ((i = 0; i < SLURM_NTASKS; i++)); do
  SLURM_PROCID=$i "$@" &
  tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
worst=0
for task in "${tasks[@]}"; do
  while wait "$task"; code=$?; ((code > 128)) && kill -0 "$task" 2>/dev/null
  do :; done
  ((code > worst)) && worst=$code
done
exit "$worst"
"""
_SCONTROL = """#!/bin/bash
case "$1 $2" in
  'show hostnames') printf '127.0.0.1\\nother\\n' ;;
  'show job') echo JobState=RUNNING ;;
  requeue*) echo "requeued $2" ;;
esac
"""


def _slurm(tmp_path, *flags):
  """Returns the words that run the job of `slurm`, and its environment."""
  for name, text in (('srun', _SRUN), ('scontrol', _SCONTROL)):
    path = tmp_path / 'bin' / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
  template = (rendered.GOLDEN / 'slurm.sh').read_text()
  job = tmp_path / 'job.sh'
  job.write_text(
    template.replace('/srv/lab/.sources/source-HASH', str(runs.REPO))
    .replace('PYTHON=/srv/stppo_jax/.venv/bin/python ', '')
    .replace("'--workdir=/shared/runs/ST ppo'", ' '.join(flags))
    .replace('SECRETS=/srv/lab/secrets', '')
  )
  return ['bash', str(job)], {
    'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}',
    'SLURM_JOB_ID': '12',
    'SLURM_JOB_NODELIST': 'n[0-1]',
    'SLURM_NTASKS': '2',
  }


@pytest.mark.parametrize(
  ('codes', 'count', 'code', 'requeued'),
  [('75', '', 75, True), ('75', '20', 75, False), ('2', '', 2, False)],
)
def test_slurm_starts_a_job_again_and_numbers_its_processes(
  fake, tmp_path, codes, count, code, requeued
):
  words, environment = _slurm(tmp_path, f'--workdir={tmp_path}/run')
  if count:
    environment['SLURM_RESTART_COUNT'] = count
  process = fake(words, codes, **environment)
  out, _ = process.communicate(timeout=60)
  assert process.returncode == code, out
  assert ('requeued 12' in out) == requeued
  for number in '01':
    (call,) = (tmp_path / f'calls{number}').read_text().splitlines()
    assert call.endswith(
      f'--coordinator=127.0.0.1:20012 --num_processes=2 --process_id={number}|'
    )


@pytest.mark.slow
@pytest.mark.parametrize('launcher', ['local', 'slurm'])
def test_a_run_of_two_processes_survives_a_signal_and_a_kill(
  tmp_path, launcher
):
  """The same command resumes; the numbers are those of one process.

  Each process has a retriever of its own beside it.
  """
  run = tmp_path / 'run'
  options = {'num_steps': 12, 'evaluate__every': 6}
  config, *changes = runs.flags(**options)
  retriever = '--synthetic_seed=0 --entities_per_type=8'
  environment = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '2',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'PYTHON': sys.executable,
    'DELAY': '1',
  }
  flags = [config, *changes, f'--workdir={run}']
  if launcher == 'local':
    words = [sys.executable, '-m', 'launch.submit', 'local', *flags]
    words += [f'--retriever={retriever}']
  else:
    words, more = _slurm(tmp_path, *flags)
    environment |= {'RETRIEVER': retriever, **more}

  def start():
    return subprocess.Popen(words, cwd=runs.REPO, env=environment)

  def pid():
    return json.loads((run / 'heartbeat.json').read_text())['pid']

  process = start()
  runs.wait((run / 'checkpoints' / '1').exists)
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=600) == 75
  before = pid()
  process = start()
  runs.wait(lambda: pid() != before)
  os.kill(pid(), signal.SIGKILL)
  assert process.wait(timeout=600) == 137
  assert start().wait(timeout=600) == 0
  assert runs.train(tmp_path / 'one', **options) == 0
  lines = zip(runs.repeated(run), runs.repeated(tmp_path / 'one'), strict=True)
  for ours, theirs in lines:
    assert ours['step'] == theirs['step']
    assert ours.get('val/em/one_hop') == theirs.get('val/em/one_hop')
  assert len(list((tmp_path / 'run.logs').iterdir())) == 2
