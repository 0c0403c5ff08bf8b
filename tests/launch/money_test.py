"""No slice is lost or left when something fails; gcloud is a stand-in here."""

import builtins
import fnmatch
import json
import signal
import subprocess
import time
from typing import Any

import pytest

from launch import budget
from launch import cloud
from launch import slices
from launch import source
from launch import submit

_RUN = 'gs://lab/runs/one'
_FLAGS = [
  *('tpu', '--config=quickstart', f'--workdir={_RUN}', '--project=the-lab'),
  *('--zone=us-west4-a', '--accelerator=v5litepod-4', '--poll=1', '--name=one'),
]
_REAP = ['tpu', '--project=the-lab', '--zone=us-west4-a', '--reap']
_SLICE, _PLACE = 'stppo-one-1', f'{_RUN}.launch/0001'


class _Cloud:
  """Buckets and slices in memory; commands fail as the test says."""

  def __init__(self):
    self.objects: dict[str, bytes] = {}
    self.slices: dict[str, dict[str, Any]] = {}
    self.calls: list[str] = []
    # Part of a command -> what is answered, and how often.
    self.fails: dict[str, tuple[str, int]] = {}

  def run(self, words, data=b''):
    command = ' '.join(words)
    self.calls.append(command)
    for part, (error, times) in self.fails.items():
      if part in command and times:
        self.fails[part] = error, times - 1
        return _answer(error=f'ERROR: {error}')
    if 'storage cat' in command:
      pattern = words[-1]
      found = [x for x in sorted(self.objects) if fnmatch.fnmatch(x, pattern)]
      if not found:
        return _answer(error='matched no objects')
      return _answer(b''.join(self.objects[x] for x in found))
    if 'storage cp' in command:
      address = next(x for x in words if x.startswith('gs://'))
      if '--if-generation-match=0' in words and address in self.objects:
        return _answer(error='HTTPError 412')
      self.objects[address] = data
      return _answer()
    name = words[5]
    if ' create ' in command:
      place = command.partition('stppo-place=')[2].split()[0]
      self.add(name, place)
    elif ' describe ' in command:
      if name not in self.slices:
        return _answer(error='NOT_FOUND')
      return _answer(json.dumps(self.slices[name]).encode())
    elif ' list ' in command:
      return _answer(json.dumps([*self.slices.values()]).encode())
    elif ' delete ' in command:
      self.slices.pop(name, None)
    return _answer()

  def add(self, name, place, state='ACTIVE'):
    node = {'node': {'metadata': {'stppo-place': place}}}
    self.slices[name] = {
      'name': f'projects/p/{name}',
      'state': {'state': state},
      'tpu': {'nodeSpec': [node]},
    }

  def says(self, *words, age=0):
    line = f'h0 {int(time.time()) - age} {" ".join(words)}\n'
    self.objects[f'{_PLACE}/state-h0'] = line.encode()

  def record(self):
    return json.loads(self.objects[f'{_PLACE}/record'])

  def count(self, part):
    return sum(part in call for call in self.calls)


def _answer(output=b'', *, error=''):
  return subprocess.CompletedProcess(
    [], 1 if error else 0, output, error.encode()
  )


@pytest.fixture
def google(monkeypatch):
  """Yields the cloud; at each pause the test's next function is called."""
  stand_in = _Cloud()
  stand_in.pauses = []
  monkeypatch.setattr(cloud, 'run', stand_in.run)
  monkeypatch.setattr(submit, 'require', lambda tool: None)
  # A small source: the package does not travel.
  monkeypatch.setattr(source, '_own', lambda: iter(()))

  def sleep(seconds):
    if stand_in.pauses:
      stand_in.pauses.pop(0)()

  monkeypatch.setattr(time, 'sleep', sleep)
  handlers = {x: signal.getsignal(x) for x in (2, 15, 1)}
  yield stand_in
  for number, handler in handlers.items():
    signal.signal(number, handler)


def _end(number=signal.SIGTERM):
  """Interrupts the launcher as `kill` does; the slice is kept."""
  raise KeyboardInterrupt(number)


