"""The default options of every choice that an algorithm is made of.

The defaults are not in the modules of the functions that take the options, so
that reading a config does not import jax. The defaults of the other sections of
an algorithm are the options of `token_ppo` in `algorithms.py`.
"""

import math

# The default options of every choice, for the sections whose options depend on
# the name of the choice.
DEFAULTS = {
  # The trusted interval of the ratio.
  'bounds': {
    # [1 - clip_low, 1 + clip_high]
    'fixed': {'clip_low': 0.2, 'clip_high': 0.2},
    # Both distances are multiplied by n^-exponent, where n is the number of
    # policy tokens of the ratio's segment.
    'by_length': {'clip_low': 0.2, 'clip_high': 0.2, 'exponent': 0.5},
    # Both distances are multiplied by 1 + strength (2 sigmoid(z) - 1). For turn
    # k of a row, z is the reward of the turn, normalised over the turns k of
    # the question's rows. A last turn has z = 0 and is left out of other turns'
    # normalisation.
    'by_reward': {'clip_low': 3e-3, 'clip_high': 4e-3, 'strength': 0.3},
    # How far a token's probability may fall and rise.
    'total_variation': {'fall': 0.15, 'rise': 0.15},
    # The largest divergence, in nats, of the distribution over "this token" and
    # "another token", for a probability that falls and for one that rises.
    'binary_kl': {'fall': 0.05, 'rise': 0.05},
    # Both distances are multiplied by clip(H / mean H, least, most), where H is
    # the mean entropy of the ratio's segment.
    'entropy_scaled': {
      'clip_low': 0.2,
      'clip_high': 0.2,
      'least': 0.5,
      'most': 2.0,
    },
    # Absolute bounds. First the upper and then the lower bound is raised, at
    # most to its limit, until the terms with a positive advantage sum to at
    # least positive_share times the sum of the absolute values of all terms.
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
  # The objective: how a token counts inside and outside the trusted interval.
  'objective': {
    'pessimistic': {},
    'dual_clip': {'c': 3.0},  # the largest ratio that counts where A < 0
    'geometric': {},
    # The temperatures of the gate, for tokens with A > 0 and for other tokens.
    'soft_gate': {'tau_positive': 1.0, 'tau_negative': 1.05},
    # The loss term of a token is -A r + |A| pi_old (r - 1)^2 / (2 threshold).
    'quadratic': {'threshold': 12.5},
    'detached': {},
    'masked': {'cap': math.inf},  # the largest weight of a token
    'unclipped': {},
    'tapered': {},
    # The weight of a token is r^power exp(decay (1 - r)), with the first two
    # options if A >= 0 and the last two if A < 0.
    'gamma_weighted': {
      'power_positive': 2.0,
      'decay_positive': 3.0,
      'power_negative': 3.0,
      'decay_negative': 2.0,
    },
    # The gradient of some policy tokens is cut: `share` of all policy tokens,
    # drawn from the tokens whose covariance of advantage and log-probability is
    # between `least` and `most`.
    'clip_cov': {'share': 2e-4, 'least': 1.0, 'most': 5.0},
    # This share of the policy tokens, with the highest covariance, gets a
    # penalty coefficient * |log r|.
    'kl_cov': {'share': 2e-4, 'coefficient': 1.0},
    # Trajectories whose outcome is `least` or more are imitated, too. The
    # outcome is the sum of all rewards on the last token, so search_penalty and
    # overlong lower it. If no outcome reaches `least`, nothing is imitated. The
    # metric actor/imitated shows the share that is imitated.
    'positive_examples': {'coefficient': 0.1, 'least': 1.0},
  },
  # How the loss terms of all tokens become a scalar.
  'aggregate': {
    'token_mean': {},
    'turn_mean': {},
    'sequence_mean': {},
    'sequence_sum': {},
    'constant_length': {'max_response_tokens': 4096.0},
  },
  # How advantages are estimated. `whiten` names the tokens over which they are
  # whitened: none | policy | all (policy tokens and observation tokens).
  'advantage': {
    'gae': {
      'gamma': 1.0,
      'lambda_': 1.0,
      # Discount and trace decay over turns, if steps is bilevel.
      'gamma_turn': 0.95,
      'lambda_turn': 1.0,
      'steps': 'token',  # token | turn | bilevel
      # Whether observation tokens are steps, if steps is token: skipped |
      # included (as in the reference implementation).
      'observation_tokens': 'skipped',
      # The tokens at which the value model is trained: the steps that are
      # policy tokens (policy), or all steps (response). If observation tokens
      # are included, and gamma or lambda_ is not 1, it must be response.
      'critic_tokens': 'policy',
      'whiten': 'policy',
    },
    # GAE over policy tokens, with a separate lambda for the value model.
    'decoupled_gae': {
      'gamma': 1.0,
      'lambda_': 1.0,
      'lambda_critic': 1.0,
      # lambda_ is multiplied by 1 - 1 / (alpha * n), where n is the number of
      # policy tokens of the row.
      'alpha': math.inf,
      # The baseline of the policy's advantages: critic (the values) | explained
      # (the values only if their explained variance is positive).
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
      # Whether outcomes and rewards of turns are normalised together (joint) or
      # separately (separate).
      'pool': 'joint',
      'gamma': 1.0,
      'epsilon': 1e-6,
      'whiten': 'none',
    },
    'gigpo': {
      'omega': 1.0,  # weight of the advantage among turns
      'outcome_weight': 1.0,  # weight of the advantage among trajectories
      'gamma': 0.95,  # discount per turn
      # Turns are compared if their own states and h earlier states are equal,
      # for each h from 0 to history. The comparison with h earlier states has
      # the weight (h + 2)^power.
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

# Maps an option to the value with which runs behave as they did before the
# option existed.
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
  """Returns a dict with the name and all options of a choice.

  Args:
    kind: the section of the choice, a key of `DEFAULTS`.
    name: the name of the choice, a key of `DEFAULTS[kind]`.
    **changes: options that differ from their defaults.
  """
  return {'name': name, **DEFAULTS[kind][name], **changes}
