import dataclasses

import jax
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import bounds
from stppo_jax.rl import loss_context
from tests.rl import batches

_BAPO = defaults.DEFAULTS['bounds']['balanced']
BOUNDS = bounds.BOUNDS


def _context(ratio, advantages, entropy=None, level='token', mask=None):
  """Returns a context with the given ratio at every level; one turn per row."""
  batch, _, _ = batches.make()
  mask = np.ones(ratio.shape, bool) if mask is None else mask
  batch = batch.replace(
    loss_mask_BL=mask,
    turn_ids_BL=mask.astype(np.int32),
    old_logprobs_BL=np.zeros(ratio.shape),
  )
  entropy = np.ones(ratio.shape) if entropy is None else entropy
  return loss_context.LossContext(
    lambda level: ratio,
    level,
    advantages,
    entropy,
    np.zeros(ratio.shape),
    batch,
    num_turns=1,
  )


@jax.jit
def _balanced(ratio, advantages, options):
  context = _context(ratio, advantages)
  found = BOUNDS['balanced'].statistics(context, **options)
  return BOUNDS['balanced'].function(context, found, **options)


def _interval(ratio, advantages, **changes):
  found = _balanced(np.array([ratio]), np.array([advantages]), _BAPO | changes)
  return np.asarray(found)


def test_enough_positive_terms_keep_the_start():
  low, high = _interval([1.0, 1.0], [1.0, -1.0])  # a share of one half
  np.testing.assert_allclose((low, high), (0.6, 1.2))


def test_after_high_low_grows_up_to_its_limit():
  # Without positive terms both bounds move to their limits.
  low, high = _interval([1.0, 1.0], [-1.0, -1.0])
  np.testing.assert_allclose((low, high), (0.9, 3.0))
  # Raising low enlarges the negative terms below it, so the share only falls,
  # and the limit ends the loop here too.
  low, high = _interval([1.0, 0.1], [0.1, -1.0], high_limit=1.2)
  np.testing.assert_allclose((low, high), (0.9, 1.2))


@pytest.mark.parametrize('advantages', [[0.0, 0.0], [1.0, 2.0]])
def test_without_negative_terms_the_start_is_kept(advantages):
  np.testing.assert_allclose(_interval([1.0, 3.0], advantages), (0.6, 1.2))


def test_a_step_below_the_rounding_reaches_its_limit():
  # The rules of the options refuse this; the loop must end even so.
  low, high = _interval([1.0, 1.0], [-1.0, -1.0], high_step=1e-12)
  np.testing.assert_allclose((low, high), (0.9, 1.2), rtol=1e-6)


def test_many_steps_end_exactly_at_the_limit():
  _, high = _interval([1.0, 1.0], [-1.0, -1.0], high_step=0.001)
  assert high == 3.0


def test_bounds_by_length_are_fixed_ones_of_tokens_and_without_an_exponent():
  batch, logprobs, entropy = batches.make(spread=0.6)
  pairs = []
  for level, exponent in (('token', 0.5), ('turn', 0.0), ('sequence', 0.0)):
    changes = {'ratio__level': level, 'bounds__clip_high': 0.3}
    by_length = {'bounds__name': 'by_length', 'bounds__exponent': exponent}
    pairs.append(
      (batches.algorithm(**changes), batches.algorithm(**by_length, **changes))
    )

  @jax.jit
  def run(pairs, *arrays):
    return [[batches.policy_loss(x, *arrays) for x in pair] for pair in pairs]

  for fixed, by_length in run(pairs, logprobs, entropy, batch):
    np.testing.assert_allclose(by_length.loss, fixed.loss, rtol=1e-14)
    np.testing.assert_array_equal(by_length.cut_BL, fixed.cut_BL)


def test_bounds_by_reward_by_hand():
  batch, logprobs, entropy = batches.make()
  z = np.log([3.0, 1.0, 1 / 3])  # sigmoid: 3/4, 1/2, 1/4
  batch = batch.replace(turn_z_BL=np.resize(z, batch.turn_ids_BL.shape))
  algorithm = batches.algorithm('a2tgpo', bounds__strength=0.5)
  found = jax.jit(batches.policy_loss)(algorithm, logprobs, entropy, batch)
  mask = batch.loss_mask_BL
  factors = np.resize([1.25, 1.0, 0.75], mask.shape)
  low, high = np.asarray(found.low), np.asarray(found.high)
  np.testing.assert_allclose(low[mask], 1 - 3e-3 * factors[mask])
  np.testing.assert_allclose(high[mask], 1 + 4e-3 * factors[mask])


def test_without_rewards_of_turns_bounds_by_reward_are_fixed_ones():
  batch, logprobs, entropy = batches.make(spread=0.01)
  zero = batch.replace(turn_z_BL=np.zeros(batch.turn_z_BL.shape))
  run = jax.jit(batches.policy_loss)
  algorithm = batches.algorithm('a2tgpo')
  fixed, same, other = (
    np.asarray(run(algorithm, logprobs, entropy, batch).loss)
    for algorithm, batch in (
      (batches.algorithm('atpo'), batch),
      (algorithm, zero),
      (algorithm, batch),
    )
  )
  np.testing.assert_allclose(same, fixed, rtol=1e-14)
  assert abs(other - fixed) > 1e-5


_OLD = np.log([[0.5, 0.001, 0.9, 1.0]])


@jax.jit
def _binary_kl(options):
  context = _context(np.ones((1, 4)), np.ones((1, 4)))
  batch = context.batch.replace(old_logprobs_BL=_OLD)
  context = dataclasses.replace(context, batch=batch)
  return BOUNDS['binary_kl'].function(context, (), **options)


def _of_probabilities(**options):
  """Returns the lowest and the highest probabilities that are trusted."""
  return np.exp(_OLD) * np.asarray(_binary_kl(options))


def test_binary_kl_bounds_the_divergence():
  low, high = _of_probabilities(fall=0.1, rise=0.05)
  old = np.exp(_OLD)

  def divergence(new):
    rest = np.log((1 - old + 1e-8) / (1 - new + 1e-8))
    return old * np.log(old / new) + (1 - old) * rest

  # A probability of 0.001 diverges by less than 0.1 however far it falls, and a
  # probability of 1 cannot rise.
  assert low[0, 1] == pytest.approx(0.001 * np.exp(-20)) and high[0, 3] == 1
  np.testing.assert_allclose(divergence(low)[0, [0, 2, 3]], 0.1, rtol=1e-7)
  np.testing.assert_allclose(divergence(high)[0, :3], 0.05, rtol=1e-7)
  assert np.all(low < old) and np.all(high[0, :3] > old[0, :3])


def test_no_divergence_is_no_change():
  low, high = _of_probabilities(fall=0.0, rise=0.0)
  # The divergence is flat at 0, so rounding hides small changes.
  np.testing.assert_allclose(low, np.exp(_OLD), rtol=1e-3)
  np.testing.assert_allclose(high, np.exp(_OLD), rtol=1e-3)
