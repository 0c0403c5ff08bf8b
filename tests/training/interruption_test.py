"""Signals are requests: they end what may be dropped, and nothing else."""

import os
import signal

import pytest

from stppo_jax.training import interruption

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


def _send(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', _CODES)
def test_work_that_may_be_dropped_ends_at_once(number):
  with interruption.Interruption() as interrupt:
    with pytest.raises(interruption.Interrupted):
      with interrupt.abandonable():
        _send(number)
        pytest.fail('went on')
    assert interrupt.exit_code == _CODES[number]


@pytest.mark.parametrize('number', _CODES)
def test_work_that_may_not_is_finished_first(number):
  with interruption.Interruption() as interrupt:
    with interrupt.abandonable():
      pass
    _send(number)
    finished = True
    with pytest.raises(interruption.Interrupted):
      with interrupt.abandonable():
        pytest.fail('began')
  assert finished and interrupt.exit_code == _CODES[number]


@pytest.mark.parametrize('first', _CODES)
def test_the_second_signal_is_the_end(first):
  with interruption.Interruption() as interrupt:
    _send(first)
    with pytest.raises(SystemExit) as caught:
      _send(signal.SIGTERM)
    assert caught.value.code == 75
    with pytest.raises(KeyboardInterrupt):
      _send(signal.SIGINT)
    assert interrupt.exit_code == _CODES[first]


def test_handlers_are_given_back():
  before = [signal.getsignal(number) for number in _CODES]
  with interruption.Interruption():
    inside = [signal.getsignal(number) for number in _CODES]
    assert all(a is not b for a, b in zip(before, inside))
  assert [signal.getsignal(number) for number in _CODES] == before
  with pytest.raises(KeyboardInterrupt):
    _send(signal.SIGINT)


def test_an_interruption_is_not_an_error_to_be_handled():
  assert not issubclass(interruption.Interrupted, Exception)
