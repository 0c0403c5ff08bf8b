"""docs/collapse.md has the numbers of the CSV files, and nothing else."""

from concurrent import futures
import functools
import re

import numpy as np
import pytest

from docs import make_collapse
from stppo_jax import exits
from stppo_jax.configs import alarms
from stppo_jax.tools.ablation import alarm_tables
from stppo_jax.tools.ablation import results
from stppo_jax.tools.ablation import statistics
from studies import bounds
from studies import dead_critic
from studies import forecast
from studies import narrow_bounds
from studies import sizes
from studies import steps_ahead

_STUDIES = make_collapse.studies()
_TEXT = make_collapse.PAGE.read_text(encoding='utf-8')
_WORDS = ' '.join(_TEXT.split())
_KNOWN = make_collapse.PAGE.with_name('known.md').read_text(encoding='utf-8')
_RATES = ('rate 0.00025', 'rate 0.00032', 'rate 0.0004')
_MAIN = 'turn_ppo - token_ppo'
_BOTH_RATIOS = f'{_MAIN}; st_ppo - turn_ppo; s_ppo - token_ppo'
# A study, the groups whose areas are averaged, and the pairs of arms.
_DIFFERENCES = [
  *(('levels', [rate], _MAIN) for rate in _RATES),
  ('levels', _RATES, 'st_ppo - turn_ppo; s_ppo - token_ppo'),
  ('controls', [''], 'KL stop - turn_ppo; 2 epochs - turn_ppo'),
  ('controls', [''], 'a third of the rate - turn_ppo'),
  ('turn_length', ['30 tokens'], _MAIN),
  ('turn_length', ['60 tokens'], _MAIN),
  ('calculator', [''], _MAIN),
  ('dead_critic', ['dead'], _MAIN),
  ('dead_critic', ['trained'], _BOTH_RATIOS),
  ('narrow_bounds', [''], 'turn 0.01 - token 0.2; turn 0.01 - turn 0.2'),
  ('narrow_bounds', [''], 'turn 0.01 - token 0.01'),
  ('real_text', [''], f'{_BOTH_RATIOS}; turn 0.01 - turn_ppo'),
  ('real_text', [''], 'turn_ppo - token, rate of turns'),
  ('real_text', [''], 'turn 0.01 - token, rate of turns'),
  ('sizes', ['170K'], f'{_MAIN}; turn 0.01 - token_ppo'),
  *(
    ('sizes', [x], f'{_MAIN}; turn 0.01 - token_ppo; turn 0.01 - turn_ppo')
    for x in ('2M', '10M')
  ),
  ('long_turns', ['30 tokens per turn'], _MAIN),
  ('long_turns', ['100 tokens per turn'], _MAIN),
  ('steps_ahead', [''], '1 ahead - 0 ahead; 2 ahead - 0 ahead'),
]


@functools.cache
def _runs(study):
  return results.read(make_collapse.TABLES / f'{study}.csv.gz')


@functools.cache
def _areas(study):
  return {(*run.key, run.seed): run.curve.area for run in _runs(study)}


def _at_first(runs, column, steps=5):
  """Returns the mean of a column over runs and their first steps."""
  return np.mean([run.per_step(column)[:steps] for run in runs])


def _made_up(group, arm, seed, area):
  """Returns a run with the same success in all of its steps."""
  columns = {name: np.zeros(4) for name in results.COLUMNS}
  return results.Run(
    group, arm, seed, '', columns | {'success': np.full(4, area)}
  )


def test_every_file_is_the_table_of_a_study():
  files = {
    path.name.removesuffix('.csv.gz')
    for path in make_collapse.TABLES.glob('*.csv.gz')
  }
  assert files <= set(_STUDIES)
  pictures = {path.name for path in make_collapse.TABLES.glob('*.png')}
  kinds = ('success', 'inside')
  assert pictures == {f'{name}_{kind}.png' for name in files for kind in kinds}


