"""Our algorithms against public implementations, on the same arrays.

The numbers are those of verl, trl and tunix, made by
tests/golden/make_family.py, and of AT2PO, NeMo-RL, IGPO, A2TGPO, HGPO and DRPO,
made by scripts beside it; a failing test means that our mathematics changed.
Ours run jitted, in float64, with NaN and inf off the mask.

Where theirs is another formula, the case has a comment and aligns it. Three
differences hold for all: trl's means over rows count a row without tokens as
one of zeros, ours leave it out; verl and tunix add 1e-8 to counts; verl gives
the lone trajectory of a question its raw reward as advantage, where ours is 0.

We lack verl's DRO. They lack the clipping bias, BAPO, SSPO, GRPO-Guard,
MT-GRPO, GiGPO, TOPR, EVPO, and GAE over turns.
"""

import collections
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax.rl import advantages as advantages_lib
from stppo_jax.rl import estimator_needs
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import masking
from stppo_jax.rl import turn_advantages
from stppo_jax.rl import values as values_lib
from tests.rl import batches
from tests.rl import golden_algorithms

T = 4
TOLERANCE = {'rtol': 1e-6, 'atol': 1e-9}


def _load(name):
  with np.load(golden_algorithms.FAMILY / f'{name}.npz') as file:
    return dict(file)


ARRAYS = _load('arrays')
MASK = ARRAYS['loss_mask_BL']
GOLDEN = collections.defaultdict(dict)
for path in golden_algorithms.FAMILY.glob('*.npz'):
  if path.stem != 'arrays':
    for key, array in _load(path.stem).items():
      case, name = key.split('.')
      GOLDEN[f'{path.stem}.{case}'][name] = array
ROWS = MASK.any(1)
LONE_ROW = 6  # the only trajectory of its question


def _poisoned(**changes):
  """Returns the arrays with NaN or inf off the mask of the float ones."""
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
    tokens_BL=np.zeros(MASK.shape, np.int32),
    lengths_B=np.full(MASK.shape[:1], MASK.shape[1], np.int32),
    **chosen,
  )


def _close(ours, theirs, mask=True):
  ours, theirs = np.asarray(ours), np.asarray(theirs)
  np.testing.assert_allclose(
    np.where(mask, ours, 0),
    np.where(mask, theirs, 0),
    **TOLERANCE,
    err_msg='tests/golden/make_family.py remakes these numbers',
  )


def _policy_loss(algorithm, arrays, with_entropy=False):
  """Returns the loss and its gradient by the log-probabilities."""
  entropy_BL = arrays['entropy_BL']
  if not with_entropy:
    entropy_BL = np.zeros_like(entropy_BL)
  out, (gradient_BL, _) = batches.loss_and_gradients(
    'segment_sum',
    algorithm,
    arrays['logprobs_BL'],
    entropy_BL,
    _batch(arrays),
  )
  return out, gradient_BL


def _scale(case):
  """Returns the factor that gives their loss our denominator."""
  if case in golden_algorithms.ALL_ROWS_COUNT:
    return ROWS.size / ROWS.sum()
  if case.endswith('geo_rs'):  # verl: rejected tokens leave the count too
    return GOLDEN[case]['kept_BL'].sum() / MASK.sum()
  return 1.0


def _changes(case):
  if case == 'verl.reinforce':  # it uses no old policy
    return {'old_logprobs_BL': ARRAYS['logprobs_BL']}
  if case == 'atpo.atpo':  # a turn ends where the mask does, so at holes too
    before_BL = np.pad(MASK[:, :-1], ((0, 0), (1, 0)))
    turn_ids_BL = np.cumsum(MASK & ~before_BL, axis=1, dtype=np.int32)
    return {'turn_ids_BL': np.where(MASK, turn_ids_BL, 0)}
  if case == 'trl.rloo':
    advantages_BL = np.broadcast_to(ARRAYS['advantages_B'][:, None], MASK.shape)
    return {'advantages_BL': advantages_BL}
  return {}


# Programs of their own that combine what those of other cases have.
_SLOW = (
  *('verl.tis_geo_rs', 'verl.mis_sequence', 'verl.unclipped_product'),
  *('verl.kl_k3', 'verl.turn_token_mean', 'trl.turn_mean', 'trl.luspo'),
  *('tunix.ppo', 'tunix.sequence_sum', 'tunix.constant_length'),
)


