"""The table of algorithms: one row each, a row is plain data.

Five axes (ratio, bounds, objective, correction, aggregate), the advantage
estimator and the KL term. `stppo_jax/rl/algorithm.py` turns a row into
functions; no code asks for a row's name. Any option can be overridden, e.g.
`--config.algorithm.correction.clipping_bias.tau=5`; another name of a block
brings that block's own options with their defaults, which stand in `BLOCKS`,
e.g. `--config.algorithm.bounds.name=balanced`.

`docs/algorithms.md` has the equation, the source and the use of every row.
"""

import copy

# Blocks whose options depend on their name, each with its defaults.
BLOCKS = {
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
    # Absolute bounds that move until positive terms have their share.
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
  # What happens outside it.
  'objective': {
    'pessimistic': {},
    'dual_clip': {'c': 3.0},  # the largest ratio that counts where A < 0
    'detached': {},
    'masked': {},
    'unclipped': {},
  },
  # How tokens become a scalar.
  'aggregate': {
    'token_mean': {},
    'turn_mean': {},
    'sequence_mean': {},
    'sequence_sum': {},
    'constant_length': {'max_response_tokens': 4096.0},
  },
  # whiten: none | policy | all (over observation tokens too).
  'advantage': {
    'gae': {
      'gamma': 1.0,
      'lambda_': 1.0,
      # Of the turns, where steps is bilevel.
      'gamma_turn': 0.95,
      'lambda_turn': 1.0,
      'steps': 'token',  # token | turn | bilevel
      # Of token steps: skipped | included (as in the reference run).
      'observation_tokens': 'skipped',
      'whiten': 'policy',
    },
    'monte_carlo': {'gamma': 1.0, 'whiten': 'policy'},
    'group_normalized': {'epsilon': 1e-6, 'whiten': 'none'},
    'group_centered': {'whiten': 'none'},
    'leave_one_out': {'whiten': 'none'},
    'turn_group': {'turn_weight': 1.0, 'epsilon': 1e-6, 'whiten': 'none'},
    'gigpo': {
      'omega': 1.0,  # weight of the step advantage
      'gamma': 0.95,  # per turn
      'normalize': 'std',  # std | none
      'epsilon': 1e-6,
      'whiten': 'none',
    },
  },
}


def block(kind: str, name: str, **changes) -> dict:
  """A named block with its defaults, some of them changed."""
  return {'name': name, **BLOCKS[kind][name], **changes}


_TOKEN_PPO = {
  # Which tokens share one ratio (token, turn, sentence, sequence), where its
  # gradient goes (segment: through the segment's mean; token: each keeps its
  # own), how a segment is reduced (mean: geometric mean of ratios; sum), and
  # what is done to the log-ratio before (none; guard: experimental).
  'ratio': {
    'level': 'token',
    'gradient': 'segment',
    'reduce': 'mean',
    'normalize': 'none',
  },
  'bounds': block('bounds', 'fixed'),
  'objective': block('objective', 'pessimistic'),
  # How much each term is believed: `names` selects, several multiply.
  'correction': {
    'names': (),
    'clipping_bias': {
      'norm': 'coefficient',  # coefficient | gradient
      'tau': 3.0,  # coefficient: scale by 1/rho only above this rho
      'scope': 'minibatch',  # minibatch | microbatch | sequence | turn
      'level': 'token',  # ratio in the sets: token | turn
      'applies_to': ('policy',),  # losses that are scaled
      'floor': 1.0,  # gradient: least norm that is divided by
    },
    # Of k = trainer's old policy / sampler; level: token | sequence.
    'tis': {
      'cap': 2.0,
      'level': 'token',
      'truncated': 'mismatch',  # mismatch: k | product: k times the ratio
    },
    'mis': {'cap': 2.0, 'level': 'token'},
    'icepop': {'least': 0.5, 'most': 5.0},
    'geo_rs': {'band': 0.001},  # of the sequence's mean log k
  },
  'aggregate': block('aggregate', 'token_mean'),
  'advantage': block('advantage', 'gae'),
  'kl': {
    'where': 'reward',  # reward | loss | nowhere
    'estimator': 'k1',  # k1 | k2 | k3
    'coefficient': 0.001,
    'controller': 'fixed',  # fixed | adaptive
    'target': 6.0,  # adaptive: nats per trajectory
    'horizon': 10000.0,  # adaptive: trajectories
  },
}