def test_a_run_that_ends_leaves_no_slice(google):
  google.pauses = [lambda: google.says('ended', '70')]
  assert submit.main(_FLAGS) == 70
  assert google.slices == {} and google.record()['reason'] == 'ended'


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_launcher_deletes_the_slice_if_told_to(google, number):
  google.pauses = [lambda: _end(number)]
  code = submit.main([*_FLAGS, '--on_interrupt=delete'])
  assert code == (130 if number == signal.SIGINT else 75)
  assert google.slices == {}


def test_stop_ends_the_run_for_who_follows_it(google, capsys):
  google.pauses = [lambda: submit.main([*_FLAGS, '--stop']), lambda: None]
  assert submit.main(_FLAGS) == 75
  assert 'was stopped' in capsys.readouterr().out
  assert google.slices == {} and google.record()['reason'] == 'stopped'
  assert google.count(' create ') == 1


def test_a_terminal_that_is_gone_keeps_the_slice(google, monkeypatch):
  def broken(*args, **kwargs):
    raise OSError(5, 'Input/output error')

  def hang_up():
    monkeypatch.setattr(builtins, 'print', broken)
    _end(signal.SIGHUP)

  google.pauses = [hang_up]
  assert submit.main(_FLAGS) == 75
  assert [*google.slices] == [_SLICE]


def test_the_slice_of_another_command_is_not_touched(google):
  google.pauses = [_end]
  submit.main(_FLAGS)
  google.fails = {' describe ': ('connection reset', 1)}
  assert submit.main([*_FLAGS, '--config.seed=1']) == 75
  assert submit.main([*_FLAGS, '--config.seed=1']) == 75
  assert [*google.slices] == [_SLICE] and not google.count(' delete ')


@pytest.mark.parametrize('place', ['gs://lab/other.launch/0001', _PLACE])
def test_a_slice_of_that_name_is_ours_or_stays(google, place, capsys):
  google.add(_SLICE, place)
  google.fails = {' create ': ('ALREADY_EXISTS', 1)}
  google.pauses = [_end]
  code = submit.main(_FLAGS)
  assert code == (75 if place == _PLACE else 2)
  assert [*google.slices] == [_SLICE] and not google.count(' delete ')
  if place != _PLACE:
    assert 'give another name with --name' in capsys.readouterr().out


def test_a_network_that_fails_while_going_on_costs_no_slice(google):
  google.pauses = [_end]
  submit.main(_FLAGS)
  google.fails = {
    '.tar.bz2': ('HTTPError 503', 1),
    ' describe ': ('timed out', 1),
  }
  google.pauses = [lambda: None, lambda: google.says('ended', '0')]
  assert submit.main(_FLAGS) == 0
  marker = google.objects[f'{_RUN}/launched'].decode()
  assert marker.strip() == google.record()['job']
  assert google.count(' create ') == 1


def test_a_request_that_is_not_answered_is_made_again(google, monkeypatch):
  google.fails = {' create ': ('HTTPError 503', 1)}
  google.pauses = [lambda: monkeypatch.setattr(slices, '_NEW', 0), lambda: None]
  google.pauses += [_end]
  assert submit.main(_FLAGS) == 75
  assert [*google.slices] == ['stppo-one-2']


def test_a_quota_is_no_error_that_passes(google):
  error = 'RESOURCE_EXHAUSTED: Quota TPUV5 exceeded. Limit: 500, HTTPError 503'
  google.fails = {' create ': (error, 9)}
  assert submit.main(_FLAGS) == 75
  assert google.count(' create ') == 1


def test_a_time_that_could_not_be_written_is_written_later(google):
  def break_record():
    google.fails = {'0001/record': ('HTTPError 503', 1)}

  google.fails = {' describe ': ('HTTPError 503', 1)}  # at the first look
  google.pauses = [break_record, lambda: None, _end]
  assert submit.main(_FLAGS) == 75
  assert google.record()['active'] > 0


def test_a_slice_that_was_lost_alone_is_paid_until_its_last_word(google):
  google.pauses = [lambda: google.says('running'), lambda: None, _end]
  submit.main(_FLAGS)
  google.says('running', age=7200)
  told = int(google.objects[f'{_PLACE}/state-h0'].split()[1])
  google.slices.clear()
  record = google.record() | {'active': told - 3600.0, 'asked': told - 3700.0}
  google.objects[f'{_PLACE}/record'] = json.dumps(record).encode() + b'\n'
  google.pauses = [_end]
  submit.main(_FLAGS)
  assert google.record()['ended'] == told + 1


