"""A phase that takes far too long leaves the stacks of all threads."""

import logging
import threading
from unittest import mock

import pytest

from stppo_jax.workdir import watchdog
from tests.training import runs


@pytest.fixture
def clock():
  return mock.Mock(return_value=0.0)


def _phases(watch, clock, **durations):
  for phase, seconds in durations.items():
    watch.enter_phase(phase)
    clock.return_value += seconds
  watch.enter_phase('')


def test_ten_times_the_usual_time_is_told_once(tmp_path, clock, caplog):
  watch = watchdog.Watchdog(clock=clock, least=1.0)
  path = tmp_path / 'stacks.txt'
  _phases(watch, clock, update=50.0)  # it compiled
  _phases(watch, clock, update=2.0)
  _phases(watch, clock, update=2.0)
  watch.enter_phase('update')
  clock.return_value += 20.0
  watch.look(path)
  assert not path.exists()
  clock.return_value += 1.0
  with caplog.at_level(logging.WARNING):
    watch.look(path)
    watch.look(path)
  text = path.read_text('utf-8')
  told = 'update has taken 21 s, usually 2 s'
  assert text.count(told) == 1 and caplog.text.count(told) == 1
  assert str(path) in caplog.text
  assert 'test_ten_times_the_usual_time_is_told_once' in text
  # The next one is told too.
  watch.enter_phase('update')
  clock.return_value += 1000.0
  watch.look(path)
  assert path.read_text('utf-8').count('has taken') == 2


def test_a_phase_that_has_not_ended_before_has_half_an_hour(
  tmp_path, clock, caplog
):
  watch = watchdog.Watchdog(clock=clock)
  path = tmp_path / 'stacks.txt'
  watch.enter_phase('update')
  clock.return_value += 1800.0  # it may compile
  watch.look(path)
  assert not path.exists()
  clock.return_value += 1.0
  watch.look(path)
  told = 'update has taken 1801 s, and has not ended before'
  assert told in path.read_text('utf-8') and told in caplog.text


def test_nothing_is_said_of_short_times_and_between_phases(tmp_path, clock):
  watch = watchdog.Watchdog(clock=clock, least=60.0)
  path = tmp_path / 'stacks.txt'
  _phases(watch, clock, update=0.1)
  for phase, seconds in (('update', 59.0), ('', 1e6)):
    watch.enter_phase(phase)
    clock.return_value += seconds
    watch.look(path)
    assert not path.exists()


def test_a_thread_looks_and_shows_the_others(tmp_path):
  watch = watchdog.Watchdog(least=0.0, every=0.01)
  path = tmp_path / 'stacks.txt'
  hangs = threading.Event()

  def wait_for_what_never_comes():
    hangs.wait()

  thread = threading.Thread(target=wait_for_what_never_comes)
  with watch.watching(path):
    watch.enter_phase('update')
    watch.enter_phase('update')
    thread.start()
    runs.wait(
      lambda: path.exists() and 'wait_for_what_never_comes' in path.read_text()
    )
  hangs.set()
  thread.join()


def test_stacks_that_cannot_be_written_end_no_run(tmp_path, clock, caplog):
  watch = watchdog.Watchdog(clock=clock, least=1.0)
  _phases(watch, clock, update=1.0)
  watch.enter_phase('update')
  clock.return_value += 100.0
  (tmp_path / 'file').touch()
  watch.look(tmp_path / 'file' / 'host0.txt')
  assert 'the stacks cannot be written' in caplog.text
