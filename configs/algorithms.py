"""The table of algorithms: an algorithm is plain data.

An algorithm has a ratio, bounds, an objective, corrections and an aggregate,
and names an advantage estimator and a KL term. `stppo_jax/rl/algorithm.py`
turns an entry into functions; no code depends on the name of an algorithm.
Every option can be overridden, for example
`--config.algorithm.correction.clipping_bias.tau=5`. Setting the name of a
section, such as `--config.algorithm.bounds.name=balanced`, also sets the
options of that choice to their defaults, which are in `defaults.py`.

`docs/algorithms.md` has the equation, the source and the use of every
algorithm, and the defaults of its source where ours differ.
"""

import copy

from stppo_jax.configs import defaults
from stppo_jax.rl import estimator_needs


class UnknownName(ValueError):
  """A config knows no such algorithm or size; the message lists the choices."""


_TOKEN_PPO = {
  'ratio': {
    # Which tokens share one ratio: token | turn | sentence | sequence.
    'level': 'token',
    # Through which log-probabilities the gradient of a token's ratio flows:
    # through those of the whole segment (segment), or the token's own (token).
    'gradient': 'segment',
    # The geometric mean of the token ratios (mean), or their product (sum).
    'reduce': 'mean',
    # What is done to the log-ratio before it is reduced: none | guard, which is
    # experimental.
    'normalize': 'none',
  },
  'bounds': defaults.choice('bounds', 'fixed'),
  'objective': defaults.choice('objective', 'pessimistic'),
  'correction': {
    # The selected corrections: any of clipping_bias, tis, mis, icepop, geo_rs.
    # Each gives the terms of the loss a factor; the factors of several
    # corrections are multiplied.
    'names': (),
    'clipping_bias': {
      'norm': 'coefficient',  # coefficient | gradient
      'tau': 3.0,  # if norm is coefficient: scale by 1/rho above this rho
      'scope': 'minibatch',  # minibatch | microbatch | sequence | turn
      'level': 'token',  # the level of the ratio compared: token | turn
      'applies_to': ('policy',),  # losses that are scaled
      'floor': 1.0,  # if norm is gradient: the smallest divisor
    },
    # The factors of the following corrections depend on k, the ratio of the
    # trainer's probability under the old policy to the sampler's.
    'tis': {
      'cap': 2.0,  # the largest factor
      'level': 'token',  # the level of k: token | sequence
      'truncated': 'mismatch',  # mismatch: k | product: k times the ratio
    },
    'mis': {
      'cap': 2.0,  # the factor is 0 where k is larger
      'level': 'token',  # the level of k: token | sequence
    },
    'icepop': {
      'least': 0.5,  # the factor is 0 where k is smaller
      'most': 5.0,  # the factor is 0 where k is larger
    },
    'geo_rs': {'band': 0.001},  # how far the mean log k may be from 0
  },
  'aggregate': defaults.choice('aggregate', 'token_mean'),
  'advantage': defaults.choice('advantage', 'gae'),
  'kl': {
    'where': 'reward',  # reward | loss | nowhere
    'estimator': 'k1',  # k1 | k2 | k3 | k3_clamped
    'coefficient': 0.001,  # weight of the KL term
    'controller': 'fixed',  # fixed | adaptive
    'target': 6.0,  # if adaptive: the wanted KL in nats per trajectory
    'horizon': 10000.0,  # if adaptive: the time constant in trajectories
  },
}


def _algorithm(**changes):
  """Returns token PPO with some options changed.

  A change that gives a `name` replaces its whole section, since the options of
  another choice are others. All other changes are merged into their sections.
  """
  algorithm = copy.deepcopy(_TOKEN_PPO)
  _merge(algorithm, changes)
  return algorithm


def _merge(target, changes):
  for key, value in changes.items():
    if isinstance(value, dict) and 'name' not in value:
      _merge(target[key], value)
    else:
      target[key] = copy.deepcopy(value)


_TURN = {'ratio': {'level': 'turn'}}
_SEQUENCE = {'ratio': {'level': 'sequence'}}
_BIAS = {'correction': {'names': ('clipping_bias',)}}
_NO_KL = {'kl': {'where': 'nowhere'}}
_KL_IN_LOSS = {'kl': {'where': 'loss', 'estimator': 'k3'}}
_CLAMPED_KL_IN_LOSS = {'kl': {'where': 'loss', 'estimator': 'k3_clamped'}}
_GROUP = {'advantage': defaults.choice('advantage', 'group_normalized')}
_SEQUENCE_MEAN = {'aggregate': defaults.choice('aggregate', 'sequence_mean')}
_SEQUENCE_SUM = {'aggregate': defaults.choice('aggregate', 'sequence_sum')}
_UNCLIPPED = {'objective': defaults.choice('objective', 'unclipped')}
_GSPO_BOUNDS = {
  'bounds': defaults.choice('bounds', 'fixed', clip_low=3e-4, clip_high=4e-4)
}