def test_slices_that_are_asked_for_count_and_running_ones_go_on():
  values = {'max_slices': 2, 'max_hours': 9.0, 'max_cost': 0.0, 'price': 0.0}
  values['budget'] = ''
  limits = budget.Budget(values, 4)
  record = {'active': 0.0, 'ended': 0.0}
  failed = record | {'ended': 5.0}
  limits.check([failed, failed, record], asks=True)
  with pytest.raises(cloud.Ended, match='--max_slices=2 is spent'):
    limits.check([failed, record, record], asks=True)
  limits.check([record, record, record])
  hour = record | {'active': 3600.0, 'ended': 7200.0}
  assert limits.hours_left([hour, hour]) == 7.0
  with pytest.raises(cloud.Ended, match='--max_hours=9 is spent'):
    limits.check([hour] * 9)
  limits = budget.Budget(values | {'max_cost': 24.0, 'price': 2.0}, 4)
  assert limits.hours_left([hour]) == 2.0


def test_no_run_of_a_stopped_sweep_begins(google, capsys):
  google.objects['gs://lab/runs.launch/stopped'] = b'stopped'
  assert submit.main([*_FLAGS, '--budget=gs://lab/runs']) == 75
  assert 'the sweep was stopped' in capsys.readouterr().out
  assert google.slices == {} and f'{_PLACE}/record' not in google.objects


def test_a_run_with_another_config_file_is_another_run(google, tmp_path):
  def file(steps):
    (tmp_path / 'mine.py').write_text(
      'from stppo_jax.configs import quickstart\n'
      'def get_config():\n'
      '  config = quickstart.get_config()\n'
      f'  config.num_steps = {steps}\n'
      '  return config\n'
    )

  flags = [*_FLAGS, f'--config={tmp_path}/mine.py']
  file(5)
  google.pauses = [_end]
  submit.main(flags)
  google.objects[f'{_RUN}/launched'] = google.record()['job'].encode()
  google.says('ended', '0')
  assert submit.main(flags) == 0
  assert submit.main(flags) == 0  # nothing is requested
  assert google.count(' create ') == 1
  file(6)
  google.pauses = [_end]
  assert submit.main(flags) == 75
  assert [*google.slices] == ['stppo-one-2']


@pytest.mark.parametrize('part', [' delete ', f'cp --quiet - {_RUN}.launch'])
def test_a_stop_that_fails_says_so_and_still_deletes(google, part):
  google.pauses = [_end]
  submit.main(_FLAGS)
  google.fails = {part: ('HTTPError 503', 99)}
  code = submit.main([*_FLAGS, '--stop'])
  assert code == (75 if part == ' delete ' else 0)
  assert bool(google.slices) == (part == ' delete ')


def test_words_that_are_cut_off_are_no_words(google):
  cut_off = {f'{_PLACE}/state-a': b'a 1\n'}
  google.pauses = [
    lambda: google.objects.update(cut_off),
    lambda: google.says('ended', '2'),
  ]
  assert submit.main(_FLAGS) == 2
  assert cloud.reports('a\na 1\na x running\nb 2 ended 0\n') == {
    'b': (2, ['ended', '0'])
  }


@pytest.mark.parametrize(
  ('record', 'words', 'age', 'left'),
  [
    ({'active': 1.0}, (), 0, False),  # no worker has ever said a word
    ({}, (), 0, True),  # it may just have become active
    ({'poll': 300}, ('running',), 3000, True),
    ({'poll': 60}, ('running',), 3000, False),
    ({'ended': 5.0}, ('running',), 0, False),
    ({}, ('ended', '0'), 0, False),
    ({}, ('running',), 0, True),
  ],
)
def test_reap_deletes_what_only_costs(google, record, words, age, left):
  google.add(_SLICE, _PLACE)
  google.add('other-1', 'gs://lab/x')
  google.objects[f'{_PLACE}/record'] = json.dumps(record).encode()
  if words:
    google.says(*words, age=age)
  assert submit.main(_REAP) == 0
  assert [*google.slices] == [_SLICE] * left + ['other-1']


def test_reap_without_a_login_is_refused(google, capsys):
  google.fails = {' list ': ('You do not have an active account', 1)}
  assert submit.main(_REAP) == 2
  assert 'run gcloud auth login' in capsys.readouterr().out
