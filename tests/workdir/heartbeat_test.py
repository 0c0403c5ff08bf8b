"""The heartbeat says at once what has changed, and how a run has ended."""

import json

import pytest

from stppo_jax.workdir import heartbeat
from stppo_jax.workdir import lock
from tests.training import runs


class _Outage(Exception):
  exit_code = 75


def test_changes_are_written_and_the_end_is_last(tmp_path):
  beats = heartbeat.Heartbeat(lambda: 130)
  beats.count(3, 9)
  with beats.written(tmp_path, ['a', 'b']):
    first = heartbeat.read(tmp_path)
    assert (first.phase, first.step, first.hosts) == ('start', 3, ['a', 'b'])
    assert first.exit_code is None
    beats.enter_phase('update')
    beats.enter_phase('')
    runs.wait(lambda: heartbeat.read(tmp_path).phase == 'update')
    assert heartbeat.read(tmp_path).time > first.time
    beats.count(4, 9)
  last = heartbeat.read(tmp_path)
  assert (last.phase, last.step, last.exit_code) == ('end', 4, 130)
  assert [path.name for path in tmp_path.iterdir()] == [heartbeat.NAME]


def test_an_error_is_named_and_goes_on(tmp_path):
  for error, code in ((_Outage('no one\nhome'), 75), (KeyError(), 70)):
    with pytest.raises(type(error)):
      with heartbeat.Heartbeat(lambda: 0).written(tmp_path, ['a']):
        raise error
    last = heartbeat.read(tmp_path)
    assert last.exit_code == code
    assert last.error == {75: 'no one', 70: 'KeyError'}[code]


def test_the_process_that_lost_the_folder_writes_no_more(tmp_path):
  with lock.held(tmp_path) as claim:
    beats = heartbeat.Heartbeat(lambda: 0)
    with beats.written(tmp_path, ['a'], claim):
      path = tmp_path / lock.NAME
      holder = json.loads(path.read_text())
      path.write_text(json.dumps(holder | {'host': 'elsewhere'}))
      (tmp_path / heartbeat.NAME).write_text('{"phase": "update"}')
      beats.resume(1, 1)
    assert heartbeat.read(tmp_path).phase == 'update'


def test_restarts_and_what_they_lost_are_counted(tmp_path):
  def run(resumed, written, done):
    beats = heartbeat.Heartbeat(lambda: 0)
    with beats.written(tmp_path, ['a']):
      beats.resume(resumed, written)
      now = heartbeat.read(tmp_path)
      beats.count(done, 9)
    return now

  first = run(0, 0, 5)
  assert (first.restarts, first.lost_steps) == (0, 0)
  second = run(3, 4, 3)  # the heartbeat says 5, metrics say 4
  assert (second.restarts, second.lost_steps) == (1, 2)
  third = run(3, 4, 3)  # metrics say 4, the heartbeat 3: killed before a beat
  assert (third.restarts, third.lost_steps) == (2, 3)
  assert first.began == second.began == third.began
