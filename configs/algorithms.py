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
import math

from stppo_jax.configs import defaults
from stppo_jax.rl import estimator_needs


class UnknownName(ValueError):
  """Raised if an algorithm or a size is unknown; the message lists choices."""


_TOKEN_PPO = {
  'ratio': {
    # The segment whose tokens share one ratio: token | turn | sentence |
    # sequence.
    'level': 'token',
    # The log-probabilities through which the gradient of a token's ratio flows:
    # of all tokens of the segment (segment), or only of the token (token).
    'gradient': 'segment',
    # The ratio of a segment is the geometric mean (mean) or the product (sum)
    # of its token ratios.
    'reduce': 'mean',
    # The normalisation of the log-ratio before it is reduced: none | guard.
    # guard is experimental.
    'normalize': 'none',
  },
  'bounds': defaults.choice('bounds', 'fixed'),
  'objective': defaults.choice('objective', 'pessimistic'),
  'correction': {
    # The selected corrections: any of clipping_bias, tis, mis, icepop, geo_rs.
    # Each correction multiplies the terms of the loss by a factor.
    'names': (),
    'clipping_bias': {
      'norm': 'coefficient',  # coefficient | gradient
      # rho is the root mean square of ratio * advantage over the tokens outside
      # the bounds, divided by the root mean square over the tokens inside. With
      # norm=coefficient, the loss is scaled by 1/rho where rho is above tau.
      'tau': 3.0,
      'scope': 'minibatch',  # minibatch | microbatch | sequence | turn
      # The level of the ratio that is compared with the bounds: token | turn.
      'level': 'token',
      'applies_to': ('policy',),  # the losses that are scaled
      'floor': 1.0,  # with norm=gradient: the smallest divisor
    },
    # The factors of the following corrections depend on k: the probability of
    # a token under the old policy in the trainer, divided by its probability in
    # the sampler.
    'tis': {
      'level': 'token',  # the level of k: token | turn | sequence
      'reduce': 'sum',  # k is a geometric mean (mean) or a product (sum)
      'cap': 2.0,  # the largest factor
      # The quantity that is truncated: k (mismatch), or k times the ratio
      # (product).
      'truncated': 'mismatch',
    },
    'mis': {
      'level': 'token',  # the level of k: token | turn | sequence
      'reduce': 'sum',  # k is a geometric mean (mean) or a product (sum)
      'cap': 2.0,  # above this k the factor is 0
    },
    'icepop': {
      'level': 'token',  # the level of k: token | turn | sequence
      'reduce': 'sum',  # k is a geometric mean (mean) or a product (sum)
      'least': 0.5,  # below this k the factor is 0
      'most': 5.0,  # above this k the factor is 0
    },
    'geo_rs': {
      'level': 'sequence',  # the level of k: token | turn | sequence
      'reduce': 'mean',  # k is a geometric mean (mean) or a product (sum)
      'band': 0.001,  # above this |log k| the factor is 0
    },
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
  """Returns token PPO with some sections changed.

  Args:
    **changes: for each changed section, a text or a dict. A text names the new
      choice, which has its default options. A dict with the key `name` names
      the new choice, and changes some of its options. Any other dict changes
      options of token PPO.
  """
  algorithm = copy.deepcopy(_TOKEN_PPO)
  for kind, change in changes.items():
    options = {'name': change} if isinstance(change, str) else change
    if 'name' in options:
      algorithm[kind] = defaults.choice(kind, **options)
    else:
      _merge(algorithm[kind], options)
  return algorithm


def _merge(target, changes):
  for key, value in changes.items():
    if isinstance(value, dict):
      _merge(target[key], value)
    else:
      target[key] = value


_TURN = {'ratio': {'level': 'turn'}}
_SEQUENCE = {'ratio': {'level': 'sequence'}}
_BIAS = {'correction': {'names': ('clipping_bias',)}}
_NO_KL = {'kl': {'where': 'nowhere'}}
_KL_IN_LOSS = {'kl': {'where': 'loss', 'estimator': 'k3'}}
_CLAMPED_KL_IN_LOSS = {'kl': {'where': 'loss', 'estimator': 'k3_clamped'}}
_GROUP = {'advantage': 'group_normalized'}
_SEQUENCE_MEAN = {'aggregate': 'sequence_mean'}
_SEQUENCE_SUM = {'aggregate': 'sequence_sum'}
_UNCLIPPED = {'objective': 'unclipped'}
_GSPO_BOUNDS = {'bounds': {'clip_low': 3e-4, 'clip_high': 4e-4}}
_NARROW_BOUNDS = {'bounds': {'clip_low': 3e-3, 'clip_high': 4e-3}}
_CENTERED = {'advantage': 'group_centered', 'aggregate': 'constant_length'}
_DPPO = {'objective': {'name': 'masked', 'cap': 20.0}, **_CENTERED}


ALGORITHMS = {
  # The algorithms of arXiv 2511.20718, which this repository is about.
  'token_ppo': _algorithm(),
  'turn_ppo': _algorithm(**_TURN),
  's_ppo': _algorithm(**_BIAS),
  'st_ppo': _algorithm(**_TURN, **_BIAS),
  # Version 2 of the paper calls st_ppo so_ppo. so_grpo is the form of so_ppo
  # for groups.
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
  'bilevel_ppo': _algorithm(advantage={'steps': 'bilevel'}),
  'grpo': _algorithm(**_GROUP, **_SEQUENCE_MEAN, **_KL_IN_LOSS),
  'dr_grpo': _algorithm(**_CENTERED, **_NO_KL),
  'dapo': _algorithm(bounds={'clip_high': 0.28}, **_GROUP, **_NO_KL),
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
    bounds='entropy_scaled',
    **_GROUP,
    **_SEQUENCE_MEAN,
    **_NO_KL,
  ),
  'bapo': _algorithm(bounds='balanced', **_GROUP, **_NO_KL),
  'cispo': _algorithm(
    # The lower bound is -9, which no ratio reaches.
    bounds={'clip_low': 10.0, 'clip_high': 0.2},
    objective='detached',
    **_GROUP,
    **_NO_KL,
  ),
  'reinforce': _algorithm(
    **_UNCLIPPED, **_SEQUENCE_SUM, advantage='monte_carlo', **_NO_KL
  ),
  'rloo': _algorithm(
    **_UNCLIPPED,
    **_SEQUENCE_SUM,
    advantage='leave_one_out',
    kl={'where': 'reward', 'estimator': 'k1'},
  ),
  'minirl': _algorithm(
    bounds={'clip_high': 0.27},
    objective='masked',
    correction={
      'names': ('tis',),
      'tis': {'cap': 5.0, 'truncated': 'product'},
    },
    **_SEQUENCE_SUM,
    advantage='group_centered',
    **_NO_KL,
  ),
  'grpo_guard': _algorithm(  # experimental
    ratio={'normalize': 'guard'}, aggregate='turn_mean', **_GROUP, **_NO_KL
  ),
  'mt_grpo': _algorithm(advantage='turn_group', **_NO_KL),
  'gigpo': _algorithm(advantage='gigpo', **_CLAMPED_KL_IN_LOSS),
  # Related algorithms at the level of turns, published after arXiv 2511.20718.
  'atpo': _algorithm(
    ratio={'level': 'turn', 'gradient': 'token'},
    **_NARROW_BOUNDS,
    **_GROUP,
    **_SEQUENCE_MEAN,
    **_NO_KL,
  ),
  # In the source of SAMPO, each row is a turn, so the ratio of a sequence there
  # is the ratio of a turn here.
  'sampo': _algorithm(
    ratio={'level': 'turn', 'gradient': 'token'},
    **_NARROW_BOUNDS,
    aggregate='turn_mean',
    advantage={'name': 'gigpo', 'normalize': 'none'},
    kl={'where': 'loss', 'estimator': 'k3_clamped', 'coefficient': 0.01},
  ),
  # A turn is an action, and its value is the value of the state before the
  # turn. arXiv 2512.17008 calls this algorithm Turn-PPO. Here turn_ppo is
  # another algorithm.
  'turn_mdp_ppo': _algorithm(
    **_TURN, advantage={'gamma': 0.99, 'lambda_': 0.9, 'steps': 'turn'}
  ),
  # Algorithms that replace the clipping of the ratio.
  'gmpo': _algorithm(
    **_SEQUENCE,
    # exp(-0.4) and exp(0.4)
    bounds={'clip_low': -math.expm1(-0.4), 'clip_high': math.expm1(0.4)},
    objective='geometric',
    **_GROUP,
    **_SEQUENCE_MEAN,
    **_NO_KL,
  ),
  'dppo_tv': _algorithm(bounds='total_variation', **_DPPO, **_NO_KL),
  'dppo_kl': _algorithm(bounds='binary_kl', **_DPPO, **_NO_KL),
  'drpo': _algorithm(objective='quadratic', **_CENTERED, **_NO_KL),
  'sapo_gate': _algorithm(
    objective='soft_gate', **_GROUP, **_SEQUENCE_MEAN, **_NO_KL
  ),
  'topr': _algorithm(
    ratio={'level': 'sequence', 'reduce': 'sum'},
    bounds={'clip_low': 1.0, 'clip_high': 0.0},
    objective='tapered',
    advantage='group_centered',
    **_SEQUENCE_SUM,
    **_NO_KL,
  ),
  'vespo': _algorithm(
    ratio={'level': 'sequence', 'reduce': 'sum'},
    objective='gamma_weighted',
    **_GROUP,
    **_NO_KL,
  ),
  'clip_cov': _algorithm(
    bounds={'clip_low': 1.0, 'clip_high': 1.0},
    objective='clip_cov',
    **_GROUP,
    **_NO_KL,
  ),
  'kl_cov': _algorithm(objective='kl_cov', **_GROUP, **_NO_KL),
  # Algorithms that assign credit with a value model.
  'vapo': _algorithm(
    bounds={'clip_high': 0.28},
    objective='positive_examples',
    advantage={'name': 'decoupled_gae', 'alpha': 0.05},
    **_NO_KL,
  ),
  'evpo': _algorithm(
    advantage={'name': 'decoupled_gae', 'baseline': 'explained'}
  ),
  # Algorithms that assign credit to turns without a value model. turn_rloo is
  # unbiased even if the policy decides when to stop.
  'turn_rloo': _algorithm(
    **_UNCLIPPED, **_SEQUENCE_SUM, advantage='turn_leave_one_out', **_NO_KL
  ),
  'a2tgpo': _algorithm(
    ratio={'level': 'turn', 'gradient': 'token'},
    bounds='by_reward',
    advantage='turn_index',
    **_SEQUENCE_MEAN,
    **_NO_KL,
  ),
  'igpo': _algorithm(advantage='turn_pooled', **_KL_IN_LOSS),
  'hgpo': _algorithm(
    advantage={'name': 'gigpo', 'outcome_weight': 0.0, 'history': 2},
    kl={'where': 'loss', 'estimator': 'k3_clamped', 'coefficient': 0.01},
  ),
}

# Maps an algorithm to the values of config keys outside the section `algorithm`
# that it changes. Algorithms whose advantages compare trajectories need groups.
CHANGES: dict[str, dict[str, float]] = {
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
# SAMPO replaces groups without variance, too.
CHANGES['sampo'] |= {'rollout.resample_rounds': 2}
