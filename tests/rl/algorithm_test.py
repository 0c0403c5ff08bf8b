import math

import jax
from ml_collections import config_dict
import numpy as np
import pytest

from configs import algorithms
from stppo_jax.rl import advantages
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import bounds
from stppo_jax.rl import corrections
from tests.rl import batches


@pytest.mark.parametrize('name', algorithms.ALGORITHMS)
@pytest.mark.parametrize('wrap', [dict, config_dict.ConfigDict])
def test_every_row_of_the_table_builds(name, wrap):
  row = wrap(algorithms.ALGORITHMS[name])
  assert algorithm_lib.check_algorithm(row) == []
  built = algorithm_lib.build_algorithm(row)
  assert built.ratio.level == row['ratio']['level']
  assert built.bounds.arguments() == dict(row['bounds'])
  assert built.advantage.arguments() == dict(row['advantage'])


def test_numbers_are_leaves_and_names_are_static():
  st_ppo = batches.algorithm('st_ppo')
  assert sorted(jax.tree.leaves(st_ppo)) == sorted(
    [0.2, 0.2, 3.0, 1.0, 1.0, 1.0, 0.001]
  )
  other = batches.algorithm('st_ppo', bounds__clip_low=0.1)
  assert jax.tree.structure(st_ppo) == jax.tree.structure(other)
  assert jax.tree.structure(st_ppo) != jax.tree.structure(
    batches.algorithm('s_ppo')
  )
  hash(jax.tree.structure(st_ppo))


_BIAS = 'correction__clipping_bias__'


@pytest.mark.parametrize(
  'key,value,line',
  [
    (
      'ratio__level',
      'word',
      "algorithm.ratio.level='word': must be one of token, turn, sequence",
    ),
    (
      'ratio__level',
      ['turn'],
      "algorithm.ratio.level=['turn']: must be one of token, turn, sequence",
    ),
    (
      'bounds__clip_low',
      -0.1,
      'algorithm.bounds.clip_low=-0.1: must be a finite number >= 0',
    ),
    (
      'bounds__clip_high',
      math.inf,
      'algorithm.bounds.clip_high=inf: must be a finite number >= 0',
    ),
    (
      'bounds__clip_high',
      math.nan,
      'algorithm.bounds.clip_high=nan: must be a finite number >= 0',
    ),
    (
      'bounds__clip_high',
      True,
      'algorithm.bounds.clip_high=True: must be a finite number >= 0',
    ),
    (
      'kl__coefficient',
      '0.1',
      "algorithm.kl.coefficient='0.1': must be a finite number >= 0",
    ),
    (
      'advantage__gamma',
      1.5,
      'algorithm.advantage.gamma=1.5: must be a finite number >= 0 and <= 1',
    ),
    (
      _BIAS + 'tau',
      0.0,
      'algorithm.correction.clipping_bias.tau=0.0: must be a number > 0 '
      '(inf is allowed)',
    ),
    (
      _BIAS + 'tau',
      math.nan,
      'algorithm.correction.clipping_bias.tau=nan: must be a number > 0 '
      '(inf is allowed)',
    ),
    (
      _BIAS + 'applies_to',
      (),
      'algorithm.correction.clipping_bias.applies_to=(): must be a tuple '
      'of at least 1 of policy, value',
    ),
    (
      'correction__names',
      'clipping_bias',
      "algorithm.correction.names='clipping_bias': must be a tuple of "
      'any of clipping_bias',
    ),
    (
      'correction__names',
      ('clipping_bias', 'clipping_bias'),
      "algorithm.correction.names=('clipping_bias', 'clipping_bias'): "
      'must be a tuple of any of clipping_bias',
    ),
    (
      'objective__name',
      'optimistic',
      "algorithm.objective.name='optimistic': must be one of pessimistic",
    ),
    (
      'bounds__name',
      'loose',
      "algorithm.bounds.name='loose': must be one of fixed",
    ),
    ('kl', 3, 'algorithm.kl=3: must be a block of options'),
  ],
)
def test_one_problem_is_one_line(key, value, line):
  row = batches.row_of(**{key: value})
  assert algorithm_lib.check_algorithm(row) == [line]
  with pytest.raises(ValueError) as error:
    algorithm_lib.build_algorithm(row)
  assert str(error.value) == line


def test_infinite_tau_is_allowed_and_integers_become_floats():
  built = batches.algorithm(**{_BIAS + 'tau': math.inf, 'kl__coefficient': 0})
  assert built.correction.clipping_bias.tau == math.inf
  assert isinstance(built.kl.coefficient, float)
  numpy = batches.algorithm(bounds__clip_low=np.float32(0.5))
  assert numpy.bounds.clip_low == 0.5


def test_options_that_exclude_each_other():
  row = batches.row_of(
    advantage__steps='turn',
    advantage__observation_tokens='included',
    **{
      _BIAS + 'norm': 'gradient',
      _BIAS + 'applies_to': ('policy', 'value'),
    },
  )
  assert algorithm_lib.check_algorithm(row) == [
    "algorithm.correction.clipping_bias.applies_to=('policy', 'value'): "
    "must be ('policy',) when norm is 'gradient'",
    "algorithm.advantage.observation_tokens='included': must be 'skipped' "
    "when steps is 'turn'",
  ]


@pytest.mark.parametrize('wrap', [dict, config_dict.ConfigDict])
def test_all_problems_at_once(wrap):
  row = batches.row_of(ratio__reduce='max', **{_BIAS + 'floor': 0.0})
  row['bound'] = {}
  row['ratio']['levels'] = 'turn'
  del row['kl']['where']
  del row['advantage']['name']
  del row['aggregate']
  assert algorithm_lib.check_algorithm(wrap(row)) == [
    'algorithm.bound: unknown option; the options are ratio, bounds, '
    'objective, correction, aggregate, advantage, kl',
    'algorithm.ratio.levels: unknown option; the options are level, '
    'gradient, reduce',
    "algorithm.ratio.reduce='max': must be one of mean, sum",
    'algorithm.correction.clipping_bias.floor=0.0: must be a finite number > 0',
    'algorithm.aggregate: missing',
    'algorithm.advantage.name: missing; must be one of gae',
    'algorithm.kl.where: missing',
  ]


def test_what_can_be_chosen_can_be_built():
  assert algorithm_lib.BOUNDS_BLOCKS.keys() == bounds.BOUNDS.keys()
  assert algorithm_lib.ADVANTAGE_BLOCKS.keys() == advantages.ADVANTAGES.keys()
  assert corrections.CORRECTIONS.keys() == corrections.CORRECTION_SUMS.keys()
