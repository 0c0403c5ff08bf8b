import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.configs import defaults
from stppo_jax.rl import loss_context
from stppo_jax.rl import masking
from stppo_jax.rl import objectives
from tests.rl import batches

#                  below  inside  above, for A > 0 and then A < 0
RATIO = np.array([[0.5, 1.1, 1.5, 0.5, 1.1, 1.5]])
ADVANTAGES = np.array([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
CUT = np.array([[False, False, True, True, False, False]])
LOGPROBS = np.array([[-1.0, -2.0, -3.0, -1.0, -2.0, -3.0]])


def _objective(
  name, ratio, advantages, logprobs=None, level='token', **options
):
  """Returns an objective for one turn per row, with the bounds 0.8 and 1.2."""
  logprobs = np.zeros(ratio.shape) if logprobs is None else logprobs
  batch, _, _ = batches.make()
  batch = batch.replace(
    loss_mask_BL=np.ones(ratio.shape, bool),
    turn_ids_BL=np.ones(ratio.shape, np.int32),
    old_logprobs_BL=LOGPROBS,
  )
  context = loss_context.LossContext(
    lambda level: ratio, level, advantages, None, logprobs, batch, num_turns=1
  )
  choice = objectives.OBJECTIVES[name]
  options = defaults.DEFAULTS['objective'][name] | options
  statistics = ()
  if choice.statistics is not None:
    statistics = choice.statistics(context, 0.8, 1.2, **options)
  return choice.function(context, 0.8, 1.2, statistics, **options)


def test_correct_trajectories_are_imitated_by_a_mean_over_their_tokens():
  batch, logprobs, entropy = batches.make()
  mask = batch.loss_mask_BL
  last = masking.last_mask(mask)
  assert last.sum() == mask.any(1).sum() == batches.B - 1
  rewards = np.where(last, 0.5, 9.0)  # 9 does not count: it is no outcome
  rewards[last & (np.arange(batches.B) < 2)[:, None]] = 1.0
  batch = batch.replace(rewards_BL=rewards)

  def loss(coefficient):
    algorithm = batches.algorithm('vapo', objective__coefficient=coefficient)
    return batches.policy_loss(algorithm, logprobs, entropy, batch)

  plain, both = loss(0.0), loss(0.3)
  likelihood = logprobs[:2][mask[:2]].mean()
  np.testing.assert_allclose(both.loss - plain.loss, -0.3 * likelihood)
  np.testing.assert_array_equal(both.cut_BL, plain.cut_BL)
  nobody = batch.replace(rewards_BL=np.where(last, 0.5, 9.0))
  algorithm = batches.algorithm('vapo')
  np.testing.assert_array_equal(
    batches.policy_loss(algorithm, logprobs, entropy, nobody).loss, plain.loss
  )


def _pessimistic(ratio, advantages):
  return _objective('pessimistic', ratio, advantages)


def test_pessimistic_by_hand():
  term, cut = _pessimistic(RATIO, ADVANTAGES)
  np.testing.assert_allclose(term, [[-1.0, -2.2, -2.4, 1.6, 2.2, 3.0]])
  np.testing.assert_array_equal(cut, CUT)


def test_pessimistic_is_the_maximum_of_both_products():
  rng = np.random.default_rng(0)
  ratio = np.exp(rng.normal(size=(3, 50)))
  advantages = rng.normal(size=(3, 50))
  term, _ = jax.jit(_pessimistic)(ratio, advantages)
  clipped = np.clip(ratio, 0.8, 1.2)
  expected = np.maximum(-advantages * ratio, -advantages * clipped)
  np.testing.assert_allclose(term, expected, rtol=1e-14)


def test_gradient_is_cut_exactly_where_it_says_so():
  gradient = jax.grad(lambda r: jnp.sum(_pessimistic(r, ADVANTAGES)[0]))(RATIO)
  np.testing.assert_array_equal(gradient, np.where(CUT, 0, -ADVANTAGES))


def test_a_ratio_on_the_bound_keeps_its_whole_gradient():
  ratio = np.array([[0.8, 1.2]])
  advantages = np.array([[-1.0, 1.0]])
  gradient = jax.grad(lambda r: jnp.sum(_pessimistic(r, advantages)[0]))(ratio)
  np.testing.assert_array_equal(gradient, -advantages)


def test_zero_advantage_is_never_cut():
  term, cut = _pessimistic(RATIO, np.zeros_like(RATIO))
  assert not np.any(cut) and not np.any(term)


def _of(name, **options):
  def run(ratio, logprobs):
    return _objective(name, ratio, ADVANTAGES, logprobs, **options)

  return run


@pytest.mark.parametrize(
  'name,options,term,cut',
  [
    # Only the last, A < 0 far above, is held back by c.
    (
      'dual_clip',
      {'c': 1.4},
      [-1.0, -2.2, -2.4, 1.6, 2.2, 2.8],
      [0, 0, 1, 1, 0, 1],
    ),
    # -clip(r) A log pi
    ('detached', {}, [1.6, 4.4, 7.2, -1.6, -4.4, -7.2], [0] * 6),
    # -r A log pi where it is not harmful
    ('masked', {}, [1.0, 4.4, 0, 0, -4.4, -9.0], CUT[0]),
    # The weight of one of them is beyond the cap.
    ('masked', {'cap': 1.4}, [1.0, 4.4, 0, 0, -4.4, -8.4], CUT[0]),
    ('unclipped', {}, [1.0, 4.4, 9.0, -1.0, -4.4, -9.0], [0] * 6),
    # A weight of 1 where A > 0, and clip(r) elsewhere.
    ('tapered', {}, [2.0, 4.0, 6.0, -1.6, -4.4, -7.2], [0] * 6),
  ],
)
def test_the_others_by_hand(name, options, term, cut):
  run = _of(name, **options)
  np.testing.assert_allclose(run(RATIO, LOGPROBS)[0], [term], rtol=1e-14)
  np.testing.assert_array_equal(run(RATIO, LOGPROBS)[1], [cut])
  # All have the gradient of the surrogate where it is not cut, if the ratio
  # moves with log pi; some have another weight.
  total = lambda x: jnp.sum(run(RATIO * jnp.exp(x - LOGPROBS), x)[0])
  weight = {
    'detached': np.clip(RATIO, 0.8, 1.2),
    'masked': np.minimum(RATIO, options.get('cap', np.inf)),
    'tapered': np.where(ADVANTAGES > 0, 1, np.clip(RATIO, 0.8, 1.2)),
  }.get(name, RATIO)
  expected = np.where(np.asarray([cut], bool), 0, -ADVANTAGES * weight)
  np.testing.assert_allclose(
    jax.grad(total)(LOGPROBS), expected, rtol=1e-14, atol=1e-15
  )


def test_the_geometric_mean_is_of_clipped_ratios():
  ratio = np.array([[0.5, 1.1, 1.5]])
  advantages = np.ones((1, 3))
  term, cut = _objective(
    'geometric', ratio, advantages, np.zeros((1, 3)), 'sequence'
  )
  # Only 1.5 is clipped, to 1.2.
  mean = (0.5 * 1.1 * 1.2) ** (1 / 3)
  np.testing.assert_allclose(term, np.full((1, 3), -mean), rtol=1e-14)
  np.testing.assert_array_equal(cut, [[False, False, True]])


def test_the_gate_is_the_surrogate_near_1_and_flat_far_from_it():
  def slope(ratio, advantage):
    full = lambda x: jnp.full((1, 1), x)
    term = lambda r: _objective('soft_gate', full(r), full(advantage))[0][0, 0]
    return jax.grad(term)(ratio)

  assert slope(1.0, 2.0) == slope(1.0, -2.0) * -1 == -2.0
  # tau is larger for A < 0, so the gate is narrower there.
  assert 0 < -slope(3.0, -2.0) * -1 < -slope(3.0, 2.0) < 2
  # At log r = 20, where r is 5e8, nothing is left and nothing overflows.
  assert slope(float(np.exp(20)), 2.0) == 0


def test_the_gamma_weight_is_1_at_1_and_greatest_at_k_over_lambda():
  def weight(ratio, advantage):
    x = np.array([[ratio]])
    minus_one = -np.ones((1, 1))
    term, _ = _objective(
      'gamma_weighted', x, np.full((1, 1), advantage), minus_one
    )
    return float(term[0, 0]) / advantage

  for advantage, peak in ((1.0, 2 / 3), (-1.0, 3 / 2)):
    assert weight(1.0, advantage) == pytest.approx(1, rel=1e-14)
    around = [weight(peak + x, advantage) for x in (-0.1, 0.0, 0.1)]
    assert max(around) == around[1]
    assert weight(float(np.exp(20)), advantage) == 0
  assert weight(2.0, 1.0) == pytest.approx(4 * np.exp(-3), rel=1e-14)
  assert weight(2.0, -1.0) == pytest.approx(8 * np.exp(-2), rel=1e-14)


# Covariances 4/3, -2/3, -8/3 and so on: (A - 0) (log pi + 2).
COVARIANCE = ADVANTAGES * (LOGPROBS + 2)


def test_the_highest_covariances_are_held_back():
  ratio = np.exp(np.array([[0.5, 0.1, 0.2, 0.3, -0.1, -0.4]]))
  plain = -ADVANTAGES * ratio
  for share, count in ((1e-6, 2), (0.5, 4), (1.0, 6)):
    # Two tokens have the highest covariance, which is 2, and two have 0.
    term, cut = _objective(
      'kl_cov', ratio, ADVANTAGES, LOGPROBS, share=share, coefficient=3.0
    )
    chosen = COVARIANCE >= np.sort(COVARIANCE, axis=None)[::-1][count - 1]
    assert chosen.sum() == count and not np.any(cut)
    added = np.where(chosen, 3 * np.abs(np.log(ratio)), 0)
    np.testing.assert_allclose(term - plain, added, atol=1e-14)


def test_a_share_of_the_tokens_between_two_covariances_is_cut():
  rng = np.random.default_rng(0)
  shape = (40, 50)
  advantages, logprobs = rng.normal(size=shape), -rng.exponential(size=shape)
  old = logprobs + 0.1 * rng.normal(size=shape)

  def cut(rows=slice(None), **options):
    whole = context(slice(None))
    clip_cov = objectives.OBJECTIVES['clip_cov']
    options = {'share': 0.05, 'least': 0.5, 'most': 2.0} | options
    found = clip_cov.statistics(whole, 0.0, 9.0, **options)
    return clip_cov.function(context(rows), 0.0, 9.0, found, **options)[1]

  def context(rows):
    batch, _, _ = batches.make()
    batch = batch.replace(
      loss_mask_BL=np.ones(shape, bool)[rows], old_logprobs_BL=old[rows]
    )
    return loss_context.LossContext(
      lambda level: np.ones(shape)[rows],
      'token',
      advantages[rows],
      None,
      logprobs[rows],
      batch,
      num_turns=1,
    )

  covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
  eligible = (covariance > 0.5) & (covariance < 2)
  chosen = cut()
  assert chosen.sum() == 100 < eligible.sum() < 1000
  assert not np.any(chosen & ~eligible)
  # The choice is random: neither the highest, nor those of the first rows.
  share = chosen.sum() / eligible.sum()
  assert abs(chosen[:20].sum() / eligible[:20].sum() - share) < 0.1
  high = eligible & (covariance > 1)
  assert abs(chosen[high].mean() - share) < 0.1
  # Neither the order of rows nor microbatches change it.
  order = rng.permutation(40)
  np.testing.assert_array_equal(cut(order), chosen[order])
  np.testing.assert_array_equal(cut(slice(30, 40)), chosen[30:])
  np.testing.assert_array_equal(cut(share=1.0), eligible)


@pytest.mark.parametrize('sign', [1, -1])
@pytest.mark.parametrize(('share', 'count'), [(1e-6, 1), (0.34, 2), (0.9, 5)])
def test_rounding_in_another_program_changes_no_choice(share, count, sign):
  advantages = np.array([[1.0, 2.0, -1.0, -3.0, 0.5, 0.1]])
  kl_cov = objectives.OBJECTIVES['kl_cov']
  options = {'share': share, 'coefficient': 1.0}

  def context(logprobs):
    batch, _, _ = batches.make()
    batch = batch.replace(loss_mask_BL=np.ones((1, 6), bool))
    return loss_context.LossContext(
      lambda level: np.full((1, 6), np.e),
      'token',
      advantages,
      None,
      logprobs,
      batch,
      num_turns=1,
    )

  found = kl_cov.statistics(context(LOGPROBS), 0.8, 1.2, **options)
  other = LOGPROBS * (1 + sign * 1e-12)
  term, _ = kl_cov.function(context(other), 0.8, 1.2, found, **options)
  penalty = np.round(term + advantages * np.e, 9)
  assert sorted(penalty[0]) == [0] * (6 - count) + [1] * count
