"""`status` tells how runs are doing from their files alone."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from stppo_jax import __main__
from stppo_jax.tools import run_state
from tests import processes

_GONE = 4_000_000  # above the largest process id of Linux
_HERE = socket.gethostname()


def _make(folder, *, lines=(), beat=None, holder=None, saved=(), num_steps=10):
  """Makes the folder of a run by hand, as `train` leaves it."""
  folder.mkdir(parents=True)
  sections = dict.fromkeys(('algorithm', 'model', 'rollout', 'sft'), {})
  config = sections | {'num_steps': num_steps}
  (folder / 'config.json').write_text(json.dumps(config))
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (folder / 'metrics.jsonl').write_text(text)
  if beat is not None:
    now = {'time': time.time(), 'host': _HERE, 'pid': _GONE}
    (folder / 'heartbeat.json').write_text(json.dumps(now | beat))
  if holder is not None:
    known = {'host': _HERE, 'started': '1', 'since': 'noon'}
    (folder / 'lock').write_text(json.dumps(known | holder))
  for step in saved:
    (folder / 'checkpoints' / str(step)).mkdir(parents=True)
  return folder


def _line(step, **more):
  return {'step': step, 'timing_s/step': 2.0, 'critic/score/mean': 0.5, **more}


def _state(folder, **files):
  return run_state.read(_make(folder, **files))


def _this_process():
  stat = pathlib.Path('/proc/self/stat').read_text('utf-8')
  return {'pid': os.getpid(), 'started': stat.rpartition(')')[2].split()[19]}


def test_a_running_run_has_a_phase_a_pace_and_an_end(tmp_path, capsys):
  compiled = {'timing_s/step': 60.0, 'timing_s/compile': 58.0}
  lines = [_line(1, **compiled, **{'val/em/a': 0.2})]
  lines += [_line(2, **{'val/em/a': 0.4, 'val/em/b': 0.6})]
  lines += [_line(3), _line(4, **{'timing_s/checkpoint': 1.0})]
  run = _make(
    tmp_path / 'run',
    lines=lines,
    beat={'phase': 'update', 'step': 4, 'num_steps': 10, 'hosts': ['a', 'b']},
    holder=_this_process(),
    saved=(2, 4),
  )
  state = run_state.read(run)
  assert state.state == run_state.RUNNING and state.phase == 'update'
  assert state.step == state.checkpoint == 4 and state.num_steps == 10
  # Without what the first step compiled.
  assert state.seconds_per_step == pytest.approx(2.0)
  assert state.eta == pytest.approx(6 * 2)
  assert state.metrics == {'reward': 0.5, 'val/em': 0.5}
  assert __main__.main(['status', str(run), '--json']) == 0
  assert json.loads(capsys.readouterr().out)['hosts'] == ['a', 'b']
  assert __main__.main(['status', str(run)]) == 0
  titles, row = capsys.readouterr().out.splitlines()
  assert titles.split()[:4] == ['run', 'state', 'step', 'phase']
  assert row.split()[1:6] == ['running', '4/10', 'update', '2', '0:00:12']
  assert 'reward 0.500 val/em 0.500' in row


def test_status_and_report_agree_on_the_seconds_of_a_step(finished, capsys):
  assert __main__.main(['status', str(finished), '--json']) == 0
  seconds = json.loads(capsys.readouterr().out)['seconds_per_step']
  out = finished.parent / 'pace.html'
  assert __main__.main(['report', str(finished), f'--out={out}']) == 0
  pattern = r'"seconds per step".*?"runs":\[([^]]*)\]'
  assert re.search(pattern, out.read_text())[1] == f'{seconds}'


_ALL = [_line(step) for step in range(1, 11)]


@pytest.mark.parametrize(
  ('files', 'state', 'note'),
  [
    ({'lines': _ALL, 'beat': {'exit_code': 0}}, 'finished', ''),
    ({'lines': _ALL}, 'finished', ''),  # a version that wrote no heartbeat
    ({'lines': _ALL[:3]}, 'interrupted', ''),
    ({'beat': {'exit_code': 130}}, 'interrupted', ''),
    ({'beat': {'exit_code': 75, 'error': 'no GPU'}}, 'interrupted', 'no GPU'),
    ({'beat': {'exit_code': 76, 'error': 'nan'}}, 'failed', 'exit code 76: n'),
    ({'beat': {}}, 'dead', f'process {_GONE} on host {_HERE} left no exit c'),
    ({'holder': {'pid': _GONE}}, 'dead', 'that process is gone'),
    ({'holder': {'pid': _GONE}, 'beat': {'time': 0}}, 'dead', 'is gone'),
    # In another container of this machine, or on another machine.
    ({'holder': {'pid': _GONE}, 'beat': {}}, 'running', ''),
    ({'holder': {'pid': 1, 'host': 'far'}, 'beat': {}}, 'running', ''),
    ({'holder': {'pid': 1, 'host': 'far'}}, 'running', 'cannot be seen'),
    (
      {'holder': {'pid': 1, 'host': 'far'}, 'beat': {'time': 0}},
      'dead',
      'no sign of life for',
    ),
  ],
)
def test_the_state_follows_from_lock_and_heartbeat(
  tmp_path, files, state, note
):
  found = _state(tmp_path / 'run', **files)
  assert found.state == state
  assert note in found.note and bool(note) == bool(found.note)


def test_alarms_are_those_of_the_last_step(tmp_path, capsys):
  sick = {
    'update/skipped': 0.5,
    'rollout/valid_fraction': 0.75,
    'alarm/infrastructure': 1.0,
    'alarm/kl': 0.0,
    'actor/kl': None,
    'writer/non_finite': {'actor/kl': 'nan'},
  }
  # A number that constant rewards make meaningless is not shown.
  equal = {'critic/score/min': 0.0, 'critic/score/max': 0.0}
  equal['alarm/explained_variance'] = 1.0
  equal['critic/vf_explained_var'] = -39500.0
  run = _make(tmp_path / 'equal', lines=[_line(1, **equal)])
  assert __main__.main(['status', str(run)]) == 0
  out = capsys.readouterr().out
  assert 'all rewards of the step are equal' in out and '3.95' not in out
  run = _make(tmp_path / 'run', lines=[_line(1), _line(2, **sick)])
  assert __main__.main(['status', str(run)]) == 0
  lines = capsys.readouterr().out.splitlines()[2:]
  assert len(lines) == 3 and all(f'{run}: step 2: ' in line for line in lines)
  for line, part in zip(lines, ('50%', 'actor/kl', 'is 0.25')):
    assert part in line
  assert not _state(
    tmp_path / 'well', lines=[_line(1, **sick), _line(2)]
  ).alarms


def test_a_folder_that_is_no_run_does_not_hide_the_others(tmp_path, capsys):
  run = _make(tmp_path / 'run', lines=_ALL)
  (tmp_path / 'data').mkdir()
  folders = [str(tmp_path / 'data'), str(run), str(tmp_path / 'nowhere')]
  assert __main__.main(['status', *folders]) == 2
  out, err = capsys.readouterr()
  assert str(run) in out and 'finished' in out
  data, nowhere = err.splitlines()
  assert f'{tmp_path}/data' in data and f'{tmp_path}/nowhere' in nowhere


@pytest.mark.parametrize('is_in_bucket', [False, True])
def test_a_folder_of_runs_stands_for_its_runs(
  is_in_bucket, google, tmp_path, capsys
):
  place = str(tmp_path)
  for name in ('study/turn-0', 'study/token-0', 'study/token-1', 'other'):
    _make(tmp_path / name, lines=_ALL)
  (tmp_path / 'other' / 'policy').mkdir()  # that of a finished run
  (tmp_path / 'other' / 'policy' / 'config.json').write_text('{}')
  if is_in_bucket:
    place = 'gs://mine/runs'
    for path in tmp_path.rglob('*'):
      if path.is_file():
        google.put(f'runs/{path.relative_to(tmp_path)}', path.read_bytes())
  assert __main__.main(['status', '--json', place]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [json.loads(line)['folder'] for line in lines] == [
    f'{place}/{name}'
    for name in ('other', 'study/token-0', 'study/token-1', 'study/turn-0')
  ]


def test_watching_shows_what_has_changed(tmp_path):
  run = _make(tmp_path / 'run', lines=[_line(1)])
  with subprocess.Popen(
    [sys.executable, '-m', 'stppo_jax', 'status', '--json', str(run)]
    + ['--watch=0.1'],
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout is not None
    steps = [json.loads(process.stdout.readline())['step']]
    with (run / 'metrics.jsonl').open('a') as file:
      file.write(json.dumps(_line(2)) + '\n')
    while steps[-1] == 1:
      steps.append(json.loads(process.stdout.readline())['step'])
    process.send_signal(signal.SIGINT)
    process.stdout.read()
  assert steps[0] == 1 and steps[-1] == 2 and process.returncode == 130


def test_files_that_are_cut_off_are_no_error(tmp_path):
  run = _make(tmp_path / 'run', lines=_ALL[:2], beat={})
  text = (run / 'metrics.jsonl').read_text() + '{"step": 3, "timing'
  (run / 'metrics.jsonl').write_text(text)
  (run / 'heartbeat.json').write_text('{"time"')
  assert run_state.read(run).step == 2


def test_text_of_a_run_is_escaped_and_a_bad_heartbeat_is_none(tmp_path, capsys):
  error = 'gone\x1b[31m\nrun  finished'
  beat = {'exit_code': 75, 'error': error, 'num_steps': 10}
  run = _make(tmp_path / 'run', lines=_ALL[:2], beat=beat)
  assert __main__.main(['status', str(run)]) == 0
  *_, note = capsys.readouterr().out.splitlines()
  assert note == f'{run}: gone\\x1b[31m\\nrun  finished'
  for number, wrong in enumerate(({'num_steps': 'ten'}, {'phase': [[]]})):
    folder = tmp_path / str(number)
    assert _state(folder, lines=_ALL, beat=beat | wrong).state == 'finished'


def test_fifty_runs_take_less_than_a_second_and_no_jax(tmp_path):
  many = {f'metric/{n}': float(n) for n in range(150)}
  lines = [_line(step, **many) for step in range(1, 400)]
  lines[99] |= {'val/em/a': 0.25}
  first = _make(tmp_path / '0', lines=lines, beat={'exit_code': 75})
  for number in range(1, 50):
    folder = _make(tmp_path / str(number), beat={'exit_code': 75})
    os.link(first / 'metrics.jsonl', folder / 'linked')
    os.replace(folder / 'linked', folder / 'metrics.jsonl')
  program = (
    'import sys; from stppo_jax import __main__\n'
    'code = __main__.main(sys.argv[1:])\n'
    'assert not {"jax", "numpy", "rich"} & set(sys.modules)\n'
    'sys.exit(code)'
  )
  folders = [str(tmp_path / str(number)) for number in range(50)]
  before = os.times()
  done = processes.python('-c', program, 'status', *folders)
  after = os.times()
  assert done.returncode == 0, done.stderr
  assert done.stdout.count('399/10') == done.stdout.count('val/em 0.250') == 50
  assert after.children_user - before.children_user < 1.0
