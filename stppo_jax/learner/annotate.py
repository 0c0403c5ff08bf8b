"""Adds log-probabilities, values and advantages to a collected batch.

B trajectories, L tokens, M loss positions, X experts.

One jitted function over the whole collected batch computes log-probabilities of
the old policy and of the reference, values, the KL penalty, advantages and
returns. The function takes the whole batch, because advantages may be whitened
over all rows. The models compute one microbatch of packed rows at a time, as in
an update.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import forward
from stppo_jax.learner import minibatches
from stppo_jax.learner import model_roles
from stppo_jax.learner import packing as packing_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.models import modules
from stppo_jax.parallel import rows as rows_lib
from stppo_jax.rl import advantages as advantages_lib
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import masking
from stppo_jax.rl import objectives
from stppo_jax.rl import turn_advantages

Array = jax.Array
Tree = Any


class _Outputs(NamedTuple):
  """The outputs of the models for some rows.

  Attributes:
    old_logprobs_BL, ref_logprobs_BL: log-probabilities of the sampled tokens.
    older_logprobs: log-probabilities of the same tokens by the policies of
      earlier steps, [B, L] for each policy. The numbers of a policy that wrote
      no turn of the batch have no meaning.
    values_BL: the value before each token; None without a value model.
    expert_visits_BX: how often each row visited each expert; None without
      experts.
    expert_ids: the experts that the old policy visited; None unless
      `routing_replay` is 'trainer'.
  """

  old_logprobs_BL: Array
  ref_logprobs_BL: Array
  older_logprobs: tuple[Array, ...]
  values_BL: Array | None
  expert_visits_BX: Array | None
  expert_ids: Array | None


def annotate(
  state: state_lib.TrainState,
  batch: batch_lib.TokenBatch,
  algorithm: algorithm_lib.Algorithm,
  *,
  reference: functional.Params | None = None,
  old: functional.Params | None = None,
  older: Sequence[functional.Params] = (),
  models: model_roles.Models,
  temperature: float,
  num_turns: int,
  packed: packing_lib.Packed | None = None,
  routing_replay: str = 'nowhere',
) -> tuple[batch_lib.TokenBatch, dict[str, Array]]:
  """Adds log-probabilities, values, returns and advantages to a batch.

  Args:
    state: the policy about to be updated, and the value model.
    batch: the packed batch.
    algorithm: the algorithm, whose numbers may be traced.
    reference: weights of the frozen reference policy. With None the base under
      the state's adapters is the reference.
    old: trained weights of the old policy, the ratio's denominator. With None
      the state's policy is the old policy.
    older: trained weights of the policies of one step ago, of two steps ago,
      and so on, for a batch with `staleness_BL`. In the ratio of each turn, the
      policy that wrote the turn is then the denominator. With () the old policy
      is the denominator in all turns.
    models: policy and value model; the policy without adapters and value head
      computes the reference.
    temperature: the sampling temperature.
    num_turns: static, the largest number of turns of a trajectory.
    packed: the rows in the order of the shards, and their packing. With None
      the models compute all rows at once, with one trajectory in each row.
    routing_replay: static, the experts that the updates visit: 'nowhere' (the
      experts that the router picks), 'trainer' (the experts that the old policy
      picks here) or 'sampler' (the experts in the batch, which the old policy
      then also visits).

  Returns:
    The annotated batch and scalar metrics: mismatch with the sampler,
    divergence from the reference, values, returns and advantages.
  """
  assert reference is not None or state.frozen
  params = models.cast(state.params)
  dtype = models.policy.config.dtype
  reference, old, older = modules.cast((reference, old, older), dtype)
  frozen_reference = params.frozen if reference is None else reference
  behind_BL = batch.staleness_BL
  # A policy that wrote no turn of the batch gets no forward pass.
  needed = [jnp.any(behind_BL == n + 1) for n in range(len(older))]

  outputs = _map_packed(
    lambda inputs: _model_outputs(
      inputs,
      params,
      frozen_reference,
      old,
      list(zip(needed, older)),
      models=models,
      temperature=temperature,
      routing_replay=routing_replay,
    ),
    forward.inputs_of(batch),
    packed,
    models.policy.mesh,
  )
  mask_BL = batch.loss_mask_BL
  old_BL = outputs.old_logprobs_BL
  for n, older_BL in enumerate(outputs.older_logprobs, start=1):
    old_BL = jnp.where(behind_BL == n, older_BL, old_BL)
  # Log-probabilities off the mask are set to 0. A number that is not finite at
  # an observation must not reach a sum.
  old_BL = masking.select(old_BL, mask_BL)
  ref_BL = masking.select(outputs.ref_logprobs_BL, mask_BL)
  batch = batch.replace(
    old_logprobs_BL=old_BL,
    ref_logprobs_BL=ref_BL,
    values_BL=outputs.values_BL,
    expert_visits_BX=outputs.expert_visits_BX,
  )
  # With 'sampler', the batch already has the sampler's experts.
  if routing_replay == 'trainer':
    batch = batch.replace(expert_ids=outputs.expert_ids)

  # The divergence of the old policy from the reference is measured whatever
  # `kl.where` is: it is a metric of every run, and the controller of the KL
  # coefficient reads it.
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
    name=algorithm.advantage.name,
    **algorithm.advantage.arguments(),
  )
  batch = batch.replace(
    advantages_BL=estimate.advantages_BL,
    returns_BL=estimate.returns_BL,
    value_mask_BL=estimate.value_mask_BL,
  )
  if 'turn_z_BL' in algorithm.needs:
    z_BL = turn_advantages.turn_z(batch.rewards_BL, batch, num_turns=num_turns)
    batch = batch.replace(turn_z_BL=z_BL)
  metrics = _metrics(batch, algorithm, rewards_BL, kl_BL)
  if models.value_range is not None and batch.returns_BL is not None:
    low, high = models.value_range
    # A return is the sum of an advantage and a value. If the exact sum is `low`
    # or `high`, the rounded sum may be a little outside the range.
    slack = 1e-4 * (high - low)
    is_outside_BL = batch.returns_BL < low - slack
    is_outside_BL |= batch.returns_BL > high + slack
    metrics['critic/returns_outside'] = masking.masked_mean(
      is_outside_BL.astype(kl_BL.dtype), batch.value_mask_BL
    )
  metrics |= diagnostics.mismatch_of_segments(batch, num_turns=num_turns)
  if older:
    metrics |= _staleness(batch, outputs.old_logprobs_BL, num_turns=num_turns)
  # The staleness is left out, because updates do not read it.
  return batch.replace(staleness_BL=None), metrics


def mean_logprobs(
  params: model_roles.Params,
  inputs: forward.Inputs,
  packed: packing_lib.Packed,
  *,
  models: model_roles.Models,
  temperature: float,
) -> Array:
  """Returns the policy's mean log-probability of each row's loss tokens, [B].

  Args:
    params: the weights of the models.
    inputs: the rows; the result of a row without loss tokens is 0.
    packed, models, temperature: see `annotate`.
  """
  policy = models.policy
  weights = models.policy_weights(models.cast(params))
  logprobs_BL = _map_packed(
    lambda inputs: (
      forward.token_outputs(
        policy, weights, inputs, temperature=temperature
      ).logprobs_BL
    ),
    inputs,
    packed,
    policy.mesh,
  )
  assert inputs.loss_mask_BL is not None
  return masking.divide(
    *masking.masked_total(logprobs_BL, inputs.loss_mask_BL, axis=1)
  )


def _map_packed(
  function: Callable[[forward.Inputs], Tree],
  inputs: forward.Inputs,
  packed: packing_lib.Packed | None,
  mesh: jax.sharding.Mesh | None,
) -> Tree:
  """Applies a function to packed rows; for `packed` see `annotate`.

  Returns:
    The function's outputs for all rows, in the order of the batch.
  """
  if packed is None:
    return function(inputs)
  chosen = rows_lib.select(inputs, packed.rows, mesh)
  outputs = minibatches.map_rows(function, chosen, packed.packing)
  # `packed.rows` is the order in which the rows were dealt to the shards. Its
  # argsort is the inverse order.
  return rows_lib.select(outputs, jnp.argsort(packed.rows), mesh)


def _metrics(
  batch: batch_lib.TokenBatch,
  algorithm: algorithm_lib.Algorithm,
  rewards_BL: Array,
  kl_BL: Array,
) -> dict[str, Array]:
  """Returns the scalar metrics of an annotated batch."""
  mask_BL = batch.loss_mask_BL
  metrics = diagnostics.describe(
    'critic/advantages', batch.advantages_BL, mask_BL
  )
  if batch.values_BL is not None:
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
  objective = algorithm.objective
  if isinstance(objective, objectives.PositiveExamples):
    imitated_BL = masking.imitated(batch.rewards_BL, mask_BL, objective.least)
    metrics['actor/imitated'] = masking.masked_mean(
      jnp.any(imitated_BL, axis=1).astype(kl_BL.dtype),
      jnp.any(mask_BL, axis=1),
    )
  return metrics | diagnostics.mismatch(
    batch.old_logprobs_BL, batch.sampler_logprobs_BL, mask_BL
  )


def _staleness(
  batch: batch_lib.TokenBatch, logprobs_BL: Array, *, num_turns: int
) -> dict[str, Array]:
  """Returns how far the policy is from the policies that wrote the turns.

  r = pi / pi_old is the ratio of a token. pi is the policy before the first
  update, and pi_old is the policy that wrote the token's turn. The trainer
  computes both probabilities. The scalar metrics of r are

    staleness/logprob_abs_diff{,_mean}  maximum and mean of |log r|
    staleness/{turn,sequence}/{mean,sum}/weight_raw_{mean,max}  the metrics of
        `diagnostics.mismatch_of_segments`, with r in place of its k

  A token comes after a swap if an older policy wrote an earlier turn of the
  dialogue. k = pi_old / sampler compares the probabilities that the trainer and
  the sampler compute for a token. The metrics of the tokens after a swap are

    mismatch/after_swap/share  their share among the policy tokens
    mismatch/after_swap/logprob_abs_diff{,_mean}  maximum and mean of |log k|

  Args:
    batch: the batch, with log pi_old and with the staleness of each turn.
    logprobs_BL: log pi of the tokens, before the first update.
    num_turns: static, the largest number of turns of a row.
  """
  mask_BL, behind_BL = batch.loss_mask_BL, batch.staleness_BL
  log_r_BL = masking.select(logprobs_BL - batch.old_logprobs_BL, mask_BL)
  log_k_BL = batch.old_logprobs_BL - batch.sampler_logprobs_BL
  # If a token's staleness is below the largest staleness so far in its row, an
  # older policy wrote an earlier turn.
  swapped_BL = mask_BL & (behind_BL < jax.lax.cummax(behind_BL, axis=1))
  metrics = {
    'mismatch/after_swap/share': masking.masked_mean(
      swapped_BL.astype(log_r_BL.dtype), mask_BL
    )
  }
  for name, log_BL, chosen_BL in (
    ('staleness', log_r_BL, mask_BL),
    ('mismatch/after_swap', log_k_BL, swapped_BL),
  ):
    size_BL = jnp.abs(masking.select(log_BL, chosen_BL))
    metrics[f'{name}/logprob_abs_diff'] = jnp.max(size_BL)
    mean = masking.masked_mean(size_BL, chosen_BL)
    metrics[f'{name}/logprob_abs_diff_mean'] = mean
  return metrics | diagnostics.weights_of_segments(
    'staleness', log_r_BL, batch, num_turns=num_turns
  )


def _model_outputs(
  inputs: forward.Inputs,
  params: model_roles.Params,
  reference: functional.Params,
  old: functional.Params | None,
  older: Sequence[tuple[Array, functional.Params]],
  *,
  models: model_roles.Models,
  temperature: float,
  routing_replay: str,
) -> _Outputs:
  """Runs all models on some rows; see `annotate`.

  Each element of `older` is about one earlier policy: the pair (whether its
  outputs are needed, its trained weights).
  """
  policy = models.policy
  # Even if the old policy has other weights, the values are computed with the
  # present weights, which are the weights that the first update changes.
  current = forward.all_outputs(
    params, inputs, models=models, temperature=temperature
  )

  def outputs_of(trained: functional.Params) -> functional.TokenOutputs:
    weights = policy.join_params(params.frozen, trained)
    return forward.token_outputs(
      policy, weights, inputs, temperature=temperature
    )

  outputs = current if old is None else outputs_of(old)
  older_logprobs = tuple(
    jax.lax.cond(
      is_needed,
      lambda trained: outputs_of(trained).logprobs_BL,
      lambda _: current.logprobs_BL,
      trained,
    )
    for is_needed, trained in older
  )
  # The reference replays no experts: its own routers choose the experts.
  reference_outputs = forward.token_outputs(
    policy.plain_policy,
    reference,
    inputs._replace(expert_ids=None),
    temperature=temperature,
  )
  visits_BX = expert_ids = None
  if outputs.routing is not None:
    visits_BX = outputs.routing.visits_BX
  if routing_replay == 'trainer' and outputs.routing is not None:
    # int16, which the sampler also uses, is enough to number the experts.
    expert_ids = outputs.routing.expert_ids.astype(jnp.int16)
  return _Outputs(
    outputs.logprobs_BL,
    reference_outputs.logprobs_BL,
    older_logprobs,
    None if current.values is None else current.values.values_BL,
    visits_BX,
    expert_ids,
  )