ALGORITHMS = {
  # The algorithms of arXiv 2511.20718, which this repository is about.
  'token_ppo': _algorithm(),
  'turn_ppo': _algorithm(**_TURN),
  's_ppo': _algorithm(**_BIAS),
  'st_ppo': _algorithm(**_TURN, **_BIAS),
  # Version 2 of the paper calls st_ppo so_ppo; so_grpo is its form for groups.
  'so_ppo': _algorithm(**_TURN, **_BIAS),
  'so_grpo': _algorithm(
    **_TURN,
    correction={
      'names': ('clipping_bias',),
      'clipping_bias': {'scope': 'sequence'},
    },
    **_GROUP,
    **_CLAMPED_KL_IN_LOSS,
  ),
  # Related algorithms.
  'bilevel_ppo': _algorithm(
    advantage=defaults.choice('advantage', 'gae', steps='bilevel')
  ),
  'grpo': _algorithm(**_GROUP, **_SEQUENCE_MEAN, **_KL_IN_LOSS),
  'dr_grpo': _algorithm(
    advantage=defaults.choice('advantage', 'group_centered'),
    aggregate=defaults.choice('aggregate', 'constant_length'),
    **_NO_KL,
  ),
  'dapo': _algorithm(
    bounds=defaults.choice('bounds', 'fixed', clip_high=0.28),
    **_GROUP,
    **_NO_KL,
  ),
  'gspo': _algorithm(
    **_SEQUENCE, **_GSPO_BOUNDS, **_GROUP, **_SEQUENCE_MEAN, **_NO_KL
  ),
  'gspo_token': _algorithm(
    ratio={'level': 'sequence', 'gradient': 'token'},
    **_GSPO_BOUNDS,
    **_GROUP,
    **_SEQUENCE_MEAN,
    **_NO_KL,
  ),
  'sspo': _algorithm(
    ratio={'level': 'sentence'},
    bounds=defaults.choice('bounds', 'entropy_scaled'),
    **_GROUP,
    **_SEQUENCE_MEAN,
    **_NO_KL,
  ),
  'bapo': _algorithm(
    bounds=defaults.choice('bounds', 'balanced'), **_GROUP, **_NO_KL
  ),
  'cispo': _algorithm(
    # The lower bound is -9, which no ratio reaches.
    bounds=defaults.choice('bounds', 'fixed', clip_low=10.0, clip_high=0.2),
    objective=defaults.choice('objective', 'detached'),
    **_GROUP,
    **_NO_KL,
  ),
  'reinforce': _algorithm(
    **_UNCLIPPED,
    **_SEQUENCE_SUM,
    advantage=defaults.choice('advantage', 'monte_carlo'),
    **_NO_KL,
  ),
  'rloo': _algorithm(
    **_UNCLIPPED,
    **_SEQUENCE_SUM,
    advantage=defaults.choice('advantage', 'leave_one_out'),
    kl={'where': 'reward', 'estimator': 'k1'},
  ),
  'minirl': _algorithm(
    bounds=defaults.choice('bounds', 'fixed', clip_high=0.27),
    objective=defaults.choice('objective', 'masked'),
    correction={
      'names': ('tis',),
      'tis': {'cap': 5.0, 'truncated': 'product'},
    },
    **_SEQUENCE_SUM,
    advantage=defaults.choice('advantage', 'group_centered'),
    **_NO_KL,
  ),
  'grpo_guard': _algorithm(  # experimental
    ratio={'normalize': 'guard'},
    aggregate=defaults.choice('aggregate', 'turn_mean'),
    **_GROUP,
    **_NO_KL,
  ),
  'mt_grpo': _algorithm(
    advantage=defaults.choice('advantage', 'turn_group'), **_NO_KL
  ),
  'gigpo': _algorithm(
    advantage=defaults.choice('advantage', 'gigpo'), **_CLAMPED_KL_IN_LOSS
  ),
}

# Keys outside the section `algorithm` that an algorithm sets in `base.py`.
# Algorithms whose advantages compare trajectories need groups.
CHANGES = {
  name: {'rollout.group_size': 8}
  for name, algorithm in ALGORITHMS.items()
  if algorithm['advantage']['name'] in estimator_needs.GROUPS
}
# The published runs of so_grpo have 5 trajectories for each of 512 questions.
CHANGES['so_grpo'] = {
  'rollout.group_size': 5,
  'rollout.trajectories_per_step': 2560,
}
# Overlong reward shaping and dynamic sampling are parts of DAPO.
CHANGES['dapo'] |= {'env.rewards.overlong': 1.0, 'rollout.resample_rounds': 3}
