"""The table of algorithms: one row each, a row is plain data.

Five axes (ratio, bounds, objective, correction, aggregate), the advantage
estimator and the KL term. `stppo_jax/rl/algorithm.py` turns a row into
functions; no code asks for a row's name. Any option can be overridden, e.g.
`--config.algorithm.correction.clipping_bias.tau=5`.

Sources: arXiv 2511.20718 (token PPO, Turn-PPO, S-PPO, ST-PPO).
"""

import copy


def _row(**changes):
  """The token PPO row with the given leaves changed, merged block by block."""
  row = copy.deepcopy(_TOKEN_PPO)
  _merge(row, changes)
  return row


def _merge(target, changes):
  for key, value in changes.items():
    if isinstance(value, dict):
      _merge(target[key], value)
    else:
      target[key] = value


_TOKEN_PPO = {
  # Which tokens share one ratio (token, turn, sequence), where its gradient
  # goes (segment: through the segment's mean; token: each keeps its own),
  # and how a segment is reduced (mean: geometric mean of ratios; sum).
  'ratio': {'level': 'token', 'gradient': 'segment', 'reduce': 'mean'},
  # The trusted interval [1 - clip_low, 1 + clip_high].
  'bounds': {'name': 'fixed', 'clip_low': 0.2, 'clip_high': 0.2},
  # What happens outside it.
  'objective': {'name': 'pessimistic'},
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
  },
  # How tokens become a scalar: token_mean | turn_mean | sequence_mean.
  'aggregate': {'name': 'token_mean'},
  'advantage': {
    'name': 'gae',
    'gamma': 1.0,
    'lambda_': 1.0,
    'steps': 'token',  # token | turn
    # Of token steps: skipped | included (as in the reference run).
    'observation_tokens': 'skipped',
    'whiten': 'policy',  # none | policy
  },
  # where: reward | loss | nowhere; estimator: k1 | k2 | k3.
  'kl': {'where': 'reward', 'estimator': 'k1', 'coefficient': 0.001},
}

_BIAS = {'correction': {'names': ('clipping_bias',)}}
_TURN = {'ratio': {'level': 'turn'}}

ALGORITHMS = {
  'token_ppo': _row(),
  'turn_ppo': _row(**_TURN),
  's_ppo': _row(**_BIAS),
  'st_ppo': _row(**_TURN, **_BIAS),
  'so_ppo': _row(**_TURN, **_BIAS),  # what version 2 of the paper calls it
}
