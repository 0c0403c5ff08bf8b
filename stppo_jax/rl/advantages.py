"""Advantages, returns and the tokens at which the critic is trained.

B trajectories, L tokens. `values_BL[:, l]` is V before token l. An estimator
is called `estimator(rewards_BL, batch, **options)`. An estimator with a critic
returns `Advantages`, and an estimator without a critic returns only an array of
advantages [B, L]. The module `gae` has the recursion of GAE. `group_advantages`
has the estimators that compare the trajectories of a question, and
`turn_advantages` has the estimators that compare turns.

Only rewards on policy tokens count, so the outcome reward must stand on a row's
last policy token. No estimator bootstraps at the end of a row: the value after
the last step counts as 0. A row whose loss mask is false everywhere has no
influence on other rows.

Observation tokens get advantages, too, which only `whiten='all'` reads. GAE
with `observation_tokens='included'` estimates these advantages. All other
estimators copy the advantage of the turn, or of the token, that comes before
the observation.
"""

import dataclasses

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import estimator_needs
from stppo_jax.rl import gae as gae_lib
from stppo_jax.rl import group_advantages
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib
from stppo_jax.rl import turn_advantages

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Advantages:
  """Advantages for the policy, and targets for the critic.

  Attributes:
    advantages_BL: the advantages. The result of `estimate_advantages` is 0 off
      the loss mask. The result of an estimator also has advantages at other
      tokens, because whitening may read them.
    returns_BL: the critic's targets, formed before any whitening; 0 off the
      loss mask. With GAE's `critic_tokens='response'`, the observations between
      policy tokens have targets, too.
    value_mask_BL: bool, the tokens at which the critic is trained.
  """

  advantages_BL: Array
  returns_BL: Array
  value_mask_BL: Array


STEPS = ('token', 'turn', 'bilevel')
# 'policy' trains the critic at the steps that are policy tokens. 'response'
# trains it at all steps, as the reference implementation of arXiv 2511.20718
# does.
CRITIC_TOKENS = ('policy', 'response')


@options_lib.dataclass
class Gae(options_lib.Named):
  """Options of `gae_estimator`; see `estimate_advantages` for `whiten`."""

  gamma: float = options_lib.number(at_most=1.0)
  lambda_: float = options_lib.number(at_most=1.0)
  gamma_turn: float = options_lib.number(at_most=1.0)
  lambda_turn: float = options_lib.number(at_most=1.0)
  steps: str = options_lib.one_of(STEPS)
  observation_tokens: str = options_lib.one_of(gae_lib.OBSERVATION_TOKENS)
  critic_tokens: str = options_lib.one_of(CRITIC_TOKENS)
  whiten: str = options_lib.one_of(masking.WHITENS)

  @staticmethod
  def conflicts(steps, observation_tokens, critic_tokens, gamma, lambda_, **_):
    included = observation_tokens == 'included'
    if included and steps != 'token':
      rule = f"'skipped' when steps is {steps!r}"
      yield 'observation_tokens', observation_tokens, rule
    # With gamma = lambda_ = 1 the values of later steps cancel out of an
    # advantage, so untrained values at observations do no harm.
    elif included and critic_tokens == 'policy' and (gamma, lambda_) != (1, 1):
      rule = (
        "'response' when observation_tokens is 'included' and gamma or lambda_ "
        'is not 1: GAE would read values that no loss trains'
      )
      yield 'critic_tokens', critic_tokens, rule
    if critic_tokens == 'response' and not included:
      rule = f"'policy' when observation_tokens is {observation_tokens!r}"
      yield 'critic_tokens', critic_tokens, rule