@pytest.mark.parametrize(
  'case',
  [
    pytest.param(x, marks=[pytest.mark.slow] if x in _SLOW else [])
    for x in golden_algorithms.POLICIES
  ],
)
def test_the_loss_and_its_gradient_are_theirs(case):
  name, changes = golden_algorithms.POLICIES[case]
  golden = GOLDEN[case]
  assert golden_algorithms.OPTIONS['entropy_coefficient'] == batches.ENTROPY
  out, gradient_BL = _policy_loss(
    batches.loss_algorithm(name, **{**golden_algorithms.PLAIN, **changes}),
    _poisoned(**_changes(case)),
    case in golden_algorithms.ENTROPY,
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
  compared = set().union(
    golden_algorithms.POLICIES,
    golden_algorithms.VALUES,
    golden_algorithms.ADVANTAGES,
    golden_algorithms.OTHERS,
  )
  assert set(GOLDEN) == compared


@jax.jit
@jax.value_and_grad
def _value_loss(values_BL, arrays):
  total, count, _ = values_lib.value_loss(
    values_BL,
    arrays['old_values_BL'],
    arrays['returns_BL'],
    MASK,
    clip=golden_algorithms.OPTIONS['value_clip'],
  )
  return total / count


@pytest.mark.parametrize('case', golden_algorithms.VALUES)
def test_the_value_loss_is_theirs(case):
  arrays = _poisoned()
  value, gradient_BL = _value_loss(arrays['values_BL'], arrays)
  _close(value, GOLDEN[case]['loss'])
  _close(gradient_BL, GOLDEN[case]['gradient_BL'])


_unbiased = masking.standardized


def _of_population(x, pairs, epsilon):
  """Returns x standardised with the deviation that IGPO and A2TGPO have."""
  n = jnp.sum(pairs, axis=-1)
  return _unbiased(x, pairs, epsilon) * jnp.sqrt(n / jnp.maximum(n - 1, 1))


@functools.partial(jax.jit, static_argnames='standardized')
def _estimate(advantage, batch, standardized=_unbiased):
  with mock.patch.object(masking, 'standardized', standardized):
    return advantages_lib.estimate_advantages(
      batch.rewards_BL,
      batch,
      num_turns=T,
      name=advantage.name,
      **advantage.arguments(),
    )


def _estimated(name, state_ids_BL=None, standardized=_unbiased, **changes):
  """Returns what an estimator makes of the rewards of the batch."""
  changes = {f'advantage__{key}': value for key, value in changes.items()}
  algorithm = batches.algorithm(
    advantage__name=name, kl__where='nowhere', **changes
  )
  batch = _batch(_poisoned()).replace(state_ids_BL=state_ids_BL)
  return jax.device_get(_estimate(algorithm.advantage, batch, standardized))


# Their deviation adds 1e-8 to a variance.
_near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('case', golden_algorithms.ADVANTAGES)
def test_the_advantages_are_theirs(case):
  name, changes = golden_algorithms.ADVANTAGES[case]
  golden = GOLDEN[case]
  ours = _estimated(name, **changes)
  theirs_BL = np.zeros(MASK.shape)
  if 'advantages_B' in golden:  # tunix: of the questions with three rows
    theirs_BL[: golden['advantages_B'].size] = golden['advantages_B'][:, None]
  else:
    theirs_BL[:] = golden['advantages_BL']
  if name in estimator_needs.GROUPS:
    theirs_BL[LONE_ROW] = 0  # verl: its reward
  _close(ours.advantages_BL, theirs_BL, MASK)
  if 'returns_BL' in golden:
    _close(ours.returns_BL, golden['returns_BL'], MASK)


@pytest.mark.parametrize('pool', ['joint', 'separate'])
def test_the_advantages_of_igpo_are_theirs(pool):
  ours_BL = _estimated(
    'turn_pooled',
    standardized=_of_population,
    gamma=golden_algorithms.OPTIONS['gamma'],
    pool=pool,
  ).advantages_BL
  theirs_BL = np.where(MASK, GOLDEN[f'igpo.{pool}']['advantages_BL'], 0)
  _near(ours_BL[:LONE_ROW], theirs_BL[:LONE_ROW])
  assert not ours_BL[LONE_ROW:].any()


# The widths change by no more than 0.3 there.
_STRENGTH = 0.3


def test_the_bounds_of_a2tgpo_are_theirs():
  golden = GOLDEN['a2tgpo.a2tgpo']
  z_BL = 2 * np.arctanh((golden['scales_BL'] - 1) / _STRENGTH)
  algorithm = batches.loss_algorithm(
    'a2tgpo',
    bounds__clip_low=golden_algorithms.OPTIONS['sequence_low'],
    bounds__clip_high=golden_algorithms.OPTIONS['sequence_high'],
    bounds__strength=_STRENGTH,
  )
  arrays = _poisoned(advantages_BL=golden['advantages_BL'], turn_z_BL=z_BL)
  out, gradient_BL = _policy_loss(algorithm, arrays)
  _close(out.loss, golden['loss'])
  _close(gradient_BL, golden['gradient_BL'])
  cut = np.asarray(out.cut_BL).sum() / MASK.sum()
  np.testing.assert_allclose(cut, golden['cut_fraction'])
  fixed, _ = _policy_loss(algorithm, {**arrays, 'turn_z_BL': 0 * z_BL})
  # The scales do something here.
  assert abs(float(fixed.loss) - float(out.loss)) > 1e-5


def test_the_advantages_and_scales_of_a2tgpo_are_theirs():
  golden = GOLDEN['a2tgpo.a2tgpo']
  ours_BL = _estimated(
    'turn_index',
    standardized=_of_population,
    gamma=golden_algorithms.OPTIONS['gamma'],
    turn_weight=golden_algorithms.OPTIONS['turn_weight'],
  ).advantages_BL
  with mock.patch.object(masking, 'standardized', _of_population):
    z_BL = jax.jit(
      lambda x: turn_advantages.turn_z(x.rewards_BL, x, num_turns=T)
    )(_batch(_poisoned()))
  scales_BL = 1 + _STRENGTH * np.tanh(np.asarray(z_BL) / 2)
  _near(scales_BL[MASK], golden['scales_BL'][MASK])
  _near(ours_BL[MASK], golden['advantages_BL'][MASK])
  assert np.abs(scales_BL[MASK] - 1).max() > 0.1


def test_the_advantages_of_hgpo_are_theirs():
  """They add epsilon to the sum of the weights, too; it is 0 there."""
  golden = GOLDEN['hgpo.centered']
  estimated = functools.partial(
    _estimated,
    'gigpo',
    state_ids_BL=golden['state_ids_BL'],
    normalize='none',
    outcome_weight=0.0,
    gamma=golden_algorithms.OPTIONS['gamma'],
  )
  history = golden_algorithms.OPTIONS['history']
  ours_BL = estimated(history=history).advantages_BL
  _close(ours_BL, golden['advantages_BL'], MASK)
  without_BL = estimated().advantages_BL
  assert np.abs(without_BL - ours_BL).max() > 0.01  # the history counts


def test_whitening_is_theirs():
  white_BL = jax.jit(masking.whiten)(_poisoned()['values_BL'], MASK)
  _close(white_BL, GOLDEN['verl.whiten']['white_BL'], MASK)


@jax.jit
def _divergences(arrays):
  """Returns the estimates by name, and the rewards with a penalty."""
  reference = arrays['ref_logprobs_BL'], MASK
  estimates = {
    estimator: kl_lib.kl_estimate(
      arrays['logprobs_BL'], *reference, estimator=estimator
    )
    for estimator in kl_lib.KL_ESTIMATORS
  }
  kl_BL = kl_lib.kl_estimate(
    arrays['old_logprobs_BL'], *reference, estimator='k1'
  )
  rewards_BL = kl_lib.penalized_rewards(
    arrays['rewards_BL'],
    kl_BL,
    MASK,
    coefficient=golden_algorithms.OPTIONS['kl_coefficient'],
  )
  return estimates, rewards_BL


@pytest.mark.parametrize('estimator', kl_lib.KL_ESTIMATORS)
def test_the_estimates_of_the_divergence_are_theirs(estimator):
  kl_BL = np.asarray(_divergences(_poisoned())[0][estimator])
  # That of verl is clamped, and no number of this batch is so large.
  case = f'verl.kl_{estimator.removesuffix("_clamped")}'
  _close(kl_BL, GOLDEN[case]['kl_BL'], MASK)
  assert np.max(kl_BL) < 10  # where verl clamps k3


def test_rewards_with_a_penalty_are_theirs():
  _, rewards_BL = _divergences(_poisoned())
  _close(rewards_BL, GOLDEN['verl.kl_reward']['rewards_BL'], MASK)


def test_the_adaptive_coefficient_is_theirs():
  coefficient, coefficients = 0.1, []
  for kl in (6.0, 6.6, 60.0, 5.0, 0.0):
    coefficient = kl_lib.adaptive_coefficient(
      coefficient, kl, num_trajectories=512, target=6.0, horizon=1000.0
    )
    coefficients.append(coefficient)
  _close(coefficients, GOLDEN['verl.adaptive_kl']['coefficients'])
