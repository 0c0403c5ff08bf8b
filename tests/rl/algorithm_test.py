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
from tests.rl import batches


@pytest.mark.parametrize('wrap', [dict, config_dict.ConfigDict])
def test_every_algorithm_of_the_table_builds(wrap):
  for algorithm in map(wrap, algorithms.ALGORITHMS.values()):
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


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('ratio__level', 'word'),
    ('ratio__level', ['turn']),
    ('bounds__clip_low', -0.1),
    ('bounds__clip_high', math.inf),
    ('bounds__clip_high', math.nan),
    ('bounds__clip_high', True),
    ('kl__coefficient', '0.1'),
    ('advantage__gamma', 1.5),
    (_BIAS + 'tau', 0.0),
    (_BIAS + 'tau', math.nan),
    (_BIAS + 'applies_to', ()),
    ('correction__names', 'clipping_bias'),
    ('correction__names', ('clipping_bias', 'clipping_bias')),
    ('objective__name', 'optimistic'),
    ('bounds__name', 'loose'),
    ('kl', 3),
  ],
)
def test_one_problem_is_one_line(key, value):
  algorithm = batches.algorithm_options()
  section = algorithm
  *path, last = key.split('__')
  for step in path:
    section = section[step]
  section[last] = value
  (line,) = algorithm_lib.check_algorithm(algorithm)
  start = f'algorithm.{key.replace("__", ".")}={value!r}: must be '
  assert line.startswith(start)
  with pytest.raises(ValueError) as error:
    algorithm_lib.build_algorithm(algorithm)
  assert str(error.value) == line


def test_infinite_tau_is_allowed_and_integers_become_floats():
  built = batches.algorithm(**{_BIAS + 'tau': math.inf, 'kl__coefficient': 0})
  assert built.correction.clipping_bias.tau == math.inf
  assert isinstance(built.kl.coefficient, float)
  numpy = batches.algorithm(bounds__clip_low=np.float32(0.5))
  assert numpy.bounds.clip_low == 0.5


def test_all_problems_at_once():
  options = batches.algorithm_options(
    ratio__reduce='max', **{_BIAS + 'floor': 0.0}
  )
  options['bound'] = {}
  options['ratio']['levels'] = 'turn'
  del options['kl']['where']
  del options['advantage']['name']
  del options['aggregate']
  lines = algorithm_lib.check_algorithm(config_dict.ConfigDict(options))
  assert [line.split(': ')[0] for line in lines] == [
    'algorithm.bound',
    'algorithm.ratio.levels',
    "algorithm.ratio.reduce='max'",
    'algorithm.correction.clipping_bias.floor=0.0',
    'algorithm.aggregate',
    'algorithm.advantage.name',
    'algorithm.kl.where',
  ]
  assert all(name in lines[1] for name in ('level', 'gradient', 'normalize'))
  assert all(name in lines[5] for name in advantages.ADVANTAGES)


_GUARD = {'ratio__normalize': 'guard'}
_BALANCED = {'bounds__name': 'balanced'}
_GIGPO = {'advantage__name': 'gigpo'}
_INCLUDED = {'advantage__observation_tokens': 'included'}
_RESPONSE = {'advantage__critic_tokens': 'response'}


@pytest.mark.parametrize(
  ('changes', 'problem'),
  [
    ({'bounds__name': 'entropy_scaled', 'bounds__most': 0.1}, 'bounds.most'),
    ({**_BALANCED, 'bounds__high_limit': 1.1}, 'bounds.high_limit'),
    ({**_BALANCED, 'bounds__low_limit': 0.5}, 'bounds.low_limit'),
    ({**_BALANCED, 'bounds__high_step': 1e-9}, 'bounds.high_step'),
    ({**_GIGPO, 'advantage__history': 1.5}, 'advantage.history'),
    ({**_GIGPO, 'advantage__power': 11.0}, 'advantage.power'),
    ({'objective__name': 'dual_clip', 'objective__c': 1.0}, 'objective.c'),
    ({'objective__name': 'clip_cov', 'objective__most': 0.5}, 'objective.most'),
    ({**_GUARD, 'objective__name': 'detached'}, 'ratio.normalize'),
    ({'advantage__name': 'turn_group'}, 'kl.where'),
    ({'advantage__name': 'turn_index'}, 'kl.where'),
    ({'correction__icepop__most': 0.7}, 'correction.icepop.most'),
    (
      {_BIAS + 'norm': 'gradient', _BIAS + 'applies_to': ('policy', 'value')},
      'correction.clipping_bias.applies_to',
    ),
    (
      {'advantage__steps': 'turn', **_INCLUDED},
      'advantage.observation_tokens',
    ),
    (_INCLUDED, None),  # gamma = lambda_ = 1
    ({**_INCLUDED, 'advantage__lambda_': 0.95}, 'advantage.critic_tokens'),
    ({**_INCLUDED, 'advantage__gamma': 0.99}, 'advantage.critic_tokens'),
    ({**_INCLUDED, **_RESPONSE, 'advantage__lambda_': 0.95}, None),
    (_RESPONSE, 'advantage.critic_tokens'),
  ],
)
def test_options_that_do_not_fit_each_other(changes, problem):
  options = batches.algorithm_options(**changes)
  lines = algorithm_lib.check_algorithm(options)
  assert len(lines) == (problem is not None)
  if problem is not None:
    assert lines[0].startswith(f'algorithm.{problem}=')


_TABLES = {
  'bounds': bounds.BOUNDS,
  'objective': objectives.OBJECTIVES,
  'aggregate': aggregation.AGGREGATES,
  'advantage': advantages.ADVANTAGES,
}


def test_every_choice_has_defaults_and_can_be_built():
  assert _TABLES.keys() == defaults.DEFAULTS.keys()
  for kind, table in _TABLES.items():
    assert table.keys() == defaults.DEFAULTS[kind].keys()
    for name in table:
      changes = {f'{kind}__name': name, 'kl__where': 'nowhere'}
      assert getattr(batches.algorithm(**changes), kind).name == name


def test_the_loss_needs_only_the_arrays_that_its_choices_read():
  assert batches.algorithm('sspo').needs == {'entropy_BL', 'sentence_ids_BL'}
  assert batches.algorithm('minirl').needs == {'sampler_logprobs_BL'}
  assert batches.algorithm('grpo').needs == {'ref_logprobs_BL'}


def _choices():
  """Returns every choice that may need statistics."""
  for name in bounds.BOUNDS:
    yield 'token_ppo', {'bounds__name': name}
  for name in objectives.OBJECTIVES:
    yield 'token_ppo', {'objective__name': name}
  for name in ratios.NORMALIZATIONS:
    yield 'token_ppo', {'ratio__normalize': name}
  for name in corrections.CORRECTIONS:
    yield 'token_ppo', {'correction__names': (name,)}
  for norm in clipping_bias.NORMS:
    for scope in clipping_bias.SCOPES:
      yield 's_ppo', {f'{_BIAS}norm': norm, f'{_BIAS}scope': scope}


@pytest.mark.parametrize(('name', 'changes'), [*_choices()], ids=str)
def test_declared_needs_are_what_minibatch_statistics_returns(name, changes):
  algorithm = batches.algorithm(name, **changes)
  batch, logprobs, entropy = batches.make()
  found = jax.eval_shape(
    functools.partial(losses.minibatch_statistics, num_turns=batches.T),
    algorithm,
    logprobs,
    entropy,
    batch,
  )
  assert algorithm.uses_minibatch_statistics is bool(jax.tree.leaves(found))
