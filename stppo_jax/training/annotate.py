"""What a collected batch must know before its updates.

B trajectories, L tokens. Log-probabilities of the old policy and of the
reference, values, the KL penalty, advantages and returns: one jitted function
over the whole collected batch, so that whitening is over all of it.
"""

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.models import functional
from stppo_jax.rl import advantages as advantages_lib
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import masking
from stppo_jax.rl import mismatch_metrics
from stppo_jax.training import scoring
from stppo_jax.training import state as state_lib

Array = jax.Array


def annotate(
  batch: batch_lib.TokenBatch,
  state: state_lib.TrainState,
  reference: functional.Params | None,
  algorithm: algorithm_lib.Algorithm,
  old: functional.Params | None = None,
  *,
  policy: functional.Model,
  value: functional.Model | None,
  temperature: float,
  num_turns: int,
  routing_replay: str = 'nowhere',
) -> tuple[batch_lib.TokenBatch, dict[str, Array]]:
  """Fills the second block of a batch.

  Args:
    batch: as packed.
    state: the policy about to be updated, and the value model.
    reference: weights of the frozen reference policy; None: the base under the
      adapters of the state.
    algorithm: the row.
    old: weights (under LoRA, adapters) of the policy that the ratio's
      denominator is of; None: those of the state.
    policy: the model of the policy; without adapters and value head, that of
      the reference.
    value: the value model; None where the row or the policy's own head needs
      none.
    temperature: of sampling.
    num_turns: static, the most turns of a row.
    routing_replay: static, whose experts the updates visit: 'nowhere' (their
      own choice), 'trainer' (the old policy's) or 'sampler' (those of the
      batch, which then the old policy visits too).

  Raises:
    ValueError: a replay of experts that are not known.

  Returns:
    The annotated batch and scalar metrics: the sampler's mismatch, the
    divergence from the reference, values, returns and advantages.
  """
  mask_BL = batch.loss_mask_BL
  current = scoring.score(
    state,
    batch.tokens_BL,
    batch.loss_positions_BM,
    batch.lengths_B,
    batch.expert_ids_BLNE,
    policy=policy,
    value=value,
    temperature=temperature,
  )
  logprobs = lambda model, params: model.logprobs_and_entropy(
    params,
    batch.tokens_BL,
    batch.loss_positions_BM,
    batch.lengths_B,
    temperature=temperature,
  )[0]
  values_BL, sampled = current.values_BL, current
  if old is not None:
    sampled = policy.scores(
      state_lib.whole(policy, state.frozen, old),
      batch.tokens_BL,
      batch.loss_positions_BM,
      batch.lengths_B,
      batch.expert_ids_BLNE,
      temperature=temperature,
    )
  batch = _with_routing(batch, sampled.routing, routing_replay)
  old_BL = sampled.logprobs_BL
  if reference is None:
    reference = state.frozen
  ref_BL = logprobs(policy.plain, reference)
  old_BL, ref_BL = (masking.select(x_BL, mask_BL) for x_BL in (old_BL, ref_BL))
  batch = batch.replace(
    old_logprobs_BL=old_BL, ref_logprobs_BL=ref_BL, values_BL=values_BL
  )
  kl_BL = kl_lib.kl_estimate(
    old_BL, ref_BL, mask_BL, estimator=algorithm.kl.estimator
  )
  rewards_BL = batch.rewards_BL
  if algorithm.kl.where == 'reward':
    rewards_BL = kl_lib.penalized_rewards(
      rewards_BL, kl_BL, mask_BL, coefficient=algorithm.kl.coefficient
    )
  estimate = advantages_lib.estimate_advantages(
    rewards_BL,
    batch,
    num_turns=num_turns,
    **algorithm.advantage.arguments(),
  )
  batch = batch.replace(
    advantages_BL=estimate.advantages_BL,
    returns_BL=estimate.returns_BL,
    value_mask_BL=estimate.value_mask_BL,
  )
  metrics = diagnostics.describe(
    'critic/advantages', batch.advantages_BL, mask_BL
  )
  if values_BL is not None:
    metrics |= diagnostics.critic_diagnostics(batch)
  metrics |= diagnostics.describe(
    'critic/rewards',
    jnp.sum(masking.select(rewards_BL, mask_BL), axis=1),
    jnp.any(mask_BL, axis=1),
  )
  metrics['critic/kl'] = masking.masked_mean(kl_BL, mask_BL)
  metrics['critic/kl_per_trajectory'] = masking.masked_mean(
    jnp.sum(kl_BL, axis=1), jnp.any(mask_BL, axis=1)
  )
  metrics['critic/kl_coef'] = jnp.asarray(algorithm.kl.coefficient)
  metrics |= mismatch_metrics.measure(
    old_BL, batch.sampler_logprobs_BL, mask_BL
  )
  return batch, metrics


def _with_routing(batch, routing, routing_replay) -> batch_lib.TokenBatch:
  """The batch with what updates must know of the old policy's routing."""
  given = batch.expert_ids_BLNE is not None
  if (routing_replay == 'sampler') != given:
    state = 'have' if given else 'lack'
    raise ValueError(
      f'routing_replay={routing_replay}: the trajectories {state} the experts '
      'that the sampler chose'
    )
  if routing is None:
    if routing_replay != 'nowhere':
      raise ValueError(f'routing_replay={routing_replay}: there are no experts')
    return batch
  if routing_replay == 'trainer':
    batch = batch.replace(expert_ids_BLNE=routing.expert_ids)
  return batch.replace(expert_visits_BX=routing.visits_BX)
