import functools
import math

import jax
from ml_collections import config_dict
import numpy as np
import pytest

from stppo_jax import settings
from stppo_jax.configs import algorithms
from stppo_jax.configs import defaults
from stppo_jax.rl import advantages
from stppo_jax.rl import aggregation
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import bounds
from stppo_jax.rl import clipping_bias
from stppo_jax.rl import corrections
from stppo_jax.rl import losses
from stppo_jax.rl import objectives
from stppo_jax.rl import ratios
from stppo_jax.rl import segments
from tests.rl import batches


@pytest.mark.parametrize('name', algorithms.ALGORITHMS)
@pytest.mark.parametrize('wrap', [dict, config_dict.ConfigDict])
def test_every_algorithm_of_the_table_builds(name, wrap):
  algorithm = wrap(algorithms.ALGORITHMS[name])
  assert algorithm_lib.check_algorithm(algorithm) == []
  built = algorithm_lib.build_algorithm(algorithm)
  assert built.ratio.level == algorithm['ratio']['level']
  for section in ('bounds', 'advantage'):
    options = getattr(built, section)
    named = {'name': options.name} | options.arguments()
    assert named == dict(algorithm[section])


def test_numbers_are_leaves_and_names_are_static():
  st_ppo = batches.algorithm('st_ppo')
  numbers = settings.flatten(algorithms.ALGORITHMS['st_ppo']).values()
  assert sorted(jax.tree.leaves(st_ppo)) == sorted(
    x for x in numbers if isinstance(x, float)
  )
  other = batches.algorithm('st_ppo', bounds__clip_low=0.1)
  assert jax.tree.structure(st_ppo) == jax.tree.structure(other)
  assert jax.tree.structure(st_ppo) != jax.tree.structure(
    batches.algorithm('s_ppo')
  )
  hash(jax.tree.structure(st_ppo))


_BIAS = 'correction__clipping_bias__'
_LEVELS = f'must be one of {", ".join(segments.LEVELS)}'
_NAMES = f'must be a tuple of any of {", ".join(corrections.CORRECTIONS)}'
_POSITIVE = 'must be a number > 0 (inf is allowed)'
_NOT_NEGATIVE = 'must be a finite number >= 0'
_TWICE = ('clipping_bias', 'clipping_bias')


@pytest.mark.parametrize(
  'key,value,rule',
  [
    ('ratio__level', 'word', _LEVELS),
    ('ratio__level', ['turn'], _LEVELS),
    ('bounds__clip_low', -0.1, _NOT_NEGATIVE),
    ('bounds__clip_high', math.inf, _NOT_NEGATIVE),
    ('bounds__clip_high', math.nan, _NOT_NEGATIVE),
    ('bounds__clip_high', True, _NOT_NEGATIVE),
    ('kl__coefficient', '0.1', _NOT_NEGATIVE),
    ('advantage__gamma', 1.5, _NOT_NEGATIVE + ' and <= 1'),
    (_BIAS + 'tau', 0.0, _POSITIVE),
    (_BIAS + 'tau', math.nan, _POSITIVE),
    (
      _BIAS + 'applies_to',
      (),
      'must be a tuple of at least 1 of policy, value',
    ),
    ('correction__names', 'clipping_bias', _NAMES),
    ('correction__names', _TWICE, _NAMES),
    (
      'objective__name',
      'optimistic',
      f'must be one of {", ".join(objectives.OBJECTIVES)}',
    ),
    ('bounds__name', 'loose', f'must be one of {", ".join(bounds.BOUNDS)}'),
    ('kl', 3, 'must be a section of options'),
  ],
)
def test_one_problem_is_one_line(key, value, rule):
  algorithm = batches.algorithm_options()
  section = algorithm
  *path, last = key.split('__')
  for step in path:
    section = section[step]
  section[last] = value
  line = f'algorithm.{key.replace("__", ".")}={value!r}: {rule}'
  assert algorithm_lib.check_algorithm(algorithm) == [line]
  with pytest.raises(ValueError) as error:
    algorithm_lib.build_algorithm(algorithm)
  assert str(error.value) == line


