"""Our rows against public implementations, on the same arrays.

The numbers are those of verl, trl and tunix, made by
tests/golden/make_family.py; a failing test here means that our mathematics
changed. Ours run jitted, in float64, with NaN and inf off the mask.

Where theirs is another formula, the case says so and aligns it. Three things
hold for all: trl's means over rows count a row without tokens as one of zeros,
ours leave it out; verl and tunix add 1e-8 to counts; verl gives the lone
trajectory of a question its raw reward as advantage, where ours is 0.

Of what they have, no row of ours is verl's GMPO, SAPO, DPPO, DRO and
covariance clips, nor trl's SAPO and VESPO. Of what we have, they lack the
clipping bias, BAPO, SSPO, GRPO-Guard, MT-GRPO, GiGPO, and GAE over turns.
"""

import collections
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import algorithms
from stppo_jax import batch as batch_lib
from stppo_jax.rl import advantages as advantages_lib
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import losses
from stppo_jax.rl import masking
from tests.rl import batches

_FAMILY = pathlib.Path(__file__).parents[1] / 'golden' / 'family'
_OPTIONS = json.loads((_FAMILY / 'sources.json').read_text())['options']
T = 4
TOLERANCE = {'rtol': 1e-6, 'atol': 1e-9}


def _load(name):
  with np.load(_FAMILY / f'{name}.npz') as file:
    return dict(file)


def _cases(source):
  cases = collections.defaultdict(dict)
  for key, x in _load(source).items():
    case, name = key.split('.')
    cases[f'{source}.{case}'][name] = x
  return dict(cases)


ARRAYS = _load('arrays')
MASK = ARRAYS['loss_mask_BL']
GOLDEN = _cases('verl') | _cases('trl') | _cases('tunix')
ROWS = MASK.any(1)
LONE_ROW = 6  # the only trajectory of its question


def _poisoned(**changes):
  """The arrays, NaN or inf in every slot off the mask of the float ones."""
  column_L = np.arange(MASK.shape[1])
  poison_BL = np.broadcast_to(
    np.where(column_L % 2, np.inf, np.nan), MASK.shape
  )
  arrays = {
    name: x
    for name, x in {**ARRAYS, **changes}.items()
    if name.endswith('_BL') or name == 'group_ids_B'
  }
  return {
    name: np.where(MASK, x, poison_BL) if x.dtype == float else x
    for name, x in arrays.items()
  }


def _batch(arrays):
  chosen = {
    name: x
    for name, x in arrays.items()
    if name in batch_lib.TokenBatch.__dataclass_fields__
  }
  # `values_BL` of the batch is V before the first update.
  chosen['values_BL'] = arrays['old_values_BL']
  return batch_lib.TokenBatch(
    tokens_BL=jnp.zeros(MASK.shape, jnp.int32),
    lengths_B=jnp.full(MASK.shape[:1], MASK.shape[1], jnp.int32),
    **{name: jnp.asarray(x) for name, x in chosen.items()},
  )


def _close(ours, theirs, mask=True):
  ours, theirs = np.asarray(ours), np.asarray(theirs)
  np.testing.assert_allclose(
    np.where(mask, ours, 0),
    np.where(mask, theirs, 0),
    **TOLERANCE,
    err_msg='tests/golden/make_family.py remakes these numbers',
  )


def _fixed(low='low', high='high'):
  return algorithms.block(
    'bounds', 'fixed', clip_low=_OPTIONS[low], clip_high=_OPTIONS[high]
  )


def _aggregate(name, **options):
  return {'aggregate': algorithms.block('aggregate', name, **options)}


def _objective(name, **options):
  return {'objective': algorithms.block('objective', name, **options)}


def _kl(estimator):
  return {
    'kl__where': 'loss',
    'kl__estimator': estimator,
    'kl__coefficient': _OPTIONS['kl_coefficient'],
  }


def _correct(*names, **options):
  return {'correction__names': names} | {
    f'correction__{name}': x for name, x in options.items()
  }


PLAIN = {'bounds': _fixed(), 'kl__where': 'nowhere'}
NEAR = {'bounds': _fixed('sequence_low', 'sequence_high')}
CAP = _OPTIONS['cap']
DUAL_CLIP = _objective('dual_clip', c=_OPTIONS['dual_clip'])
UNCLIPPED = _objective('unclipped')
CISPO = {
  'bounds': algorithms.block(
    'bounds', 'fixed', clip_low=1.0, clip_high=_OPTIONS['high']
  ),
  **_objective('detached'),
}
TIS = _correct('tis', tis__cap=CAP)
GEO_RS = {'correction__geo_rs__band': _OPTIONS['band']}

