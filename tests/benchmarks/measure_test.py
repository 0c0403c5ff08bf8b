"""Timing: rounds, quotients, and the verdict on a busy machine."""

import os
import re

import numpy as np
import pytest

from benchmarks import measure


def test_rounds_alternate_and_only_run_is_repeated():
  called = []

  def prepare():
    called.append('prepare')
    return 'argument'

  def consume(argument):
    assert argument == 'argument'
    called.append('consume')

  cases = {
    'one': measure.Case(consume, prepare),
    'two': measure.Case(lambda: called.append('two')),
  }
  seconds = measure.interleave(cases, repeats=7)
  assert {name: len(x) for name, x in seconds.items()} == {'one': 7, 'two': 7}
  assert all((x > 0).all() for x in seconds.values())
  # One preparation for each call, right before it.
  prepared = ' '.join(called).replace('prepare consume', 'one')
  assert 'prepare' not in prepared and 'consume' not in prepared
  # one, two, two, one, one, ...: in order, then in the opposite order.
  order = re.sub(r'(two )+', 'two ', f'{prepared} ')
  assert order.startswith('one one two one two one one two ')


def test_quotients_are_formed_within_a_round():
  below = np.array([1.0, 10.0, 1.0, 2.0, 1.0])
  quotient = measure.quotient(3 * below, below)
  assert quotient == (3, 3, 3, 3)
  # Of the shortest samples, whichever rounds they are of.
  quotient = measure.quotient(np.array([4.0, 2.0, 4.0]), np.array([1.0, 1, 2]))
  assert quotient == (2, 2, 3, 2)
  assert str(quotient) == '2.000 (2.000-3.000)'
  assert measure.milliseconds(np.array([0.002, 0.001, 0.004])) == (
    '2.00 (1.00-4.00)'
  )


def test_a_busy_machine_is_reported():
  calm, one_late = np.array([1, 1.1, 1.2, 1.1]), np.array([1, 1, 1, 1, 9])
  assert measure.verdict({'a': calm, 'b': one_late}) == 'undisturbed'
  busy = np.array([1, 1, 5, 9])
  verdict = measure.verdict({'a': calm, ('b', 'c'): busy, 'd': busy})
  assert verdict.startswith('NOT A RESULT') and verdict.endswith('for b c, d')


def test_cores_are_bound(monkeypatch):
  bound = []
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {2, 0, 5})
  monkeypatch.setattr(
    os, 'sched_setaffinity', lambda pid, cores: bound.append(list(cores))
  )
  parser = measure.parser('name', rows=7)
  assert vars(measure.start(parser, [])) == {'rows': 7, 'cores': 3}
  assert not bound
  flags = measure.start(parser, ['--cores=2', '--rows=5'])
  assert vars(flags) == {'rows': 5, 'cores': 2}
  assert bound == [[2, 5]]


def test_too_few_repeats_are_refused_before_anything_is_made(capsys):
  parser = measure.parser('name', repeats=measure.MIN_REPEATS)
  few = measure.MIN_REPEATS - 1
  with pytest.raises(SystemExit) as end:
    measure.start(parser, [f'--repeats={few}'])
  assert end.value.code == 2
  assert f'--repeats={few}: must be' in capsys.readouterr().err