def gae_estimator(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  gamma: Array | float,
  lambda_: Array | float,
  steps: str,
  observation_tokens: str,
  critic_tokens: str,
  gamma_turn: Array | float,
  lambda_turn: Array | float,
) -> Advantages:
  """Returns GAE whose steps are tokens, turns, or turns and then tokens.

  `gae.gae` has the recursion over tokens or turns. GAE over turns and then over
  tokens is called bi-level, as in RAGEN (arXiv 2504.20073). First, GAE over
  turns, with gamma_turn and lambda_turn, gives each turn k a return G_k, where
  r_k is the sum of the rewards of turn k:

    A_k = r_k + gamma_turn V_{k+1} - V_k + gamma_turn lambda_turn A_{k+1}
    G_k = A_k + V_k

  G_k becomes the only reward of the turn, on its last token. GAE with gamma
  and lambda_ then runs over the tokens of each turn separately. As in the
  authors' code, the return of a token comes from this second recursion, and the
  critic is trained at every policy token.

  We read V_k before the first token of turn k, which is our choice. The
  authors' code reads V_k at the token with the turn's reward. That code has one
  lambda for both levels, and it recognises a turn by its reward, so it misses
  turns whose reward is 0. Our code and the authors' give the same numbers if
  lambda_ and lambda_turn are 1 and every turn has a reward other than 0 on its
  last token.

  Args:
    rewards_BL: the rewards, minus the KL penalty if there is one.
    batch: masks, turn ids and values.
    gamma: discount per step.
    lambda_: trace decay per step.
    steps: 'token': every policy token is a step. 'turn': the first token of a
      turn is a step. This step gets the sum of the turn's rewards, its
      advantage goes to all tokens of the turn, and the critic is trained at
      this token only. 'bilevel': GAE over turns, then over the tokens of each
      turn.
    observation_tokens: with token steps, whether observation tokens between the
      first and the last policy token of a row are steps ('included') or not
      ('skipped'). Turns never include observation tokens.
    critic_tokens: whether the critic is trained at the steps that are policy
      tokens ('policy'), or at all steps ('response'). The two choices differ
      only if observations are included.
    gamma_turn: with bi-level steps, the discount per turn.
    lambda_turn: with bi-level steps, the trace decay per turn.
  """
  mask_BL = batch.loss_mask_BL
  rewards_BL = masking.select(rewards_BL, mask_BL)
  if steps == 'bilevel':
    step_mask_BL = mask_BL
    at_steps_BL = gae_lib.bilevel_gae(
      rewards_BL,
      batch,
      gamma=gamma,
      lambda_=lambda_,
      gamma_turn=gamma_turn,
      lambda_turn=lambda_turn,
    )
  else:
    step_mask_BL = gae_lib.OBSERVATION_TOKENS[observation_tokens](mask_BL)
    if steps == 'turn':
      step_mask_BL = gae_lib.turn_starts(batch)
    at_steps_BL = gae_lib.gae(
      rewards_BL, batch.values_BL, step_mask_BL, gamma=gamma, lambda_=lambda_
    )
  values_BL = masking.select(batch.values_BL, step_mask_BL)
  # With steps='turn', all policy tokens of a turn get the turn's return, as
  # they get its advantage, although the critic is trained only at the first
  # token of the turn.
  if critic_tokens == 'policy':
    value_mask_BL, returns_mask_BL = step_mask_BL & mask_BL, mask_BL
  else:
    value_mask_BL, returns_mask_BL = step_mask_BL, step_mask_BL
  return Advantages(
    advantages_BL=gae_lib.latest(at_steps_BL, step_mask_BL),
    returns_BL=masking.select(
      gae_lib.latest(at_steps_BL + values_BL, step_mask_BL), returns_mask_BL
    ),
    value_mask_BL=value_mask_BL,
  )


# The baselines that the policy's advantages may use, see `decoupled_gae`.
BASELINES = ('critic', 'explained')


def _explained(values_BL, returns_BL, mask_BL):
  """Returns the baseline: the values, or the mean of the returns.

  The values are the baseline if their explained variance over the mask is
  positive.
  """
  mean, variance = masking.masked_moments(returns_BL, mask_BL)
  _, missed = masking.masked_moments(returns_BL - values_BL, mask_BL)
  # The explained variance is 1 - missed / variance. It is positive if `missed`
  # is less than `variance`.
  return jnp.where(missed < variance, values_BL, mean)


@options_lib.dataclass
class DecoupledGae(options_lib.Named):
  """Options of `decoupled_gae`; see `estimate_advantages` for `whiten`."""

  gamma: float = options_lib.number(at_most=1.0)
  lambda_: float = options_lib.number(at_most=1.0)
  lambda_critic: float = options_lib.number(at_most=1.0)
  alpha: float = options_lib.number(above=0.0, infinite=True)
  baseline: str = options_lib.one_of(BASELINES)
  whiten: str = options_lib.one_of(masking.WHITENS)


