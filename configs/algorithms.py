"""The table of algorithms: an algorithm is plain data.

An algorithm has a ratio, bounds, an objective, corrections and an aggregate,
and names an advantage estimator and a KL term. `stppo_jax/rl/algorithm.py`
turns an entry into functions; no code depends on the name of an algorithm.
Every option can be overridden, for example
`--config.algorithm.correction.clipping_bias.tau=5`. Setting the name of a
section, such as `--config.algorithm.bounds.name=balanced`, also sets the
options of that choice to their defaults, which are in `DEFAULTS`.

`docs/algorithms.md` has the equation, the source and the use of every
algorithm, and the defaults of its source where ours differ.
"""

import copy

from stppo_jax.rl import estimator_needs


class UnknownName(ValueError):
  """A config knows no such algorithm or size; the message lists the choices."""


# The default options of every choice, for the sections whose options depend on
# their name.
DEFAULTS = {
  # The trusted interval of the ratio.
  'bounds': {
    # [1 - clip_low, 1 + clip_high]
    'fixed': {'clip_low': 0.2, 'clip_high': 0.2},
    # Both distances times clip(H / mean H, least, most) of the segment.
    'entropy_scaled': {
      'clip_low': 0.2,
      'clip_high': 0.2,
      'least': 0.5,
      'most': 2.0,
    },
    # Absolute bounds that widen until positive terms have positive_share.
    'balanced': {
      'low': 0.6,
      'high': 1.2,
      'low_step': 0.02,
      'high_step': 0.05,
      'low_limit': 0.9,
      'high_limit': 3.0,
      'positive_share': 0.4,
    },
  },
  # What happens outside the trusted interval.
  'objective': {
    'pessimistic': {},
    'dual_clip': {'c': 3.0},  # the largest ratio that counts where A < 0
    'detached': {},
    'masked': {},
    'unclipped': {},
  },
  # How the terms of the tokens become a scalar.
  'aggregate': {
    'token_mean': {},
    'turn_mean': {},
    'sequence_mean': {},
    'sequence_sum': {},
    'constant_length': {'max_response_tokens': 4096.0},
  },
  # How advantages are estimated. `whiten` says over which tokens they are
  # whitened: none | policy | all (observation tokens too).
  'advantage': {
    'gae': {
      'gamma': 1.0,
      'lambda_': 1.0,
      # Discount and trace decay over turns, if steps is bilevel.
      'gamma_turn': 0.95,
      'lambda_turn': 1.0,
      'steps': 'token',  # token | turn | bilevel
      # If steps is token: skipped | included (as in the reference
      # implementation).
      'observation_tokens': 'skipped',
      # Where the value model is trained: at steps that are policy tokens
      # (policy), or at all steps (response). Included observations need
      # `response`, unless gamma and lambda_ are 1.
      'critic_tokens': 'policy',
      'whiten': 'policy',
    },
    'monte_carlo': {'gamma': 1.0, 'whiten': 'policy'},
    'group_normalized': {'epsilon': 1e-6, 'whiten': 'none'},
    'group_centered': {'whiten': 'none'},
    'leave_one_out': {'whiten': 'none'},
    'turn_group': {'turn_weight': 1.0, 'epsilon': 1e-4, 'whiten': 'none'},
    'gigpo': {
      'omega': 1.0,  # weight of the advantage among turns
      'gamma': 0.95,  # discount per turn
      'normalize': 'std',  # std | none
      # How often an outcome counts in the statistics of its group: once for
      # each turn of its trajectory (per_turn), or once (per_trajectory).
      'outcome_counts': 'per_turn',
      'epsilon': 1e-6,
      'whiten': 'none',
    },
  },
}


def choice(kind: str, name: str, **changes: float | str) -> dict:
  """Returns a choice with the defaults of its options, some of them changed.

  Args:
    kind: a key of `DEFAULTS`.
    name: a key of `DEFAULTS[kind]`.
    **changes: options that differ from their defaults.
  """
  return {'name': name, **DEFAULTS[kind][name], **changes}


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
  'bounds': choice('bounds', 'fixed'),
  'objective': choice('objective', 'pessimistic'),
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
  'aggregate': choice('aggregate', 'token_mean'),
  'advantage': choice('advantage', 'gae'),
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
_GROUP = {'advantage': choice('advantage', 'group_normalized')}
_SEQUENCE_MEAN = {'aggregate': choice('aggregate', 'sequence_mean')}
_SEQUENCE_SUM = {'aggregate': choice('aggregate', 'sequence_sum')}
_UNCLIPPED = {'objective': choice('objective', 'unclipped')}
_GSPO_BOUNDS = {
  'bounds': choice('bounds', 'fixed', clip_low=3e-4, clip_high=4e-4)
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
    advantage=choice('advantage', 'gae', steps='bilevel')
  ),
  'grpo': _algorithm(**_GROUP, **_SEQUENCE_MEAN, **_KL_IN_LOSS),
  'dr_grpo': _algorithm(
    advantage=choice('advantage', 'group_centered'),
    aggregate=choice('aggregate', 'constant_length'),
    **_NO_KL,
  ),
  'dapo': _algorithm(
    bounds=choice('bounds', 'fixed', clip_high=0.28), **_GROUP, **_NO_KL
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
    bounds=choice('bounds', 'entropy_scaled'),
    **_GROUP,
    **_SEQUENCE_MEAN,
    **_NO_KL,
  ),
  'bapo': _algorithm(bounds=choice('bounds', 'balanced'), **_GROUP, **_NO_KL),
  'cispo': _algorithm(
    # The lower bound is -9, which no ratio reaches.
    bounds=choice('bounds', 'fixed', clip_low=10.0, clip_high=0.2),
    objective=choice('objective', 'detached'),
    **_GROUP,
    **_NO_KL,
  ),
  'reinforce': _algorithm(
    **_UNCLIPPED,
    **_SEQUENCE_SUM,
    advantage=choice('advantage', 'monte_carlo'),
    **_NO_KL,
  ),
  'rloo': _algorithm(
    **_UNCLIPPED,
    **_SEQUENCE_SUM,
    advantage=choice('advantage', 'leave_one_out'),
    kl={'where': 'reward', 'estimator': 'k1'},
  ),
  'minirl': _algorithm(
    bounds=choice('bounds', 'fixed', clip_high=0.27),
    objective=choice('objective', 'masked'),
    correction={
      'names': ('tis',),
      'tis': {'cap': 5.0, 'truncated': 'product'},
    },
    **_SEQUENCE_SUM,
    advantage=choice('advantage', 'group_centered'),
    **_NO_KL,
  ),
  'grpo_guard': _algorithm(  # experimental
    ratio={'normalize': 'guard'},
    aggregate=choice('aggregate', 'turn_mean'),
    **_GROUP,
    **_NO_KL,
  ),
  'mt_grpo': _algorithm(advantage=choice('advantage', 'turn_group'), **_NO_KL),
  'gigpo': _algorithm(
    advantage=choice('advantage', 'gigpo'), **_CLAMPED_KL_IN_LOSS
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