# Rows of the table, and the options that theirs are told.
POLICIES = {
  'verl.token_mean': ('dapo', {}),
  'verl.sequence_mean': ('token_ppo', _aggregate('sequence_mean')),
  'verl.sequence_sum': ('token_ppo', _aggregate('sequence_sum')),
  'verl.constant_length': (
    'dr_grpo',
    _aggregate('constant_length', max_response_tokens=float(MASK.shape[1])),
  ),
  'verl.dual_clip': ('token_ppo', DUAL_CLIP),
  'verl.gspo_token': ('gspo_token', NEAR),
  # A turn as a row of its own, its gradient through the token.
  'verl.turn_token': ('turn_ppo', {'ratio__gradient': 'token'}),
  'verl.turn_token_mean': (
    'turn_ppo',
    {'ratio__gradient': 'token', **_aggregate('turn_mean')},
  ),
  'verl.cispo': ('cispo', CISPO),
  'verl.reinforce': ('reinforce', {}),
  'verl.unclipped': ('reinforce', {}),
  'verl.unclipped_product': (
    'reinforce',
    _correct('tis', tis__cap=CAP, tis__truncated='product'),
  ),
  # Two public pieces: PPO says which tokens are cut, REINFORCE weighs.
  'verl.minirl': (
    'minirl',
    {'correction__tis__cap': _OPTIONS['minirl_cap']},
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
      icepop__least=_OPTIONS['icepop_least'],
      icepop__most=_OPTIONS['icepop_most'],
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
      max_response_tokens=float(_OPTIONS['max_response_tokens']),
    ),
  ),
  'trl.dapo': ('dapo', {}),
  'trl.cispo': ('cispo', CISPO),
  # With a bound above 1 + high, what it calls delta is c.
  'trl.two_sided': ('token_ppo', DUAL_CLIP),
  'trl.gspo': ('gspo', NEAR),
  'trl.luspo': ('gspo', NEAR | _aggregate('sequence_sum')),
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
    _aggregate('constant_length', max_response_tokens=float(MASK.shape[1]))
    | _kl('k3'),
  ),
  'tunix.sequence_sum': ('token_ppo', _aggregate('sequence_sum') | _kl('k3')),
  'tunix.gspo_token': ('gspo_token', NEAR),
}

ALL_ROWS_COUNT = (
  'trl.grpo',
  'trl.dr_grpo',
  'trl.gspo',
  'trl.luspo',
  'trl.rloo',
)
ENTROPY = ('verl.kl_k1', 'verl.kl_k2', 'verl.kl_k3', 'trl.bnpo')


@functools.partial(jax.jit, static_argnames='num_turns')
def _policy_loss(algorithm, arrays, entropy_coefficient, num_turns):
  batch = _batch(arrays)

  def loss(logprobs_BL):
    out = losses.policy_loss(
      algorithm,
      logprobs_BL,
      arrays['entropy_BL'],
      batch,
      statistics=None,
      count=None,
      entropy_coefficient=entropy_coefficient,
      num_turns=num_turns,
    )
    return out.loss, out

  return jax.grad(loss, has_aux=True)(arrays['logprobs_BL'])


def _scale(case):
  """What their loss is multiplied by to have our denominator."""
  if case in ALL_ROWS_COUNT:
    return ROWS.size / ROWS.sum()
  if case.endswith('geo_rs'):  # verl: rejected tokens leave the count too
    return GOLDEN[case]['kept_BL'].sum() / MASK.sum()
  return 1.0


def _changes(case):
  if case == 'verl.reinforce':  # it knows no old policy
    return {'old_logprobs_BL': ARRAYS['logprobs_BL']}
  if case == 'trl.rloo':
    advantages_BL = np.broadcast_to(ARRAYS['advantages_B'][:, None], MASK.shape)
    return {'advantages_BL': advantages_BL}
  return {}


@pytest.mark.parametrize('case', POLICIES)
def test_the_loss_and_its_gradient_are_theirs(case):
  row, changes = POLICIES[case]
  golden = GOLDEN[case]
  coefficient = _OPTIONS['entropy_coefficient'] if case in ENTROPY else 0.0
  gradient_BL, out = _policy_loss(
    batches.algorithm(row, **{**PLAIN, **changes}),
    _poisoned(**_changes(case)),
    coefficient,
    T,
  )
  _close(out.loss, _scale(case) * golden['loss'])
  _close(gradient_BL, _scale(case) * golden['gradient_BL'])
  if 'cut_fraction' in golden:  # verl averages in float32
    cut = np.asarray(out.cut_BL)
    np.testing.assert_allclose(
      cut.sum() / MASK.sum(), golden['cut_fraction'], rtol=1e-6
    )
    assert 0.1 < golden['cut_fraction'] < 0.9


