"""The first signal asks a process to end, and a second one ends it."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from stppo_jax import interruption
from tests.training import runs

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 75}


def _send(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', _CODES)
def test_what_can_be_abandoned_ends_at_a_signal_and_the_rest_after_it(number):
  for is_abandoned in (True, False):
    with interruption.Interruption() as interrupt:
      with interrupt.interruptible():
        pass
      if not is_abandoned:
        _send(number)
      finished = True
      with pytest.raises(interruption.Interrupted) as caught:
        with interrupt.interruptible():
          if is_abandoned:
            _send(number)
          pytest.fail('went on')
      assert finished
      assert caught.value.exit_code == interrupt.exit_code == _CODES[number]


@pytest.mark.parametrize('number', _CODES)
def test_a_part_is_done_as_a_whole_or_not_at_all(number):
  done = []
  with interruption.Interruption() as interrupt:
    with pytest.raises(interruption.Interrupted) as caught:
      with interrupt.interruptible():
        with interrupt.postponed():
          _send(number)
          done.append('all')
        pytest.fail('went on')
    assert caught.value.exit_code == _CODES[number]
    with pytest.raises(interruption.Interrupted):
      with interrupt.postponed():
        done.append('more')
  assert done == ['all']


# A process that computes for minutes, and reaches no Python code meanwhile.
_BUSY = """
import hashlib
from stppo_jax import interruption
with interruption.Interruption() as interrupt:
  interrupt.outlook = 'saving step 3'
  print('ready', flush=True)
  hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)
"""


def _busy(*before, program=_BUSY):
  process = subprocess.Popen(
    [*before, sys.executable, '-c', program],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=runs.REPO,
  )
  assert process.stdout.readline() == 'ready\n'
  return process


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_at_once_and_a_second_one_ends(number):
  process = _busy()
  process.send_signal(number)
  assert f'{number.name}: saving step 3; ' in process.stderr.readline()
  process.send_signal(number)
  _, err = process.communicate(timeout=60)
  assert err.startswith('abandoned')
  assert process.returncode == _CODES[number]


# One that may end without its main thread, from the second time it is asked.
_RESCUED = """
answers = [False, True]
def force_exit(exit_code, *, answered):
  print('asked', exit_code, answered, flush=True)
  return answers.pop(0)
"""


@pytest.mark.slow
def test_a_process_that_reacts_to_nothing_ends_without_its_main_thread():
  """A process that compiles a program reacts to nothing."""
  ready = "  print('ready'"
  program = _BUSY.replace(
    ready, f'  interrupt.force_exit = force_exit\n{ready}'
  )
  process = _busy(program=_RESCUED + program)
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=60)
  assert out.count('asked 75 ') == 2
  assert err.startswith('SIGTERM: saving step 3; ')
  assert process.returncode == 75


def test_a_hangup_counts_once_and_nohup_ignores_it():
  for before, reported in (((), True), (('nohup',), False)):
    process = _busy(*before)
    process.send_signal(signal.SIGHUP)
    if reported:
      assert process.stderr.readline().startswith('SIGHUP: saving step 3')
      process.send_signal(signal.SIGHUP)  # as terminals and shells do
    process.send_signal(signal.SIGTERM)
    first = process.stderr.readline()
    assert first.startswith('abandoned' if reported else 'SIGTERM: saving')
    process.kill()
    process.communicate()


def test_what_the_body_makes_of_an_interrupt_does_not_matter():
  with interruption.Interruption() as interrupt:
    with pytest.raises(interruption.Interrupted):
      with interrupt.interruptible():
        with contextlib.suppress(interruption.Interrupted):  # as C code does
          _send(signal.SIGTERM)
  with interruption.Interruption() as interrupt:
    with pytest.raises(interruption.Interrupted):
      with interrupt.interruptible():
        try:
          _send(signal.SIGTERM)
        except interruption.Interrupted as error:
          raise ImportError from error


def test_signal_handlers_are_restored():
  before = [signal.getsignal(number) for number in _CODES]
  with interruption.Interruption():
    inside = [signal.getsignal(number) for number in _CODES]
    assert all(a is not b for a, b in zip(before, inside))
  assert [signal.getsignal(number) for number in _CODES] == before


def test_a_request_that_comes_too_late_ends_nothing_else():
  with interruption.Interruption() as outer:
    with outer.interruptible():
      with interruption.Interruption() as inner:
        pass
      inner.request()
      finished = True
  assert finished and outer.exit_code is None
