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


# For each case an algorithm, and the options that the public one had.
POLICIES = {
  'verl.token_mean': ('dapo', {}),
  'verl.sequence_mean': ('token_ppo', _aggregate('sequence_mean')),
  'verl.sequence_sum': ('token_ppo', _aggregate('sequence_sum')),
  'verl.constant_length': (
    'dr_grpo',
    _aggregate('constant_length', max_response_tokens=LENGTH),
  ),
  'verl.dual_clip': ('token_ppo', DUAL_CLIP),
  'verl.gspo_token': ('gspo_token', NEAR),
  # There each turn is a row, and the gradient goes through the token.
  'verl.turn_token': ('turn_ppo', {'ratio__gradient': 'token'}),
  'verl.turn_token_mean': (
    'turn_ppo',
    {'ratio__gradient': 'token', **_aggregate('turn_mean')},
  ),
  'verl.cispo': ('cispo', CISPO),
  'verl.gmpo': (
    'gmpo',
    {
      'bounds': defaults.choice(
        'bounds',
        'fixed',
        clip_low=-math.expm1(-OPTIONS['geometric_clip']),
        clip_high=math.expm1(OPTIONS['geometric_clip']),
      )
    },
  ),
  'verl.dppo_tv': ('dppo_tv', _dppo('total_variation', 'probability')),
  'verl.dppo_kl': ('dppo_kl', _dppo('binary_kl', 'divergence')),
  'drpo.drpo': (
    'drpo',
    {
      **_objective('quadratic', threshold=OPTIONS['threshold']),
      **_aggregate('token_mean'),
    },
  ),
  'verl.sapo': ('sapo_gate', GATE),
  'verl.kl_cov': (
    'kl_cov',
    _objective(
      'kl_cov',
      share=OPTIONS['kl_cov_share'],
      coefficient=OPTIONS['kl_cov_coefficient'],
    ),
  ),
  'verl.clip_cov': (
    'clip_cov',
    _objective(
      'clip_cov',
      share=1.0,
      least=OPTIONS['clip_cov_least'],
      most=OPTIONS['clip_cov_most'],
    ),
  ),
  'verl.reinforce': ('reinforce', {}),
  'verl.unclipped': ('reinforce', {}),
  'verl.unclipped_product': (
    'reinforce',
    _correct('tis', tis__cap=CAP, tis__truncated='product'),
  ),
  # Two public losses: PPO defines which tokens are cut, REINFORCE the weights.
  'verl.minirl': (
    'minirl',
    {'correction__tis__cap': OPTIONS['minirl_cap']},
  ),
  'verl.tis': ('token_ppo', TIS),
  'verl.tis_sequence': (
    'token_ppo',
    TIS | {'correction__tis__level': 'sequence'},
  ),
  'verl.mis': ('token_ppo', _correct('mis', mis__cap=CAP)),
  'verl.mis_sequence': (
    'token_ppo',
    _correct('mis', mis__cap=CAP, mis__level='sequence'),
  ),
  'verl.icepop': (
    'token_ppo',
    _correct(
      'icepop',
      icepop__least=OPTIONS['icepop_least'],
      icepop__most=OPTIONS['icepop_most'],
    ),
  ),
  'verl.geo_rs': ('token_ppo', _correct('geo_rs') | GEO_RS),
  'verl.tis_geo_rs': (
    'token_ppo',
    TIS | GEO_RS | {'correction__names': ('tis', 'geo_rs')},
  ),
  'verl.kl_k1': ('token_ppo', _kl('k1')),
  'verl.kl_k2': ('token_ppo', _kl('k2')),
  'verl.kl_k3': ('token_ppo', _kl('k3')),
  'trl.grpo': ('grpo', _kl('k3')),
  'trl.bnpo': ('token_ppo', {}),
  'trl.dr_grpo': (
    'dr_grpo',
    _aggregate(
      'constant_length',
      max_response_tokens=float(OPTIONS['max_response_tokens']),
    ),
  ),
  'trl.dapo': ('dapo', {}),
  'trl.cispo': ('cispo', CISPO),
  # With a bound above 1 + high, its delta is our c.
  'trl.two_sided': ('token_ppo', DUAL_CLIP),
  'trl.gspo': ('gspo', NEAR),
  'trl.luspo': ('gspo', NEAR | _aggregate('sequence_sum')),
  'trl.sapo': ('sapo_gate', GATE),
  'trl.vespo': (
    'vespo',
    _objective(
      'gamma_weighted',
      power_positive=POSITIVE[0],
      decay_positive=POSITIVE[1],
      power_negative=NEGATIVE[0],
      decay_negative=NEGATIVE[1],
    ),
  ),
  'atpo.atpo': ('atpo', NEAR),
  'trl.turn': ('turn_ppo', {}),
  'trl.turn_mean': ('turn_ppo', _aggregate('turn_mean')),
  # PPO on the product of a row's ratios; our `rloo` does not clip.
  'trl.rloo': (
    'token_ppo',
    {
      'ratio__level': 'sequence',
      'ratio__reduce': 'sum',
      **_aggregate('sequence_mean'),
    },
  ),
  'tunix.ppo': ('token_ppo', DUAL_CLIP | _kl('k1')),
  'tunix.token_mean': ('dapo', _kl('k2')),
  'tunix.grpo': ('grpo', _kl('k3')),
  'tunix.constant_length': (
    'dr_grpo',
    _aggregate('constant_length', max_response_tokens=LENGTH) | _kl('k3'),
  ),
  'tunix.sequence_sum': ('token_ppo', _aggregate('sequence_sum') | _kl('k3')),
  'tunix.gspo_token': ('gspo_token', NEAR),
}
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
