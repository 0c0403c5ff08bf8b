"""The default options of every choice that an algorithm is made of.

They are not beside the functions that take them, so that reading a config
imports no jax. The options of the other sections are those of `token_ppo` in
`algorithms.py`.
"""

import math

# The default options of every choice, for the sections whose options depend on
# their name.
DEFAULTS = {
  # The trusted interval of the ratio.
  'bounds': {
    # [1 - clip_low, 1 + clip_high]
    'fixed': {'clip_low': 0.2, 'clip_high': 0.2},
    # Both distances times n^-exponent, n the policy tokens of the segment.
    'by_length': {'clip_low': 0.2, 'clip_high': 0.2, 'exponent': 0.5},
    # Both distances times 1 + strength (2 sigmoid(z) - 1), z the reward of the
    # turn compared with those of turns of the same number.
    'by_reward': {'clip_low': 3e-3, 'clip_high': 4e-3, 'strength': 0.3},
    # How far a token's probability may fall and rise.
    'total_variation': {'fall': 0.15, 'rise': 0.15},
    # How far a token's distribution "this or another" may diverge, in nats.
    'binary_kl': {'fall': 0.05, 'rise': 0.05},
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
    'geometric': {},
    # The temperatures of the gate where A > 0, and elsewhere.
    'soft_gate': {'tau_positive': 1.0, 'tau_negative': 1.05},
    # -A r + |A| pi_old (r - 1)^2 / (2 threshold).
    'quadratic': {'threshold': 12.5},
    'detached': {},
    'masked': {'cap': math.inf},  # the largest weight
    'unclipped': {},
    'tapered': {},
    # Weights r^power exp(decay (1 - r)), where A >= 0 and where A < 0.
    'gamma_weighted': {
      'power_positive': 2.0,
      'decay_positive': 3.0,
      'power_negative': 3.0,
      'decay_negative': 2.0,
    },
    # A share of the tokens is cut whose covariance is between least and most.
    'clip_cov': {'share': 2e-4, 'least': 1.0, 'most': 5.0},
    # A share of the tokens gets a penalty coefficient * |log r|.
    'kl_cov': {'share': 2e-4, 'coefficient': 1.0},
    # Trajectories whose outcome is `least` or more are imitated, too. That is
    # the sum of all rewards on the last token: search_penalty and overlong
    # lower it, and if no outcome is so high nothing is imitated. The metric
    # actor/imitated tells the share.
    'positive_examples': {'coefficient': 0.1, 'least': 1.0},
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
    # GAE over policy tokens, with a lambda of its own for the critic.
    'decoupled_gae': {
      'gamma': 1.0,
      'lambda_': 1.0,
      'lambda_critic': 1.0,
      # lambda_ is multiplied by 1 - 1 / (alpha * policy tokens of the row).
      'alpha': math.inf,
      # Which baseline the policy has: critic | explained (the critic's only if
      # its explained variance is positive).
      'baseline': 'critic',
      'whiten': 'policy',
    },
    'monte_carlo': {'gamma': 1.0, 'whiten': 'policy'},
    'group_normalized': {'epsilon': 1e-6, 'whiten': 'none'},
    'group_centered': {'whiten': 'none'},
    'leave_one_out': {'whiten': 'none'},
    'turn_group': {'turn_weight': 1.0, 'epsilon': 1e-4, 'whiten': 'none'},
    'turn_leave_one_out': {'gamma': 1.0, 'whiten': 'none'},
    'turn_index': {
      'turn_weight': 0.3,
      'gamma': 1.0,
      'epsilon': 1e-6,
      'whiten': 'none',
    },
    'turn_pooled': {
      # Whether outcomes are compared with the rewards of turns, too: joint |
      # separate.
      'pool': 'joint',
      'gamma': 1.0,
      'epsilon': 1e-6,
      'whiten': 'none',
    },
    'gigpo': {
      'omega': 1.0,  # weight of the advantage among turns
      'outcome_weight': 1.0,  # weight of the advantage among trajectories
      'gamma': 0.95,  # discount per turn
      # The most earlier states by which turns are compared, beside their own
      # state. A comparison by n of them weighs (n + 1)^power.
      'history': 0,
      'power': 1.0,
      'normalize': 'std',  # std | none
      # How often an outcome counts in the statistics of its group: once for
      # each turn of its trajectory (per_turn), or once (per_trajectory).
      'outcome_counts': 'per_turn',
      'epsilon': 1e-6,
      'whiten': 'none',
    },
  },
}

# The values with which runs behaved that began before an option existed.
BEFORE = {
  'advantage.critic_tokens': 'policy',
  'advantage.history': 0,
  'advantage.outcome_counts': 'per_trajectory',
  'advantage.outcome_weight': 1.0,
  'advantage.power': 1.0,
  'correction.geo_rs.level': 'sequence',
  'correction.geo_rs.reduce': 'mean',
  'correction.icepop.level': 'token',
  'correction.icepop.reduce': 'sum',
  'correction.mis.reduce': 'sum',
  'correction.tis.reduce': 'sum',
  'objective.cap': math.inf,
}


def choice(kind: str, name: str, **changes: float | str) -> dict:
  """Returns a choice with the defaults of its options, some of them changed.

  Args:
    kind: a key of `DEFAULTS`.
    name: a key of `DEFAULTS[kind]`.
    **changes: options that differ from their defaults.
  """
  return {'name': name, **DEFAULTS[kind][name], **changes}
