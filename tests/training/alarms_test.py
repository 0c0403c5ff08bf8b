"""Each alarm rings beyond its threshold, and nowhere else.

Alarms are told as they begin and end, and end a run that names them.
"""

import math

import pytest

from stppo_jax import __main__
from stppo_jax import types
from stppo_jax.configs import alarms as defaults
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.retrieval import server
from stppo_jax.training import alarms
from tests.training import runs
from tests.workdir import two_hosts

_THRESHOLDS = {name: defaults.section()[name] for name in defaults.THRESHOLDS}
# Metrics of a healthy step, as the quickstart has them at its end.
_HEALTHY = {
  'rollout/policy_tokens': 4000.0,
  'rollout/repeated_tokens': 12.0,
  'actor/entropy': 0.077,
  'ratio/turn/max': 1.82,
  'rollout/zero_variance_groups': 0.7,
  'critic/vf_explained_var': -0.04,
  'retrieval/answers': 151.0,
  'retrieval/empty': 30.0,
  'env/finish_ratio': 0.93,
  'env/number_of_valid_search': 1.16,
  'critic/kl': 0.53,
  'rollout/valid_fraction': 1.0,
}


def test_a_healthy_step_is_silent():
  rings = alarms.check(_HEALTHY, _THRESHOLDS)
  assert rings == dict.fromkeys(alarms.ALARMS, False)


@pytest.mark.parametrize(
  ('name', 'metric', 'number', 'shown'),
  [
    ('repetition', 'rollout/repeated_tokens', 3000.0, '0.75, above'),
    ('entropy', 'actor/entropy', 0.009, '0.009, below'),
    ('turn_ratio', 'ratio/turn/max', 263.0, '263, above'),
    ('zero_variance', 'rollout/zero_variance_groups', 0.95, '0.95, above'),
    ('explained_variance', 'critic/vf_explained_var', -2.0, '-2, below'),
    ('empty_answers', 'retrieval/empty', 151.0, '1, above'),
    ('finish_ratio', 'env/finish_ratio', 0.1, '0.1, below'),
    ('search_rate', 'env/number_of_valid_search', 0.0, '0, below'),
    ('kl', 'critic/kl', 1.5, '1.5, above'),
    ('infrastructure', 'rollout/valid_fraction', 0.9, '0.1, above'),
  ],
)
def test_an_alarm_rings_beyond_its_threshold(name, metric, number, shown):
  sick = _HEALTHY | {metric: number}
  expected = {other: other == name for other in alarms.ALARMS}
  assert alarms.check(sick, _THRESHOLDS) == expected
  line = alarms.describe(name, sick)
  assert line.startswith(f'{name}: ') and metric in line and shown in line
  limit = -math.inf if 'below' in shown else math.inf
  assert not any(alarms.check(sick, _THRESHOLDS | {name: limit}).values())


def test_an_alarm_without_its_number_is_absent():
  """It may not be measured, not be finite (null in a file), or say nothing."""
  few = {'retrieval/answers': 9.0, 'retrieval/empty': 9.0}
  for metrics in ({}, few, {'actor/entropy': None}, {'critic/kl': math.nan}):
    assert alarms.check(metrics, _THRESHOLDS) == {}


def _silent(count):
  return {'retrieval/answers': 20.0, 'retrieval/empty': float(count)}


def _steps(watch, *counts):
  """Returns the metric of each step."""
  rings = []
  for step, count in enumerate(counts, 1):
    rings.append(watch.measure(_silent(count))['alarm/empty_answers'])
    watch.check(step)
  return rings


def test_an_alarm_is_told_when_it_begins_and_when_it_is_over(said):
  watch = alarms.Alarms(runs.config(), hosts_lib.ALONE)
  rings = _steps(watch, 3, 20, 20, 3, 20, 3, 3, 3, 3, 3, 20)
  assert rings == [0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1]
  assert [line.split(': ')[:2] for line in said] == [
    ['step 2', 'ALARM empty_answers'],
    ['step 10', 'alarm empty_answers'],
    ['step 11', 'ALARM empty_answers'],
  ]


def test_a_retriever_that_never_finds_anything_ends_the_run():
  watch = alarms.Alarms(runs.config(), hosts_lib.ALONE)
  _steps(watch, 20, 20, 20, 20, 3, 20, 20, 20, 20)
  with pytest.raises(alarms.Alarmed, match='step 1: alarm empty_answers'):
    _steps(watch, 20)


@pytest.mark.slow
def test_a_run_whose_retriever_never_finds_anything_ends(tmp_path, capsys):
  """The policy is that of the quickstart, which searches from the beginning."""
  strange = types.Passage('0', 'zqx', 'zqx')  # no query has this word
  served = server.embedded([strange], world_passages=lambda world: [strange])
  with served:
    code = runs.train(
      tmp_path,
      num_steps=9,
      model__path=runs.REPO / 'assets' / 'quickstart',
      retrieval__url=served.url,
      evaluate__every=0,
      checkpoint__every=99,
      alarms__stop_after=2,
    )
  assert code == 76
  output, errors = capsys.readouterr()
  assert 'step 1: ALARM empty_answers' in output
  assert 'step 2: alarm empty_answers' in errors
  for line in runs.metrics(tmp_path):
    assert line['retrieval/empty'] == line['retrieval/answers'] >= 10
    assert line['retrieval/failures'] == 0
  assert (tmp_path / 'checkpoints' / '2').is_dir()


def test_all_hosts_end_with_the_first_one(said):
  watch = alarms.Alarms(runs.config(), two_hosts.TwoHosts(1, alarms=[]))
  _steps(watch, *[20] * 9)
  assert not said
  told = alarms.Alarms(runs.config(), two_hosts.TwoHosts(1, alarms=['kl']))
  with pytest.raises(alarms.Alarmed, match='alarm kl'):
    _steps(told, 3)


@pytest.mark.slow
def test_an_alarm_saves_and_ends_a_run_and_is_in_its_files(tmp_path, capsys):
  changes = {
    'evaluate__every': 0,
    'checkpoint__every': 99,
    'alarms__entropy': 99.0,
    'alarms__stop_after': 2,
  }
  stop = "('entropy',)"
  assert runs.train(tmp_path, alarms__stop=stop, **changes) == 76
  output, errors = capsys.readouterr()
  assert 'step 1: ALARM entropy' in output
  assert 'step 2: alarm entropy' in errors
  lines = runs.metrics(tmp_path)
  assert [line['alarm/entropy'] for line in lines] == [1, 1]
  assert {line['alarm/kl'] for line in lines} == {0}
  assert lines[0]['rollout/policy_tokens'] > 0
  assert (tmp_path / 'checkpoints' / '2').is_dir()
  assert __main__.main(['status', str(tmp_path)]) == 0
  shown = capsys.readouterr().out
  assert 'step 2: alarm entropy: the entropy' in shown and 'failed' in shown
  assert runs.train(tmp_path, alarms__stop='()', **changes) == 0
  assert len(runs.metrics(tmp_path)) == 3