@pytest.mark.parametrize('name', _STUDIES)
def test_the_runs_of_a_file_are_those_of_its_study(name):
  study = _STUDIES[name]
  runs = _runs(name)
  digests = {run.key: run.settings for run in runs}
  assert set(digests) <= {arm.key for arm in study.arms}
  results.check(runs, digests, name)
  keys = [(*run.key, run.seed) for run in runs]
  assert len(set(keys)) == len(keys)
  for run in runs:
    success = run.per_step('success')
    assert np.all((success >= 0) & (success <= 1))
    # Only runs with groups of dialogues have an alarm about them.
    measured = ~np.isnan(run.per_step('alarm_zero_variance'))
    assert measured.all() if name == 'groups' else not measured.any()


def test_each_seed_has_a_larger_area_with_two_to_four_steps_of_staleness():
  # The tables have no differences between groups.
  areas = _areas('staleness')
  for (group, arm, seed), area in areas.items():
    if group in ('staleness 2', 'staleness 3', 'staleness 4'):
      assert area > areas['staleness 0', arm, seed]


def test_what_the_page_says_of_each_seed_of_the_length_of_turns():
  # The tables have means over seeds only.
  lengths = ('10 tokens', '30 tokens', '60 tokens')
  by_key = {(*run.key, run.seed): run for run in _runs('turn_length')}

  def at_first(column, length, arm, seed, steps=5):
    return _at_first([by_key[length, arm, seed]], column, steps)

  for seed in range(3):
    for token in ('token_ppo', 's_ppo'):
      short, middle, long = (
        at_first('clip_turn', length, token, seed) for length in lengths
      )
      assert short > middle > long
      for turn in ('turn_ppo', 'st_ppo'):
        for length in lengths:
          cut = [at_first('cut', length, arm, seed) for arm in (turn, token)]
          assert cut[0] > cut[1]
  token, s, turn, st = (
    np.mean([at_first('cut', lengths[2], arm, i, 1) for i in range(3)])
    for arm in ('token_ppo', 's_ppo', 'turn_ppo', 'st_ppo')
  )
  assert max(turn, st) < min(token, s)


@pytest.mark.parametrize(
  ('arm', 'mean', 'larger'),
  [
    ('minibatch, tau 1.5', -0.02, 3),
    ('microbatch, tau 1.5', 0.02, 3),
    ('sequence, tau 3', -0.15, 1),
  ],
)
def test_the_areas_of_the_seeds_that_played_no_part_in_the_choice(
  arm, mean, larger
):
  # The tables have the three seeds of the choice, too.
  areas = {x[-2:]: area for x, area in _areas('correction_seeds').items()}
  found = np.array(
    [areas[arm, seed] - areas['turn_ppo', seed] for seed in range(3, 8)]
  )
  assert found.mean() == pytest.approx(mean, abs=0.005)
  assert (found > 0).sum() == larger


def test_the_page_of_what_is_known_has_the_differences():
  for study, groups, pairs in _DIFFERENCES:
    areas = _areas(study)
    seeds = sorted({seed for group, _, seed in areas if group in groups})
    for pair in pairs.split('; '):
      both = [
        [
          np.mean([areas[group, arm, seed] for group in groups])
          for seed in seeds
        ]
        for arm in pair.split(' - ')
      ]
      found = statistics.difference(*both).estimate
      shown = f'{found.mean:+.2f} ({found.low:+.2f}..{found.high:+.2f})'
      assert shown in _KNOWN, (study, groups, pair)


def test_the_planned_comparisons_hold_but_for_the_third():
  assert {run.seed for run in _runs('narrow_bounds')} == set(range(8, 16))
  for study, values, said in (
    (narrow_bounds, '0.047 0.047 0.078 0.031', '.047, .047, .031'),
    (sizes, '0.031 0.031 0.875 0.031', '.031, .031'),
  ):
    name = study.__name__.removeprefix('studies.')
    rows = dead_critic.analysis(_runs(name), study.COMPARISONS)[1:]
    assert ' '.join(row[-1] for row in rows) == values
    assert f'(Holm: p = {said})' in _KNOWN
  assert re.search('[|] With 10 million weights .*Holm: p = .031[)]', _KNOWN)


