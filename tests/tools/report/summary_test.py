"""Every number of the tables, computed a second time from metrics.jsonl."""

import json

import numpy as np
import pytest

from benchmarks import made_runs
from stppo_jax.tools.report import comparison
from stppo_jax.tools.report import page
from stppo_jax.tools.report import run_files
from stppo_jax.tools.report import summary
from tests.training import runs


@pytest.fixture(scope='module')
def contents(made):
  return page.contents(comparison.group([run_files.read(str(f)) for f in made]))


def _column(folder, name):
  """Returns the steps and the values of a metric."""
  pairs = [
    (line['step'], line[name]) for line in runs.metrics(folder) if name in line
  ]
  return np.array(pairs).T if pairs else np.zeros((2, 0))


def _scores(folder):
  steps, one = _column(folder, 'val/em/one_hop')
  _, two = _column(folder, 'val/em/two_hop')
  return steps, (one + two) / 2


def _collapse(folder):
  steps, rewards = _column(folder, 'critic/score/mean')
  means = np.lib.stride_tricks.sliding_window_view(rewards, 5).mean(axis=1)
  low = means < means.max() / 2
  after = np.arange(len(means)) > means.argmax()
  # From where on all that follow are low: at least five.
  stays = np.logical_and.accumulate((low & after)[::-1])[::-1]
  return float(steps[4 + stays.argmax()]) if stays.sum() >= 5 else None


def _mean_of_ten(name):
  return lambda folder: _column(folder, name)[1][-10:].mean()


def _level(folder):
  values = json.loads((folder / 'config.json').read_text('utf-8'))
  return values['algorithm']['ratio']['level']


_EXPECTED = {
  'steps done': lambda f: 30,
  'last evaluation': lambda f: _scores(f)[1][-1],
  'best evaluation': lambda f: _scores(f)[1].max(),
  'best at step': lambda f: _scores(f)[0][_scores(f)[1].argmax()],
  'last reward': _mean_of_ten('critic/score/mean'),
  'collapsed at step': _collapse,
  'clipped tokens': _mean_of_ten('actor/pg_clipfrac'),
  'most clipped tokens': lambda f: _column(f, 'actor/pg_clipfrac')[1].max(),
  'largest ratio': lambda f: _column(f, f'ratio/{_level(f)}/max')[1].max(),
  'correction triggered': lambda f: (_column(f, 'stab/scale')[1] < 1).mean(),
  'last entropy': _mean_of_ten('actor/entropy'),
  'last KL to the reference': _mean_of_ten('critic/kl'),
  'last explained variance': _mean_of_ten('critic/vf_explained_var'),
  'seconds per step': lambda f: np.median(
    [
      max(line['timing_s/step'] - line.get('timing_s/compile', 0), 0)
      + line.get('timing_s/checkpoint', 0)
      for line in runs.metrics(f)
      if line['step']
    ]
  ),
  'hours': lambda f: (
    (
      _column(f, 'timing_s/step')[1].sum()
      + _column(f, 'timing_s/checkpoint')[1].sum()
    )
    / 3600
  ),
  'goodput': lambda f: _column(f, 'goodput/fraction')[1][-1],
  'steps made again': lambda f: _column(f, 'goodput/lost_steps')[1][-1],
}


def test_the_summary(contents, made):
  assert [row['name'] for row in contents['summary']] == list(_EXPECTED)
  for row in contents['summary']:
    values = [_EXPECTED[row['name']](folder) for folder in made]
    assert row['runs'] == [
      None if value is None else pytest.approx(value) for value in values
    ], row['name']
    for spread, seeds in zip(row['groups'], (values[:2], values[2:])):
      seeds = [value for value in seeds if value is not None]
      if not seeds:
        assert spread is None
        continue
      expected = {'mean': np.mean(seeds), 'count': len(seeds)}
      expected |= {'min': min(seeds), 'max': max(seeds)}
      assert spread == pytest.approx(expected)


def test_the_evaluation_table(contents, made):
  names = [row['name'] for row in contents['evaluation']]
  assert names == ['val/em/one_hop', 'val/em/two_hop']
  for row in contents['evaluation']:
    columns = [_column(folder, row['name'])[1] for folder in made]
    for kind, value in (('last', lambda c: c[-1]), ('best', np.max)):
      for spread, seeds in zip(row[kind], (columns[:2], columns[2:])):
        values = [value(column) for column in seeds]
        assert spread['mean'] == pytest.approx(np.mean(values))
        assert (spread['min'], spread['max']) == (min(values), max(values))


def test_clipping_by_turn_and_time_by_phase(contents, made):
  tables = contents['by_turn'], contents['phases']
  for folder, by_turn, phases in zip(made, *tables):
    assert sorted(by_turn) == ['sequence', 'token', 'turn']
    for level, rows in by_turn.items():
      assert [turn for turn, *_ in rows] == [1, 2]
      for turn, share, tokens in rows:
        shares = sum(
          _column(folder, f'clipfrac/{level}/{side}/turn_{turn}')[1]
          for side in ('low', 'high')
        )
        counts = _column(folder, f'turn_length/tokens/turn_{turn}')[1]
        assert tokens == counts.sum() > 0
        assert share == pytest.approx(np.average(shares, weights=counts))
    names = 'wait annotate update token_details checkpoint other'.split()
    assert phases == pytest.approx(
      {name: _column(folder, f'timing_s/{name}')[1].sum() for name in names}
    )


def test_alarms(contents, made):
  for run, folder in enumerate(made):
    found = {
      alarm['name']: (alarm['steps'], alarm['worst'])
      for alarm in contents['alarms']
      if alarm['run'] == run
    }
    expected = {}
    for name in ('alarm/entropy', 'update/skipped'):
      steps, values = _column(folder, name)
      expected[name] = (steps[values > 0].tolist(), values.max())
    assert found == expected


def test_numbers_that_are_not_finite_are_alarms(tmp_path):
  folder = made_runs.make(tmp_path / 'run', dialogues=0)
  lines = runs.metrics(folder)
  for line in lines[3:5]:
    line['ratio/turn/max'] = None
    line['writer/non_finite'] = {'ratio/turn/max': 'inf'}
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (folder / 'metrics.jsonl').write_text(text)
  run = run_files.read(str(folder))
  alarm = summary.alarms([run])[-1]
  found = alarm.name, alarm.steps, alarm.worst
  assert found == ('not finite: ratio/turn/max', [3, 4], None)
  assert page.metrics(run)['columns']['ratio/turn/max'][2:6].count(None) == 2


def test_shares_outside_the_bounds_are_sums_of_both_sides(made):
  columns = page.metrics(run_files.read(str(made[0])))['columns']
  low = columns['clipfrac/turn/low/turn_2'][1:]
  high = columns['clipfrac/turn/high/turn_2'][1:]
  assert columns['outside/turn/turn_2'][1:] == pytest.approx(
    np.add(low, high).tolist(), rel=1e-5
  )
