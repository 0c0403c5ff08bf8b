"""What a collected batch must know before its updates.

B trajectories, L tokens. Log-probabilities of the old policy and of the
reference, values, the KL penalty, advantages and returns: one jitted function
over the whole collected batch, so that whitening is over all of it. Only models
see it in parts: one of them holds no more rows than in an update.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import forward
from stppo_jax.learner import microbatches
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.rl import advantages as advantages_lib
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import masking
from stppo_jax.rl import mismatch_metrics

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
  microbatch_size: int = 0,
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
    microbatch_size: static, rows that a model sees at once; divides B, or is at
      least B. 0: all.
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
  _check_routing(batch, policy, routing_replay)
  # Once, not in every part: what travels has the size of the activations'.
  dtype = policy.config.dtype
  state = forward.computed(state, dtype)
  reference, old = precision.cast((reference, old), dtype)
  reference = state.frozen if reference is None else reference
  said = microbatches.each(
    lambda part: _ask(
      part,
      state,
      reference,
      old,
      policy=policy,
      value=value,
      temperature=temperature,
      routing_replay=routing_replay,
    ),
    _Asked(
      batch.tokens_BL,
      batch.lengths_B,
      batch.loss_positions_BM,
      batch.expert_ids,
    ),
    max(len(batch.lengths_B) // microbatch_size, 1) if microbatch_size else 1,
  )
  values_BL = said.values_BL
  old_BL, ref_BL = (
    masking.select(x_BL, mask_BL) for x_BL in (said.old_BL, said.ref_BL)
  )
  batch = batch.replace(
    old_logprobs_BL=old_BL,
    ref_logprobs_BL=ref_BL,
    values_BL=values_BL,
    expert_visits_BX=said.expert_visits_BX,
  )
  if routing_replay == 'trainer':
    batch = batch.replace(expert_ids=said.expert_ids)
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


class _Asked(NamedTuple):
  """What models are asked about, see `TokenBatch`."""

  tokens_BL: Array
  lengths_B: Array
  loss_positions_BM: Array | None
  expert_ids: Array | None


class _Said(NamedTuple):
  """What they say: old policy, reference, value model, the old one's routers.

  The experts are None unless updates shall visit them.
  """

  old_BL: Array
  ref_BL: Array
  values_BL: Array | None
  expert_visits_BX: Array | None
  expert_ids: Array | None


def _ask(
  part: _Asked,
  state,
  reference,
  old,
  *,
  policy,
  value,
  temperature,
  routing_replay,
) -> _Said:
  """All models about some rows; see `annotate`."""
  scores = forward.score(
    state, **part._asdict(), policy=policy, value=value, temperature=temperature
  )
  values_BL = scores.values_BL
  if old is not None:
    scores = policy.token_outputs(
      state_lib.join_frozen(policy, state.frozen, old),
      **part._asdict(),
      temperature=temperature,
    )
  ref_BL, _ = policy.plain_policy.logprobs_and_entropy(
    reference,
    part.tokens_BL,
    lengths_B=part.lengths_B,
    loss_positions_BM=part.loss_positions_BM,
    temperature=temperature,
  )
  visits_BX = expert_ids = None
  if scores.routing is not None:
    visits_BX = scores.routing.visits_BX
  if routing_replay == 'trainer':
    # As those of a sampler come: no model has more experts than that.
    expert_ids = scores.routing.expert_ids.astype(jnp.int16)
  return _Said(scores.logprobs_BL, ref_BL, values_BL, visits_BX, expert_ids)


def _check_routing(batch, policy, routing_replay) -> None:
  """Raises ValueError where no experts are known that could be replayed."""
  given = batch.expert_ids is not None
  if (routing_replay == 'sampler') != given:
    state = 'have' if given else 'lack'
    raise ValueError(
      f'routing_replay={routing_replay}: the trajectories {state} the experts '
      'that the sampler chose'
    )
  if routing_replay != 'nowhere' and not policy.config.num_experts:
    raise ValueError(f'routing_replay={routing_replay}: there are no experts')