@pytest.mark.parametrize(
  ('size', 'collapses'), [('2M', (5, 0, 0)), ('10M', (2, 1, 0))]
)
def test_what_the_page_says_of_larger_models(size, collapses):
  arms = [
    [run for run in _runs('sizes') if run.key == (size, arm)]
    for arm in ('token_ppo', 'turn_ppo', 'turn 0.01')
  ]
  collapsed = (sum(run.curve.collapsed for run in runs) for runs in arms)
  assert tuple(collapsed) == collapses
  token, turn, narrow = (f'{100 * _at_first(x, "cut"):.0f} %' for x in arms)
  assert {
    '2M': f'{narrow} of the tokens in the first five steps, where turn ratios '
    f'with .2 cut {turn} and token ratios {token}',
    '10M': f'with 10 million weights {narrow}, {turn} and {token}',
  }[size] in _WORDS
  token, turn, narrow = (f'{_at_first(x, "kl_old"):.2f}' for x in arms)
  assert f'KL {narrow} in place of {turn} and {token}' in _WORDS
  assert {
    '2M': f'KL {narrow}, and {turn} with .2 and {token} with token',
    '10M': f'KL {narrow}, and {token} with token',
  }[size] in _KNOWN
  (low, high), _, (least, most) = (
    (min(areas), max(areas))
    for areas in ([run.curve.area for run in runs] for runs in arms)
  )
  assert (
    f'areas are between {least:.2f} and {most:.2f}, and the areas of token '
    f'ratios between {low:.2f} and {high:.2f}'
  ) in _WORDS


def test_what_the_page_says_of_long_turns():
  arms = {}
  for run in _runs('long_turns'):
    arms.setdefault(run.key, []).append(run)
  for group, collapses in (
    ('100 tokens per turn', (4, 3)),
    ('100 tokens per token', (4, 4)),
    ('30 tokens per turn', (3, 0)),
    ('30 tokens per token', (4, 0)),
  ):
    for arm, count in zip(('token_ppo', 'turn_ppo'), collapses):
      assert sum(run.curve.collapsed for run in arms[group, arm]) == count
  turn, token, turn_alike, token_alike = (
    f'{_at_first(arms[f"30 tokens per {stress}", arm], "kl_old"):.2f}'
    for stress in ('turn', 'token')
    for arm in ('turn_ppo', 'token_ppo')
  )
  assert (
    f'KL of {turn} in place of {token} in the group per turn, and of '
    f'{turn_alike} in place of {token_alike} in the group per token'
  ) in _WORDS


def test_token_ratios_moved_further_on_real_questions():
  token, turn = (
    _at_first([run for run in _runs('real_text') if run.arm == arm], 'kl_old')
    for arm in ('token_ppo', 'turn_ppo')
  )
  assert f'KL {token:.2f} and {turn:.2f}' in _KNOWN


def test_what_the_page_says_of_39_million_weights():
  runs = _runs('gpu')
  after = {'turn': [], 'token': []}
  for run in runs:
    level = 'turn' if run.arm in ('turn_ppo', 'st_ppo') else 'token'
    after[level].append(run.per_step('success')[9])
  for level, words in (('turn', 'with turn'), ('token', 'with token')):
    low, high = min(after[level]), max(after[level])
    assert f'{low:.2f} to {high:.2f} {words} ratios' in _WORDS
  explained = [float(run.per_step('explained_variance')[7]) for run in runs]
  shown = f'critic explains {min(explained):.2f} to {max(explained):.2f}'
  assert shown in _WORDS
  assert sum(run.curve.collapsed for run in runs) == 7
  assert 'seven of eight runs collapse' in _WORDS


def test_how_many_more_steps_a_run_ahead_takes():
  rows = {
    row[0]: row for row in steps_ahead.beyond_the_lag(_runs('steps_ahead'))
  }
  one, two = rows['1 ahead'], rows['2 ahead']
  assert (one[2], two[2]) == ('-0.011', '-0.031')
  assert one[6:] == ['+12%', '+6%..+17%', '+4%', '-2%..+10%']
  assert two[6:] == ['+26%', '+9%..+53%', '+10%', '-7%..+37%']
  shown = (
    'it takes 12 % more steps (6 to 17) with one step ahead and 26 % more '
    '(9 to 53) with two; without the lag, '
  )
  assert f'{shown}4 % (-2 to 10) and 10 % (-7 to 37)' in _KNOWN
  # The mean of five steps reaches .9 with the last of 1, 1, 1, 1, 1.
  assert steps_ahead.steps_to(np.array([0, 0, 1, 1, 1, 1, 1])) == 7
  with pytest.raises(ValueError, match='mean of 0.9'):
    steps_ahead.steps_to(np.array([0, 0, 1, 1, 1, 1]))


