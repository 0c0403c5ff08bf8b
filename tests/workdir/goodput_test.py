"""Every second of a run is in one phase, and what restarts cost is known."""

import json
from unittest import mock

import pytest

from stppo_jax.workdir import goodput
from stppo_jax.workdir import heartbeat


def test_seconds_are_accounted_for_line_by_line():
  clock, now = (mock.Mock(return_value=x) for x in (7.0, 1100.0))
  account = goodput.Goodput(
    beat=heartbeat.Beat(began=1000.0, restarts=2, lost_steps=3),
    productive=40.0,
    origin=3,
    clock=clock,
    now=now,
  )
  clock.return_value, now.return_value = 17.0, 1110.0
  line = {'timing_s/step': 6.0, 'timing_s/checkpoint': 1.0}
  assert account.measure(line) == {
    'timing_s/total': 10.0,
    'timing_s/other': 3.0,
    'goodput/fraction': pytest.approx(46 / 110),
    'goodput/wall_s': 110.0,
    'goodput/restarts': 2.0,
    'goodput/lost_steps': 3.0,
    'goodput/origin': 3.0,
  }
  clock.return_value, now.return_value = 21.0, 900.0  # the clock was set back
  metrics = account.measure({'timing_s/step': 4.0})
  assert metrics['timing_s/total'] == 4.0 and metrics['timing_s/other'] == 0.0
  assert metrics['goodput/fraction'] == 1.0


def test_only_steps_that_are_kept_are_productive(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  assert goodput.read(path, 9) == (0.0, 0)
  account = goodput.Goodput(beat=heartbeat.Beat(), productive=3.0, origin=3)
  lines = [{'step': 0, **account.measure({})}, {'step': 2, 'sft/loss': 1.0}]
  for n in range(1, 6):
    metrics = {'timing_s/step': 2.0**n}
    lines.append({'step': n, **metrics, **account.measure(metrics)})
  rest = '[1]\n{"step": 3, "timi'
  # Lines of the first steps may have been dropped to keep the file small.
  for kept in (lines, lines[-3:]):
    path.write_text('\n'.join(map(json.dumps, kept)) + '\n' + rest, 'utf-8')
    expected = pytest.approx(3 + 2 + 4 + 8)
    assert goodput.read(path, 3) == (expected, 5)
