"""Algorithms of our table for the cases of tests/golden/family.

A case is `SOURCE.CASE` as in the files there. It has the name of an algorithm,
and changes that give it the options that the public implementation had.
"""

import json
import math
import pathlib

from stppo_jax.configs import defaults

FAMILY = pathlib.Path(__file__).parents[1] / 'golden' / 'family'
OPTIONS = json.loads((FAMILY / 'sources.json').read_text())['options']
LENGTH = 32.0  # max_response_tokens


def _fixed(low='low', high='high'):
  return defaults.choice(
    'bounds', 'fixed', clip_low=OPTIONS[low], clip_high=OPTIONS[high]
  )


def _aggregate(name, **options):
  return {'aggregate': defaults.choice('aggregate', name, **options)}


def _objective(name, **options):
  return {'objective': defaults.choice('objective', name, **options)}


def _kl(estimator):
  return {
    'kl__where': 'loss',
    'kl__estimator': estimator,
    'kl__coefficient': OPTIONS['kl_coefficient'],
  }


def _correct(*names, **options):
  return {'correction__names': names} | {
    f'correction__{name}': x for name, x in options.items()
  }


PLAIN = {'bounds': _fixed(), 'kl__where': 'nowhere'}
NEAR = {'bounds': _fixed('sequence_low', 'sequence_high')}
CAP = OPTIONS['cap']
DUAL_CLIP = _objective('dual_clip', c=OPTIONS['dual_clip'])
CISPO = {
  'bounds': defaults.choice(
    'bounds', 'fixed', clip_low=1.0, clip_high=OPTIONS['high']
  ),
  **_objective('detached'),
}
TIS = _correct('tis', tis__cap=CAP)
GEO_RS = {'correction__geo_rs__band': OPTIONS['band']}

POSITIVE, NEGATIVE = OPTIONS['gamma_positive'], OPTIONS['gamma_negative']
GATE = _objective(
  'soft_gate',
  tau_positive=OPTIONS['tau_positive'],
  tau_negative=OPTIONS['tau_negative'],
)


def _dppo(bounds, what):
  """Returns the changes of DPPO with a token mean and its limits."""
  limits = {'fall': OPTIONS[f'{what}_low'], 'rise': OPTIONS[f'{what}_high']}
  return {
    'bounds': defaults.choice('bounds', bounds, **limits),
    **_objective('masked', cap=OPTIONS['weight_cap']),
    **_aggregate('token_mean'),
  }


def _by_case(**cases_of_algorithm):
  """Returns (algorithm, changes) by case."""
  return {
    case: (name, changes)
    for name, cases in cases_of_algorithm.items()
    for case, changes in cases.items()
  }


GMPO = {
  'clip_low': -math.expm1(-OPTIONS['geometric_clip']),
  'clip_high': math.expm1(OPTIONS['geometric_clip']),
}
BOTH = TIS | GEO_RS | {'correction__names': ('tis', 'geo_rs')}
TOKEN = {'ratio__gradient': 'token'}
PRODUCT = {'ratio__level': 'sequence', 'ratio__reduce': 'sum'}
RESPONSE = float(OPTIONS['max_response_tokens'])
CONSTANT = _aggregate('constant_length', max_response_tokens=LENGTH)

