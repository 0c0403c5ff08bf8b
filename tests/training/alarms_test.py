"""Each alarm rings beyond its threshold, and nowhere else."""

import math

import pytest

from stppo_jax.configs import alarms as defaults
from stppo_jax.training import alarms

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


def test_every_alarm_has_a_threshold_and_one_sentence_of_advice():
  assert list(alarms.ALARMS) == list(_THRESHOLDS)
  for alarm in alarms.ALARMS.values():
    assert alarm.advice.endswith('.') and alarm.advice.count('. ') == 0


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
  assert line.startswith(f'{name}: ')
  assert f'({metric}) is {shown} alarms.{name}; ' in line
  limit = -math.inf if 'below' in shown else math.inf
  assert not any(alarms.check(sick, _THRESHOLDS | {name: limit}).values())


def test_an_alarm_without_its_number_is_absent():
  """It may not be measured, not be finite (null in a file), or say nothing."""
  few = {'retrieval/answers': 9.0, 'retrieval/empty': 9.0}
  for metrics in ({}, few, {'actor/entropy': None}, {'critic/kl': math.nan}):
    assert alarms.check(metrics, _THRESHOLDS) == {}


def test_the_alarms_of_a_written_step_are_those_that_rang():
  written = _HEALTHY | {'alarm/kl': 0.0, 'alarm/entropy': 1.0}
  (line,) = alarms.recorded(written)
  assert line.startswith('alarm entropy: the entropy (actor/entropy) is 0.077')