def _row(**changes):
  """The token PPO row with the given leaves changed, merged block by block.

  A block of another name replaces the whole block.
  """
  row = copy.deepcopy(_TOKEN_PPO)
  _merge(row, changes)
  return row


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
_GROUP = {'advantage': block('advantage', 'group_normalized')}
_SEQUENCE_MEAN = {'aggregate': block('aggregate', 'sequence_mean')}
_SEQUENCE_SUM = {'aggregate': block('aggregate', 'sequence_sum')}
_UNCLIPPED = {'objective': block('objective', 'unclipped')}
_GSPO_BOUNDS = {
  'bounds': block('bounds', 'fixed', clip_low=3e-4, clip_high=4e-4)
}


ALGORITHMS = {
  # The subject: arXiv 2511.20718.
  'token_ppo': _row(),
  'turn_ppo': _row(**_TURN),
  's_ppo': _row(**_BIAS),
  'st_ppo': _row(**_TURN, **_BIAS),
  # What version 2 of the paper calls it, and its group form.
  'so_ppo': _row(**_TURN, **_BIAS),
  'so_grpo': _row(
    **_TURN,
    correction={
      'names': ('clipping_bias',),
      'clipping_bias': {'scope': 'sequence'},
    },
    **_GROUP,
    **_KL_IN_LOSS,
  ),
  # Its neighbours.
  'bilevel_ppo': _row(advantage=block('advantage', 'gae', steps='bilevel')),
  'grpo': _row(**_GROUP, **_SEQUENCE_MEAN, **_KL_IN_LOSS),
  'dr_grpo': _row(
    advantage=block('advantage', 'group_centered'),
    aggregate=block('aggregate', 'constant_length'),
    **_NO_KL,
  ),
  'dapo': _row(
    bounds=block('bounds', 'fixed', clip_high=0.28), **_GROUP, **_NO_KL
  ),
  'gspo': _row(
    **_SEQUENCE, **_GSPO_BOUNDS, **_GROUP, **_SEQUENCE_MEAN, **_NO_KL
  ),
  'gspo_token': _row(
    ratio={'level': 'sequence', 'gradient': 'token'},
    **_GSPO_BOUNDS,
    **_GROUP,
    **_SEQUENCE_MEAN,
    **_NO_KL,
  ),
  'sspo': _row(
    ratio={'level': 'sentence'},
    bounds=block('bounds', 'entropy_scaled'),
    **_GROUP,
    **_SEQUENCE_MEAN,
    **_NO_KL,
  ),
  'bapo': _row(bounds=block('bounds', 'balanced'), **_GROUP, **_NO_KL),
  'cispo': _row(
    bounds=block('bounds', 'fixed', clip_low=1.0, clip_high=0.28),
    objective=block('objective', 'detached'),
    **_GROUP,
    **_NO_KL,
  ),
  'reinforce': _row(
    **_UNCLIPPED,
    **_SEQUENCE_SUM,
    advantage=block('advantage', 'monte_carlo'),
    **_NO_KL,
  ),
  'rloo': _row(
    **_UNCLIPPED,
    **_SEQUENCE_SUM,
    advantage=block('advantage', 'leave_one_out'),
    kl={'where': 'reward', 'estimator': 'k1'},
  ),
  'minirl': _row(
    bounds=block('bounds', 'fixed', clip_high=0.27),
    objective=block('objective', 'masked'),
    correction={
      'names': ('tis',),
      'tis': {'cap': 5.0, 'truncated': 'product'},
    },
    **_SEQUENCE_SUM,
    advantage=block('advantage', 'group_centered'),
    **_NO_KL,
  ),
  'grpo_guard': _row(  # experimental
    ratio={'normalize': 'guard'},
    aggregate=block('aggregate', 'turn_mean'),
    **_GROUP,
    **_NO_KL,
  ),
  'mt_grpo': _row(
    advantage=block('advantage', 'turn_group'),
    **_SEQUENCE_MEAN,
    **_KL_IN_LOSS,
  ),
  'gigpo': _row(
    advantage=block('advantage', 'gigpo'), **_SEQUENCE_MEAN, **_KL_IN_LOSS
  ),
}

# Estimators that compare the trajectories of one question, and all that need
# no value model.
GROUP_ADVANTAGES = frozenset(
  {
    'group_normalized',
    'group_centered',
    'leave_one_out',
    'turn_group',
    'gigpo',
  }
)
WITHOUT_CRITIC = GROUP_ADVANTAGES | {'monte_carlo'}

# How rows whose advantages compare are collected; `so_grpo` as in its reference
# run, 512 questions of 5 trajectories.
ROLLOUTS = {
  name: {'group_size': 8}
  for name, row in ALGORITHMS.items()
  if row['advantage']['name'] in GROUP_ADVANTAGES
} | {'so_grpo': {'group_size': 5, 'trajectories_per_step': 2560}}