def test_p_values_are_corrected_for_how_many_there_are():
  # Holm: 3 x .01, then 2 x .03, which .04 may not fall below.
  corrected = dead_critic.holm([0.01, 0.04, 0.03])
  np.testing.assert_allclose(corrected, [0.03, 0.06, 0.06])


def test_arms_without_a_group_are_compared_by_their_names():
  arms = sorted({arm for arms in bounds.COMPARISONS.values() for arm in arms})
  runs = [
    _made_up('', arm, seed, n / 8)
    for n, arm in enumerate(arms)
    for seed in range(3)
  ]
  rows = dead_critic.analysis(runs, bounds.COMPARISONS)
  # In this order their areas rise by 1/8 from one to the next.
  assert arms[1:] == ['turn 0.004', 'turn 0.1', 'turn 0.2', 'turn by_length']
  assert [row[2] for row in rows[1:3]] == ['-0.125', '+0.125']


def test_a_comparison_has_its_own_seeds_and_missing_ones_count():
  runs = [
    _made_up('', arm, seed, area)
    for arm, area, seeds in (('a', 0.5, 8), ('b', 0.4, 8), ('c', 0.3, 2))
    for seed in range(seeds)
  ]
  compared = {'1': ['a', 'b'], '2': ['a', 'c'], '3': ['d', 'a']}
  one, two = dead_critic.analysis(runs, compared)[1:]
  assert (one[:3], two[:3]) == (['1', '8', '+0.100'], ['2', '2', '+0.200'])
  # Holm: 3 x 2/2^8 for the first, as if the third had been made.
  assert one[-1] == '0.023'


def test_the_last_comparison_is_what_the_critic_takes_from_the_turn_ratio():
  areas = {'trained turn_ppo': 0.5, 'trained token_ppo': 0.4}
  areas |= {'dead turn_ppo': 0.9, 'dead token_ppo': 0.2}
  areas |= {'trained st_ppo': 0.5, 'trained s_ppo': 0.4}
  runs = [
    _made_up(*name.split(), seed, area)
    for name, area in areas.items()
    for seed in range(3)
  ]
  rows = {row[0]: row[2] for row in dead_critic.analysis(runs)}
  assert rows['1 trained: turn - token'] == '+0.100'
  assert rows['4 dead: turn - token'] == '+0.700'
  assert rows['6 (1) - (4)'] == '-0.600'


def test_a_metric_that_rises_before_each_collapse_forecasts_it():
  healthy = np.full(40, 0.8)
  collapsed = np.where(np.arange(40) < 25, 0.8, 0.0)
  rising = np.where((np.arange(40) > 12) & (collapsed > 0), 1.0, 0.0)
  rng = np.random.default_rng(0)
  studies = {}
  for study in 'abc':
    studies[study] = []
    for seed in range(8):
      columns = {name: rng.uniform(size=41) for name in results.COLUMNS}
      success, cut = (collapsed, rising) if seed % 2 else (healthy, 0 * healthy)
      for name, values in (('success', success), ('cut', cut)):
        columns[name] = np.concatenate([[np.nan], values])
      studies[study].append(results.Run(study, 'x', seed, '', columns))
  rows = {row[0]: row[1:] for row in forecast.table(studies)}
  precision, recall, lead, false_alarms, area = rows['cut']
  assert (precision, recall, false_alarms) == ('1.00', '1.00', '0/12')
  # It rises at step 14, and the mean of five is below half at step 28.
  assert int(lead) >= forecast.LEAD and float(area.split()[0]) > 0.9
  assert float(rows['entropy, large'][0]) < 0.8


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_files():
  """A table that is changed by hand is found, too."""
  changed = _TEXT.replace('have been made', 'are there', 1)
  assert changed != _TEXT
  assert make_collapse.page(changed) == _TEXT, 'run `make docs`'
  with pytest.raises(ValueError, match='one block of study levels'):
    make_collapse.page(_TEXT.replace('<!-- study levels -->', ''))