# For each case an algorithm, and the options that the public one had.
POLICIES = _by_case(
  token_ppo={
    'verl.sequence_mean': _aggregate('sequence_mean'),
    'verl.sequence_sum': _aggregate('sequence_sum'),
    'verl.dual_clip': DUAL_CLIP,
    'verl.tis': TIS,
    'verl.tis_sequence': TIS | {'correction__tis__level': 'sequence'},
    'verl.mis': _correct('mis', mis__cap=CAP),
    'verl.mis_sequence': _correct('mis', mis__cap=CAP, mis__level='sequence'),
    'verl.icepop': _correct(
      'icepop',
      icepop__least=OPTIONS['icepop_least'],
      icepop__most=OPTIONS['icepop_most'],
    ),
    'verl.geo_rs': _correct('geo_rs') | GEO_RS,
    'verl.tis_geo_rs': BOTH,
    'verl.kl_k1': _kl('k1'),
    'verl.kl_k2': _kl('k2'),
    'verl.kl_k3': _kl('k3'),
    'trl.bnpo': {},
    # With a bound above 1 + high, its delta is our c.
    'trl.two_sided': DUAL_CLIP,
    # PPO on the product of a row's ratios; our `rloo` does not clip.
    'trl.rloo': PRODUCT | _aggregate('sequence_mean'),
    'tunix.ppo': DUAL_CLIP | _kl('k1'),
    'tunix.sequence_sum': _aggregate('sequence_sum') | _kl('k3'),
  },
  dapo={'verl.token_mean': {}, 'trl.dapo': {}, 'tunix.token_mean': _kl('k2')},
  grpo={'trl.grpo': _kl('k3'), 'tunix.grpo': _kl('k3')},
  dr_grpo={
    'verl.constant_length': CONSTANT,
    'trl.dr_grpo': _aggregate('constant_length', max_response_tokens=RESPONSE),
    'tunix.constant_length': CONSTANT | _kl('k3'),
  },
  gspo={'trl.gspo': NEAR, 'trl.luspo': NEAR | _aggregate('sequence_sum')},
  gspo_token={'verl.gspo_token': NEAR, 'tunix.gspo_token': NEAR},
  turn_ppo={
    # There each turn is a row, and the gradient of verl goes through the token.
    'verl.turn_token': TOKEN,
    'verl.turn_token_mean': TOKEN | _aggregate('turn_mean'),
    'trl.turn': {},
    'trl.turn_mean': _aggregate('turn_mean'),
  },
  atpo={'atpo.atpo': NEAR},
  cispo={'verl.cispo': CISPO, 'trl.cispo': CISPO},
  gmpo={'verl.gmpo': {'bounds': defaults.choice('bounds', 'fixed', **GMPO)}},
  dppo_tv={'verl.dppo_tv': _dppo('total_variation', 'probability')},
  dppo_kl={'verl.dppo_kl': _dppo('binary_kl', 'divergence')},
  drpo={
    'drpo.drpo': _objective('quadratic', threshold=OPTIONS['threshold'])
    | _aggregate('token_mean')
  },
  sapo_gate={'verl.sapo': GATE, 'trl.sapo': GATE},
  vespo={
    'trl.vespo': _objective(
      'gamma_weighted',
      power_positive=POSITIVE[0],
      decay_positive=POSITIVE[1],
      power_negative=NEGATIVE[0],
      decay_negative=NEGATIVE[1],
    )
  },
  kl_cov={
    'verl.kl_cov': _objective(
      'kl_cov',
      share=OPTIONS['kl_cov_share'],
      coefficient=OPTIONS['kl_cov_coefficient'],
    )
  },
  clip_cov={
    'verl.clip_cov': _objective(
      'clip_cov',
      share=1.0,
      least=OPTIONS['clip_cov_least'],
      most=OPTIONS['clip_cov_most'],
    )
  },
  reinforce={
    'verl.reinforce': {},
    'verl.unclipped': {},
    'verl.unclipped_product': TIS | {'correction__tis__truncated': 'product'},
  },
  # Two public losses: PPO defines which tokens are cut, REINFORCE the weights.
  minirl={'verl.minirl': {'correction__tis__cap': OPTIONS['minirl_cap']}},
)
# Cases whose mean over rows counts the row without tokens.
ALL_ROWS_COUNT = (
  'verl.gmpo',
  'trl.sapo',
  'trl.grpo',
  'trl.dr_grpo',
  'trl.gspo',
  'trl.luspo',
  'trl.rloo',
)
# Cases with an entropy bonus.
ENTROPY = ('verl.kl_k1', 'verl.kl_k2', 'verl.kl_k3', 'trl.bnpo')

VALUES = ('verl.value_loss', 'tunix.value_loss')

DECAYED = {'gamma': OPTIONS['gamma'], 'lambda_': OPTIONS['lambda_']}
ADVANTAGES = {
  'verl.gae': ('gae', {}),
  'verl.gae_decayed': ('gae', DECAYED),
  'verl.group_normalized': ('group_normalized', {}),
  'verl.group_centered': ('group_centered', {}),
  'verl.leave_one_out': ('leave_one_out', {}),
  # REINFORCE++ is the whitened return-to-go.
  'verl.monte_carlo': ('monte_carlo', {'gamma': OPTIONS['gamma']}),
  'nemo.gae_by_length': (
    'decoupled_gae',
    {
      'gamma': OPTIONS['gamma'],
      'lambda_critic': OPTIONS['lambda_'],
      'alpha': OPTIONS['alpha'],
      'whiten': 'none',
    },
  ),
  'tunix.gae_decayed': ('gae', DECAYED),
  'tunix.group_normalized': ('group_normalized', {}),
  'tunix.group_centered': ('group_centered', {}),
  'tunix.leave_one_out': ('leave_one_out', {}),
}

# The loss has its own test, with the advantages and the scales of this case.
OTHERS = (
  'a2tgpo.a2tgpo',
  'hgpo.centered',
  'verl.whiten',
  'verl.kl_reward',
  'verl.adaptive_kl',
  'igpo.joint',
  'igpo.separate',
)
