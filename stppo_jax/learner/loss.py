"""The loss of a microbatch: policy, value and load-balance terms.

Every term is divided by a count of the whole minibatch, and every statistic
that the loss reads is formed over the whole minibatch, so splitting the
minibatch into microbatches changes nothing.

B rows of a microbatch, L tokens.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import forward
from stppo_jax.learner import microbatches as microbatches_lib
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.models import moe
from stppo_jax.rl import aggregation
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import clipping_bias as clipping_bias_lib
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import losses
from stppo_jax.rl import masking

Array = jax.Array
Tree = Any


class UpdateSpec(NamedTuple):
  """The models, optimisers and static sizes of a compiled update.

  Attributes:
    policy: the policy model.
    value: the value model; None where the algorithm needs none, and where the
      policy has the value head (one shared backbone).
    policy_optimizer, value_optimizer: see `optimizer.from_config`.
    temperature: the sampling temperature.
    num_turns: the largest number of turns of a trajectory.
    num_microbatches: microbatches of a minibatch; divides its rows.
  """

  policy: functional.Model
  value: functional.Model | None
  policy_optimizer: optimizer_lib.Optimizer
  value_optimizer: optimizer_lib.Optimizer
  temperature: float
  num_turns: int
  num_microbatches: int


class Coefficients(NamedTuple):
  """Runtime numbers of the loss; another value does not recompile.

  Attributes:
    entropy: weight of the entropy bonus.
    value_clip: the greatest trusted distance from the old value.
    value: weight of the value loss where policy and value share a backbone.
    load_balance: weight of the load-balance loss of a policy with experts.
  """

  entropy: Array | float
  value_clip: Array | float
  value: Array | float
  load_balance: Array | float


class MinibatchContext(NamedTuple):
  """The numbers of the whole minibatch that a microbatch reads.

  Attributes:
    batch: the minibatch.
    count: the policy loss's denominator, see `aggregation.aggregate_count`.
    value_count: the value loss's denominator: trained values, at least 1.
    statistics: see `losses.minibatch_statistics`; None where the microbatch is
      the whole minibatch, or where the algorithm reads none.
  """

  batch: batch_lib.TokenBatch
  count: Array
  value_count: Array
  statistics: losses.Statistics | None


class LossOutputs(NamedTuple):
  """The metrics and diagnostics of a loss; those of microbatches add up.

  Attributes:
    metrics: scalars.
    diagnostics: ratio statistics, see `diagnostics.merge`.
  """

  metrics: dict[str, Array]
  diagnostics: diagnostics_lib.Diagnostics


def loss(
  params: forward.TrainedParams,
  microbatch: batch_lib.TokenBatch,
  context: MinibatchContext,
  algorithm: algorithm_lib.Algorithm,
  coefficients: Coefficients,
  *,
  frozen: functional.Params | None = None,
  spec: UpdateSpec,
) -> tuple[Array, LossOutputs]:
  """Returns the share of a microbatch in the minibatch's loss.

  Args:
    params: trained weights in the dtype of the activations; see
      `forward.cast_params`.
    microbatch: annotated rows.
    context: `minibatch_context` of the minibatch that the rows belong to.
    algorithm: the algorithm, whose numbers may be traced.
    coefficients: the coefficients of the terms.
    frozen: the base under adapters; None where everything is trained.
    spec: models and static sizes.
  """
  terms, outputs = loss_terms(
    params,
    microbatch,
    context,
    algorithm,
    coefficients,
    frozen=frozen,
    spec=spec,
  )
  return terms.policy + terms.other, outputs


def loss_terms(
  params: forward.TrainedParams,
  microbatch: batch_lib.TokenBatch,
  context: MinibatchContext,
  algorithm: algorithm_lib.Algorithm,
  coefficients: Coefficients,
  *,
  frozen: functional.Params | None = None,
  spec: UpdateSpec,
) -> tuple[clipping_bias_lib.LossTerms, LossOutputs]:
  """Returns the terms of `loss` before they are added.

  The arguments are those of `loss`. The bias term is 0 unless the algorithm
  divides by its gradient's norm.
  """
  everywhere = algorithm.trains_values_at_observations
  outputs = _policy_outputs(
    params.policy,
    microbatch,
    frozen=frozen,
    spec=spec,
    values_everywhere=everywhere,
  )
  policy = losses.policy_loss(
    algorithm,
    outputs.logprobs_BL,
    outputs.entropy_BL,
    microbatch,
    statistics=context.statistics,
    count=context.count,
    entropy_coefficient=coefficients.entropy,
    num_turns=spec.num_turns,
  )
  diagnostics = diagnostics_lib.policy_diagnostics(
    algorithm,
    policy,
    outputs.logprobs_BL,
    outputs.entropy_BL,
    microbatch,
    num_turns=spec.num_turns,
  )
  other = policy.other
  metrics = {'actor/pg_loss': policy.policy, 'actor/kl_loss': policy.kl}

  values_BL, value_coefficient = outputs.values_BL, coefficients.value
  if spec.value is not None:
    assert params.value is not None  # both come from one config
    values_BL = spec.value.values(
      state_lib.join_frozen(spec.value, frozen, params.value),
      microbatch.tokens_BL,
      lengths_B=microbatch.lengths_B,
      loss_positions_BM=None if everywhere else microbatch.loss_positions_BM,
    )
    # A separate value model has its own learning rate instead of a coefficient.
    value_coefficient = 1.0
  if values_BL is not None:
    value = losses.value_loss(
      values_BL,
      microbatch.values_BL,
      microbatch.returns_BL,
      microbatch.value_mask_BL,
      clip=coefficients.value_clip,
      weights_BL=policy.value_weights_BL,
    )
    value_loss = value.total / context.value_count
    other += value_coefficient * value_loss
    metrics['critic/vf_loss'] = value_loss
    metrics['critic/vf_clipfrac'] = value.clipped / context.value_count
  if outputs.routing is not None:
    balance = load_balance_loss(
      outputs.routing.probs_BX,
      microbatch,
      minibatch=context.batch,
      experts_per_token=spec.policy.config.num_experts_per_tok,
    )
    other += coefficients.load_balance * balance
    metrics['actor/load_balance'] = balance
  terms = clipping_bias_lib.LossTerms(policy.policy, policy.bias, other)
  return terms, LossOutputs(metrics, diagnostics)


def policy_outputs(
  params: forward.TrainedParams,
  microbatches: batch_lib.TokenBatch,
  *,
  frozen: functional.Params | None = None,
  spec: UpdateSpec,
) -> tuple[Array, Array]:
  """Returns log-probabilities and entropy of all microbatches.

  This forward pass, which is not differentiated, is the additional cost of an
  algorithm with minibatch statistics; see `minibatch_context`.

  Args:
    params, frozen, spec: see `loss`.
    microbatches: arrays with leading axes (n, B / n).

  Returns:
    Two arrays [n, B / n, L].
  """

  def step(_, microbatch):
    outputs = _policy_outputs(
      params.policy, microbatch, frozen=frozen, spec=spec
    )
    return None, (outputs.logprobs_BL, outputs.entropy_BL)

  _, outputs = jax.lax.scan(step, None, microbatches)
  return outputs


def minibatch_context(
  batch: batch_lib.TokenBatch,
  algorithm: algorithm_lib.Algorithm,
  *,
  outputs: tuple[Array, Array] | None = None,
  spec: UpdateSpec,
) -> MinibatchContext:
  """Returns the numbers of a whole minibatch that its microbatches read.

  Args:
    batch: the minibatch.
    algorithm: see `loss`.
    outputs: from `policy_outputs`; None where the minibatch is one microbatch,
      or where `algorithm.uses_minibatch_statistics` is false.
    spec: models and static sizes.
  """
  statistics = None
  if outputs is not None:
    logprobs_BL, entropy_BL = microbatches_lib.join(outputs)
    statistics = losses.minibatch_statistics(
      algorithm, logprobs_BL, entropy_BL, batch, num_turns=spec.num_turns
    )
  count = aggregation.aggregate_count(
    batch,
    num_turns=spec.num_turns,
    name=algorithm.aggregate.name,
    **algorithm.aggregate.arguments(),
  )
  value_count = jnp.maximum(jnp.sum(batch.value_mask_BL), 1)
  return MinibatchContext(batch, count, value_count, statistics)


def _policy_outputs(
  params: functional.Params,
  microbatch: batch_lib.TokenBatch,
  *,
  frozen: functional.Params | None,
  spec: UpdateSpec,
  values_everywhere: bool = False,
) -> functional.TokenOutputs:
  return spec.policy.token_outputs(
    state_lib.join_frozen(spec.policy, frozen, params),
    microbatch.tokens_BL,
    lengths_B=microbatch.lengths_B,
    loss_positions_BM=microbatch.loss_positions_BM,
    expert_ids=microbatch.expert_ids,
    temperature=spec.temperature,
    # Otherwise values are trained at loss positions only.
    values_everywhere=values_everywhere,
  )


def load_balance_loss(
  probs_BX: Array,
  microbatch: batch_lib.TokenBatch,
  *,
  minibatch: batch_lib.TokenBatch,
  experts_per_token: int,
) -> Array:
  """Returns a microbatch's share of `moe.load_balance`; the shares add up.

  The load (how often each expert was visited) has no gradient: it was counted
  over the minibatch in the old policy's pass. With routing replay, and before
  the first update, it is also the load of this pass.

  Args:
    probs_BX: router probabilities of the microbatch, see `moe.Routing`; the
      gradient flows through them.
    microbatch: the rows of `probs_BX`.
    minibatch: all rows, with `expert_visits_BX`.
    experts_per_token: experts that each token visits.
  """
  visits_BX = _valid_rows(minibatch.expert_visits_BX, minibatch)
  visits_X = jnp.sum(visits_BX, axis=0)
  probs_X = jnp.sum(_valid_rows(probs_BX, microbatch), axis=0)
  tokens = jnp.sum(visits_X) / experts_per_token
  return moe.load_balance(visits_X, probs_X, tokens)


def _valid_rows(x_BX: Array, batch: batch_lib.TokenBatch) -> Array:
  """Returns x with 0 in the rows without loss tokens."""
  valid_B = jnp.any(batch.loss_mask_BL, axis=1)
  return masking.select(x_BX, jnp.broadcast_to(valid_B[:, None], x_BX.shape))