def test_a_command_reuses_runs_of_study_1_where_it_has_some():
  for name in _STUDIES:
    (block,) = re.findall(f'<!-- study {name} -->(.*?)<!--', _TEXT, re.DOTALL)
    found = re.search(r'; (\d+) of them are in study 1', block)
    assert ('--reuse=' in block) == (found is not None)
    shared = {'turn_length': 12, 'correction': 21, 'correction_seeds': 16}
    shared |= {'controls': 9, 'staleness': 12}
    assert found is None or int(found[1]) == shared[name]


@pytest.mark.parametrize('every', [6, pytest.param(1, marks=pytest.mark.slow)])
def test_alarms_computed_from_a_table_are_those_that_runs_recorded(every):
  default = {name: alarms.section()[name] for name in alarm_tables.MEASURED}
  # A table keeps five digits, so a number that equals the threshold may have
  # been on either side of it.
  one_side, other_side = (
    {name: factor * x for name, x in default.items()}
    for factor in (1 - 1e-5, 1 + 1e-5)
  )
  for name in _STUDIES:
    for run in _runs(name)[::every]:
      recorded = alarm_tables.of_table(run)
      one = alarm_tables.of_table(run, one_side)
      other = alarm_tables.of_table(run, other_side)
      assert one.curve == other.curve == recorded.curve
      assert one.counts == other.counts == recorded.counts
      for name, steps in recorded.steps.items():
        either = set(one.steps[name]), set(other.steps[name])
        assert set.intersection(*either) <= set(steps) <= set.union(*either)


@pytest.mark.parametrize('ending', ['csv', 'csv.gz'])
def test_a_table_is_read_as_it_was_written(ending, tmp_path):
  values = np.array([np.nan, 0.25, 1 / 3, np.inf, 1e-12])
  columns = {name: results.rounded(values) for name in results.COLUMNS}
  run = results.Run('a, b', 'st_ppo', 7, 'x', columns)
  path = tmp_path / f'table.{ending}'
  results.write(path, [run])
  (found,) = results.read(path)
  assert (*found.key, found.seed, found.settings) == ('a, b', 'st_ppo', 7, 'x')
  expected = [np.nan, 0.25, 0.33333, np.nan, 1e-12]
  for column in found.columns.values():
    np.testing.assert_array_equal(column, expected)
  if ending == 'csv.gz':
    path.write_bytes(path.read_bytes()[:-9])  # its end is missing
    with pytest.raises(exits.Misconfigured, match='not a table of ablate'):
      results.read(path)
    return
  # One line is missing: the run is damaged.
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(''.join([*lines[:3], *lines[4:]]))
  with pytest.raises(exits.Misconfigured, match='table.csv, line 4: damaged'):
    results.read(path)
  # A file with fewer columns is that of an earlier version.
  path.write_text('group,arm,seed,settings,step,success\n,a,0,x,0,\n')
  (old,) = results.read(path)
  assert set(old.columns) == set(results.COLUMNS)


def test_no_run_is_lost_where_several_add_to_a_table(tmp_path):
  path = tmp_path / 'table.csv'
  columns = {name: np.array([np.nan, 0.5]) for name in results.COLUMNS}
  digests = {('', name): 'x' for name in 'abcd'}

  def add(name):
    for seed in range(6):
      run = results.Run('', name, seed, 'x', columns)
      results.add(path, [run], digests)
      results.add(path, [run], digests)  # it is there by now

  with futures.ThreadPoolExecutor() as pool:
    list(pool.map(add, 'abcd'))
  found = [(run.seed, run.arm) for run in results.read(path)]
  assert found == [(seed, name) for seed in range(6) for name in 'abcd']
  assert [x.name for x in tmp_path.iterdir()] == ['table.csv']
