"""`alarms` says how long before a collapse each alarm rang."""

import json

import numpy as np
import pytest

from benchmarks import made_runs
from stppo_jax import __main__
from stppo_jax.tools import success_curve
from stppo_jax.tools.ablation import results
from tests.training import runs


@pytest.fixture(scope='module')
def study(tmp_path_factory):
  """A folder of two runs, of which one collapses."""
  folder = tmp_path_factory.mktemp('study')
  for name, collapses in (('healthy', False), ('fallen', True)):
    made_runs.make(folder / name, steps=30, dialogues=0, collapses=collapses)
  # A supervised start, as ablate makes it beside the runs.
  start = made_runs.make(folder / 'start-x', steps=3, dialogues=0)
  identity = json.loads((start / 'run.json').read_text())
  (start / 'run.json').write_text(json.dumps(identity | {'command': 'sft'}))
  return folder


def _alarms(capsys, *words):
  """Returns what is printed, and rows of the table by name."""
  assert __main__.main(['alarms', *map(str, words)]) == 0
  out, err = capsys.readouterr()
  assert not err
  rows = [line.split() for line in out.splitlines() if line.split()]
  return out, {row[0]: row[1:] for row in rows}


def test_the_steps_between_an_alarm_and_the_collapse(study, capsys):
  lines = runs.metrics(study / 'fallen')[1:]
  reward = [line['critic/score/mean'] for line in lines]
  end = success_curve.curve(np.array(reward)).collapsed_at
  kls = [line['critic/kl'] for line in lines]
  limit = sorted(kls)[len(kls) // 2]
  first = next(n for n, x in enumerate(kls, start=1) if x > limit)
  others = [line['critic/kl'] for line in runs.metrics(study / 'healthy')[1:]]
  above = sum(x > limit for x in others)
  out, rows = _alarms(capsys, study, f'--kl={limit!r}')
  assert out.startswith('2 runs, 1 collapsed\n')
  expected = ['1/1', f'{end - first:.0f}'] if first <= end else ['0/1']
  assert rows['kl'] == [
    *expected,
    f'{int(above > 0)}/1',
    f'{above / len(others):.0%}',
  ]
  # A threshold that is never passed.
  out, rows = _alarms(capsys, study / 'fallen', '--kl=inf')
  assert rows['kl'] == ['0/1', '0/0']
  assert out.startswith('1 run, 1 collapsed\n')


def test_thresholds_are_tried_on_the_table_of_a_study(study, tmp_path, capsys):
  path = tmp_path / 'table.csv'
  results.write(
    path,
    [
      results.from_folder(study / name, ('', name), 0, digest=name)
      for name in ('healthy', 'fallen')
    ],
  )
  flags = ['--kl=0.02', '--explained_variance=0.3', '--entropy=0.5']
  _, expected = _alarms(capsys, study, *flags)
  _, rows = _alarms(capsys, path, *flags)
  for name in ('kl', 'explained_variance', 'entropy'):
    assert rows[name] == expected[name]
  # A copy of a run counts once.
  assert _alarms(capsys, path, path, *flags)[1] == rows