def test_infinite_tau_is_allowed_and_integers_become_floats():
  built = batches.algorithm(**{_BIAS + 'tau': math.inf, 'kl__coefficient': 0})
  assert built.correction.clipping_bias.tau == math.inf
  assert isinstance(built.kl.coefficient, float)
  numpy = batches.algorithm(bounds__clip_low=np.float32(0.5))
  assert numpy.bounds.clip_low == 0.5


def test_options_that_exclude_each_other():
  options = batches.algorithm_options(
    advantage__steps='turn',
    advantage__observation_tokens='included',
    **{
      _BIAS + 'norm': 'gradient',
      _BIAS + 'applies_to': ('policy', 'value'),
    },
  )
  assert algorithm_lib.check_algorithm(options) == [
    "algorithm.correction.clipping_bias.applies_to=('policy', 'value'): "
    "must be ('policy',) when norm is 'gradient'",
    "algorithm.advantage.observation_tokens='included': must be 'skipped' "
    "when steps is 'turn'",
  ]


_INCLUDED = {'advantage__observation_tokens': 'included'}
_RESPONSE = {'advantage__critic_tokens': 'response'}


@pytest.mark.parametrize(
  ('changes', 'problem'),
  [
    (_INCLUDED, None),  # gamma = lambda_ = 1
    ({**_INCLUDED, 'advantage__lambda_': 0.95}, "'policy': must be 'response'"),
    ({**_INCLUDED, 'advantage__gamma': 0.99}, "'policy': must be 'response'"),
    ({**_INCLUDED, **_RESPONSE, 'advantage__lambda_': 0.95}, None),
    (_RESPONSE, "'response': must be 'policy' when observation_tokens"),
  ],
)
def test_values_that_gae_reads_are_trained(changes, problem):
  options = batches.algorithm_options('token_ppo', **changes)
  lines = algorithm_lib.check_algorithm(options)
  if problem is None:
    assert not lines
  else:
    (line,) = lines
    assert line.startswith(f'algorithm.advantage.critic_tokens={problem}')


@pytest.mark.parametrize('wrap', [dict, config_dict.ConfigDict])
def test_all_problems_at_once(wrap):
  options = batches.algorithm_options(
    ratio__reduce='max', **{_BIAS + 'floor': 0.0}
  )
  options['bound'] = {}
  options['ratio']['levels'] = 'turn'
  del options['kl']['where']
  del options['advantage']['name']
  del options['aggregate']
  assert algorithm_lib.check_algorithm(wrap(options)) == [
    'algorithm.bound: unknown option; the options are ratio, bounds, '
    'objective, correction, aggregate, advantage, kl',
    'algorithm.ratio.levels: unknown option; the options are level, '
    'gradient, reduce, normalize',
    "algorithm.ratio.reduce='max': must be one of mean, sum",
    'algorithm.correction.clipping_bias.floor=0.0: must be a finite number > 0',
    'algorithm.aggregate: missing',
    'algorithm.advantage.name: missing; must be one of '
    + ', '.join(advantages.ADVANTAGES),
    'algorithm.kl.where: missing',
  ]