def decoupled_gae(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  gamma: Array | float,
  lambda_: Array | float,
  lambda_critic: Array | float,
  alpha: Array | float,
  baseline: str,
) -> Advantages:
  """Returns GAE over policy tokens, with another lambda for the critic.

  The policy's advantages come from `gae.gae` with

    lambda of a row = lambda_ max(1 - 1 / (alpha length), 0)

  where length is the number of the row's policy tokens. Lambda grows with the
  length, so that the outcome of a long row reaches its first tokens, too. The
  critic's targets are formed with lambda_critic. If lambda_critic is 1, the
  targets are plain returns, which do not depend on the values. Sources: arXiv
  2503.01491 separates the two lambdas, and VAPO, arXiv 2504.05118, makes the
  policy's lambda depend on the length. Replacing a negative lambda by 0 comes
  from NeMo-RL.

  Args:
    rewards_BL: the rewards, minus the KL penalty if there is one.
    batch: masks and values.
    gamma: discount per token.
    lambda_: trace decay per token for the policy in infinitely long rows.
    lambda_critic: trace decay per token for the critic's targets.
    alpha: how fast the policy's trace decay approaches lambda_ with the length.
      If alpha is inf, the trace decay is lambda_ at every length.
    baseline: what takes the place of V in the policy's advantages. 'critic':
      the values. 'explained': the values if their explained variance over the
      policy tokens of the batch is positive, otherwise the mean of the critic's
      targets (EVPO, arXiv 2604.19485).
  """
  mask_BL = batch.loss_mask_BL
  rewards_BL = masking.select(rewards_BL, mask_BL)
  assert batch.values_BL is not None
  values_BL = masking.select(batch.values_BL, mask_BL)
  returns_BL = values_BL + gae_lib.gae(
    rewards_BL, values_BL, mask_BL, gamma=gamma, lambda_=lambda_critic
  )
  length_B = jnp.sum(mask_BL, axis=1, dtype=rewards_BL.dtype)
  # The length of an empty row is replaced by 1. Its lambda is never used,
  # because the row has no steps.
  reach_B = jnp.maximum(1 - 1 / (alpha * jnp.maximum(length_B, 1)), 0)
  baseline_BL = values_BL
  if baseline == 'explained':
    baseline_BL = _explained(values_BL, returns_BL, mask_BL)
  advantages_BL = gae_lib.gae(
    rewards_BL,
    baseline_BL,
    mask_BL,
    gamma=gamma,
    lambda_=lambda_ * reach_B,
  )
  return Advantages(
    advantages_BL=gae_lib.latest(advantages_BL, mask_BL),
    returns_BL=masking.select(returns_BL, mask_BL),
    value_mask_BL=mask_BL,
  )


@options_lib.dataclass
class MonteCarlo(options_lib.Named):
  """Options of `monte_carlo`; see `estimate_advantages` for `whiten`."""

  gamma: float = options_lib.number(at_most=1.0)
  whiten: str = options_lib.one_of(masking.WHITENS)


def monte_carlo(
  rewards_BL: Array, batch: batch_lib.TokenBatch, *, gamma: Array | float
) -> Array:
  """Returns the discounted reward-to-go of every policy token: REINFORCE.

    A_l = r_l + gamma A_{l+1}    over the policy tokens of a row

  Whitening subtracts the mean of the batch, which is the baseline of
  REINFORCE++ (arXiv 2501.03262).

  Args:
    rewards_BL: the rewards, minus the KL penalty if there is one.
    batch: masks.
    gamma: discount per policy token.
  """
  mask_BL = batch.loss_mask_BL
  to_go_BL = gae_lib.gae(
    masking.select(rewards_BL, mask_BL),
    jnp.zeros_like(rewards_BL),
    mask_BL,
    gamma=gamma,
    lambda_=1.0,
  )
  return gae_lib.latest(to_go_BL, mask_BL)


ADVANTAGES = {
  'gae': options_lib.Choice(gae_estimator, Gae),
  'decoupled_gae': options_lib.Choice(decoupled_gae, DecoupledGae),
  'monte_carlo': options_lib.Choice(monte_carlo, MonteCarlo),
  **group_advantages.ESTIMATORS,
  **turn_advantages.ESTIMATORS,
}


def estimate_advantages(
  rewards_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  name: str,
  whiten: str,
  num_turns: int,
  **options,
) -> Advantages:
  """Returns the advantages of a whole collected batch.

  Call this function before the batch is cut into minibatches. Under jit on
  global arrays, groups and whitening extend over all hosts.

  Args:
    rewards_BL: the rewards, minus the KL penalty if there is one.
    batch: masks, turn ids and group ids. Estimators in
      `estimator_needs.VALUES` also read its values, and estimators in
      `estimator_needs.STATES` read its state ids.
    name: a key of `ADVANTAGES`.
    whiten: 'none': advantages are not whitened. Otherwise they have mean 0 and
      variance 1 (unbiased) over the loss mask ('policy'), or over all tokens
      from a row's first policy token to its last, observations included
      ('all').
    num_turns: static, the most turns a row can have.
    **options: the options of the estimator.
  """
  if name in estimator_needs.TURNS:
    options['num_turns'] = num_turns
  estimate = ADVANTAGES[name].function(rewards_BL, batch, **options)
  if name not in estimator_needs.VALUES:
    # Without a critic an estimator returns only the array of advantages.
    estimate = Advantages(
      estimate, jnp.zeros_like(rewards_BL), jnp.zeros_like(batch.loss_mask_BL)
    )
  # The advantages are whitened before the selection, because 'all' also reads
  # the advantages of observation tokens.
  mask_BL = batch.loss_mask_BL
  white_BL = masking.WHITENS[whiten](estimate.advantages_BL, mask_BL)
  return dataclasses.replace(
    estimate, advantages_BL=masking.select(white_BL, mask_BL)
  )