def test_every_golden_number_is_compared():
  compared = set(POLICIES) | set(VALUES) | set(ADVANTAGES) | OTHERS
  assert set(GOLDEN) == compared


VALUES = ('verl.value_loss', 'tunix.value_loss')


@pytest.mark.parametrize('case', VALUES)
def test_the_value_loss_is_theirs(case):
  arrays = _poisoned()

  @jax.jit
  def loss(values_BL):
    total, count, _ = losses.value_loss(
      values_BL,
      arrays['old_values_BL'],
      arrays['returns_BL'],
      MASK,
      clip=_OPTIONS['value_clip'],
    )
    return total / count

  value, gradient_BL = jax.value_and_grad(loss)(arrays['values_BL'])
  _close(value, GOLDEN[case]['loss'])
  _close(gradient_BL, GOLDEN[case]['gradient_BL'])


DECAYED = {'gamma': _OPTIONS['gamma'], 'lambda_': _OPTIONS['lambda_']}
ADVANTAGES = {
  'verl.gae': ('gae', {}),
  'verl.gae_decayed': ('gae', DECAYED),
  'verl.group_normalized': ('group_normalized', {}),
  'verl.group_centered': ('group_centered', {}),
  'verl.leave_one_out': ('leave_one_out', {}),
  # REINFORCE++ is the whitened return-to-go.
  'verl.monte_carlo': ('monte_carlo', {'gamma': _OPTIONS['gamma']}),
  'tunix.gae_decayed': ('gae', DECAYED),
  'tunix.group_normalized': ('group_normalized', {}),
  'tunix.group_centered': ('group_centered', {}),
  'tunix.leave_one_out': ('leave_one_out', {}),
}


@pytest.mark.parametrize('case', ADVANTAGES)
def test_the_advantages_are_theirs(case):
  name, changes = ADVANTAGES[case]
  golden = GOLDEN[case]
  options = algorithms.block('advantage', name, **changes)

  @jax.jit
  def estimate(arrays):
    return advantages_lib.estimate_advantages(
      arrays['rewards_BL'], _batch(arrays), num_turns=T, **options
    )

  ours = estimate(_poisoned())
  theirs_BL = np.zeros(MASK.shape)
  if 'advantages_B' in golden:  # tunix: of the questions with three rows
    theirs_BL[: golden['advantages_B'].size] = golden['advantages_B'][:, None]
  else:
    theirs_BL[:] = golden['advantages_BL']
  if name in algorithms.GROUP_ADVANTAGES:
    theirs_BL[LONE_ROW] = 0  # verl: its reward
  _close(ours.advantages_BL, theirs_BL, MASK)
  if 'returns_BL' in golden:
    _close(ours.returns_BL, golden['returns_BL'], MASK)


OTHERS = {'verl.whiten', 'verl.kl_reward', 'verl.adaptive_kl'}


def test_whitening_is_theirs():
  white_BL = jax.jit(masking.whiten)(_poisoned()['values_BL'], MASK)
  _close(white_BL, GOLDEN['verl.whiten']['white_BL'], MASK)


@pytest.mark.parametrize('estimator', kl_lib.KL_ESTIMATORS)
def test_the_estimates_of_the_divergence_are_theirs(estimator):
  arrays = _poisoned()
  kl_BL = kl_lib.kl_estimate(
    arrays['logprobs_BL'], arrays['ref_logprobs_BL'], MASK, estimator=estimator
  )
  _close(kl_BL, GOLDEN[f'verl.kl_{estimator}']['kl_BL'], MASK)
  assert np.max(kl_BL) < 10  # where verl clamps k3


def test_rewards_with_a_penalty_are_theirs():
  arrays = _poisoned()
  kl_BL = kl_lib.kl_estimate(
    arrays['old_logprobs_BL'], arrays['ref_logprobs_BL'], MASK, estimator='k1'
  )
  rewards_BL = kl_lib.penalized_rewards(
    arrays['rewards_BL'], kl_BL, MASK, coefficient=_OPTIONS['kl_coefficient']
  )
  _close(rewards_BL, GOLDEN['verl.kl_reward']['rewards_BL'], MASK)


def test_the_adaptive_coefficient_is_theirs():
  coefficient, coefficients = 0.1, []
  for kl in (6.0, 6.6, 60.0, 5.0, 0.0):
    coefficient = kl_lib.adaptive_coefficient(
      coefficient, kl, num_trajectories=512, target=6.0, horizon=1000.0
    )
    coefficients.append(coefficient)
  _close(coefficients, GOLDEN['verl.adaptive_kl']['coefficients'])