@pytest.mark.parametrize(
  'changes,line',
  [
    (
      {'bounds__name': 'entropy_scaled', 'bounds__most': 0.1},
      'algorithm.bounds.most=0.1: must be 0.5 (least) or greater',
    ),
    (
      {'bounds__name': 'balanced', 'bounds__high_limit': 1.1},
      'algorithm.bounds.high_limit=1.1: must be 1.2 (high) or greater',
    ),
    (
      {'bounds__name': 'balanced', 'bounds__low_limit': 0.5},
      'algorithm.bounds.low_limit=0.5: must be 0.6 (low) or greater',
    ),
    (
      {'advantage__name': 'gigpo', 'advantage__history': 1.5},
      'algorithm.advantage.history=1.5: must be an integer >= 0',
    ),
    (
      {'advantage__name': 'gigpo', 'advantage__power': 11.0},
      'algorithm.advantage.power=11.0: must be a finite number >= 0 and <= 10',
    ),
    (
      {'objective__name': 'dual_clip', 'objective__c': 1.0},
      'algorithm.objective.c=1.0: must be a finite number > 1',
    ),
    (
      {'bounds__name': 'balanced', 'bounds__high_step': 1e-9},
      'algorithm.bounds.high_step=1e-09: must be large enough to reach its '
      'limit in 10000 steps',
    ),
    (
      {'ratio__normalize': 'guard', 'objective__name': 'detached'},
      "algorithm.ratio.normalize='guard': must be 'none' unless "
      'objective.name is pessimistic or dual_clip',
    ),
    (
      {'advantage__name': 'turn_group'},
      "algorithm.kl.where='reward': must be 'loss' or 'nowhere' when "
      "advantage.name is 'turn_group'",
    ),
    (
      {'advantage__name': 'turn_index'},
      "algorithm.kl.where='reward': must be 'loss' or 'nowhere' when "
      "advantage.name is 'turn_index'",
    ),
    (
      {'objective__name': 'clip_cov', 'objective__most': 0.5},
      'algorithm.objective.most=0.5: must be greater than 1.0 (least)',
    ),
    (
      {'correction__icepop__most': 0.7},
      'algorithm.correction.icepop.most=0.7: must be 1 or greater',
    ),
  ],
)
def test_options_of_a_section_that_do_not_fit(changes, line):
  assert algorithm_lib.check_algorithm(
    batches.algorithm_options(**changes)
  ) == [line]


_TABLES = {
  'bounds': bounds.BOUNDS,
  'objective': objectives.OBJECTIVES,
  'aggregate': aggregation.AGGREGATES,
  'advantage': advantages.ADVANTAGES,
}


@pytest.mark.parametrize('kind', _TABLES)
def test_every_choice_has_defaults_and_can_be_built(kind):
  assert _TABLES.keys() == defaults.DEFAULTS.keys()
  assert _TABLES[kind].keys() == defaults.DEFAULTS[kind].keys()
  for name in _TABLES[kind]:
    changes = {f'{kind}__name': name, 'kl__where': 'nowhere'}
    built = batches.algorithm(**changes)
    assert getattr(built, kind).name == name


def test_only_estimators_with_a_critic_use_values():
  assert batches.algorithm('st_ppo').uses_values
  assert not batches.algorithm('reinforce').uses_values


def test_the_loss_needs_only_the_arrays_that_its_choices_read():
  assert batches.algorithm('sspo').needs == {'entropy_BL', 'sentence_ids_BL'}
  assert batches.algorithm('minirl').needs == {'sampler_logprobs_BL'}
  assert batches.algorithm('grpo').needs == {'ref_logprobs_BL'}


def _choices():
  """Returns every algorithm, and every choice that may need statistics."""
  for name in algorithms.ALGORITHMS:
    yield name, {}
  for name in bounds.BOUNDS:
    yield 'token_ppo', {'bounds__name': name}
  for name in ratios.NORMALIZATIONS:
    yield 'token_ppo', {'ratio__normalize': name}
  for name in corrections.CORRECTIONS:
    yield 'token_ppo', {'correction__names': (name,)}
  for norm in clipping_bias.NORMS:
    for scope in clipping_bias.SCOPES:
      yield 's_ppo', {f'{_BIAS}norm': norm, f'{_BIAS}scope': scope}


@pytest.mark.parametrize('name,changes', list(_choices()), ids=str)
def test_declared_needs_are_what_minibatch_statistics_returns(name, changes):
  algorithm = batches.algorithm(name, **changes)
  batch, logprobs, entropy = batches.make()
  found = jax.eval_shape(
    functools.partial(losses.minibatch_statistics, num_turns=batches.T),
    algorithm,
    logprobs,
    entropy,
    batches.device(batch),
  )
  assert algorithm.uses_minibatch_statistics is bool(jax.tree.leaves(found))


def test_the_policy_gradient_is_divided_by_the_norm_of_the_bias_if_chosen():
  for name in algorithms.ALGORITHMS:
    assert not batches.algorithm(name).divides_by_bias_norm
  gradient = {f'{_BIAS}norm': 'gradient'}
  assert batches.algorithm('st_ppo', **gradient).divides_by_bias_norm
  assert not batches.algorithm('turn_ppo', **gradient).divides_by_bias_norm
