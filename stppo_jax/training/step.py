"""One optimiser step of the policy and the value model.

M minibatch rows, cut into microbatches of m rows; L tokens. Everything is
divided by counts of the whole minibatch and every statistic the loss needs is
formed over the whole minibatch, so that cutting it changes nothing.

Order, always: clipping-bias correction, global-norm clip, Adam.
"""

from collections.abc import Mapping
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from stppo_jax import batch as batch_lib
from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.rl import aggregation
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import gradients as gradients_lib
from stppo_jax.rl import losses
from stppo_jax.training import accumulation
from stppo_jax.training import load_balance
from stppo_jax.training import optimizer as optimizer_lib
from stppo_jax.training import state as state_lib

Array = jax.Array
Tree = Any


class Gradients(NamedTuple):
  """Of one minibatch; float32, laid out as the parameters.

  Attributes:
    policy: of the policy's loss, corrected.
    value: of the value loss; None without a value model.
    metrics: scalars, the losses among them.
    diagnostics: mergeable, of the ratios.
  """

  policy: functional.Params
  value: functional.Params | None
  metrics: dict[str, Array]
  diagnostics: diagnostics_lib.Diagnostics


def update(
  state: state_lib.TrainState,
  batch: batch_lib.TokenBatch,
  algorithm: algorithm_lib.Algorithm,
  numbers: Mapping[str, Any],
  frozen: functional.Params | None = None,
  *,
  policy_optimizer: optax.GradientTransformation,
  value_optimizer: optax.GradientTransformation,
  **static,
) -> tuple[state_lib.TrainState, dict[str, Array], diagnostics_lib.Diagnostics]:
  """Updates both models on one annotated minibatch.

  A minibatch whose gradient is not finite changes nothing and is counted in
  `update/skipped`.

  Args:
    state: before; donate it. It comes without its frozen part.
    batch: annotated minibatch.
    algorithm: the row; its numbers are leaves.
    numbers: 'policy' and 'value' (see `optimizer.apply_update`),
      'entropy_coefficient', 'value_clip', 'policy_learns' (False: only the
      value model is updated), 'value_coefficient' (of the value loss beside
      the policy's, where one backbone learns from both),
      'load_balance_coefficient' (of a policy with experts); runtime values.
    frozen: the base under adapters, which no gradient is of; None: everything
      is trained.
    policy_optimizer, value_optimizer: from `optimizer.build_optimizer`.
    **static: see `gradients`.

  Returns:
    The new state, scalar metrics, and mergeable diagnostics of the ratios.
  """
  found = gradients(state, batch, algorithm, numbers, frozen, **static)
  new_state, metrics = apply(
    state,
    found,
    numbers,
    policy_optimizer=policy_optimizer,
    value_optimizer=value_optimizer,
  )
  return new_state, metrics, found.diagnostics


def apply(
  state: state_lib.TrainState,
  found: Gradients,
  numbers: Mapping[str, Any],
  *,
  policy_optimizer: optax.GradientTransformation,
  value_optimizer: optax.GradientTransformation,
) -> tuple[state_lib.TrainState, dict[str, Array]]:
  """The state after a step along gradients, and all metrics; see `update`."""
  metrics = dict(found.metrics)
  new_policy, policy_report = _apply(
    policy_optimizer, state.policy, found.policy, numbers['policy']
  )
  finite = jnp.isfinite(policy_report['grad_norm'])
  metrics |= {f'actor/{name}': x for name, x in policy_report.items()}
  new_value = None
  if found.value is not None:
    new_value, value_report = _apply(
      value_optimizer, state.value, found.value, numbers['value']
    )
    finite &= jnp.isfinite(value_report['grad_norm'])
    metrics |= {f'critic/{name}': x for name, x in value_report.items()}
  new_state = state_lib.TrainState(
    _chosen(finite & numbers['policy_learns'], new_policy, state.policy),
    _chosen(finite, new_value, state.value),
  )
  metrics['update/skipped'] = 1.0 - finite.astype(jnp.float32)
  return new_state, metrics


def gradients(
  state: state_lib.TrainState,
  batch: batch_lib.TokenBatch,
  algorithm: algorithm_lib.Algorithm,
  numbers: Mapping[str, Any],
  frozen: functional.Params | None = None,
  *,
  policy: functional.Model,
  value: functional.Model | None,
  temperature: float,
  num_turns: int,
  num_microbatches: int,
) -> Gradients:
  """What an update follows, before norms are clipped.

  Weights are cast to the dtype of the activations once, and gradients are
  summed over microbatches in float32.

  Args:
    state, batch, algorithm, numbers, frozen: see `update`.
    policy, value: models; the value model is None where the row has none, and
      where the policy has the value head.
    temperature: of sampling.
    num_turns: static, the most turns of a row.
    num_microbatches: static; divides the rows.
  """
  policy_params, value_params, frozen = (
    precision.computed(params, policy.config.dtype)
    for params in (
      state.policy.params,
      None if value is None else state.value.params,
      frozen,
    )
  )
  count = aggregation.aggregate_count(
    batch, num_turns=num_turns, **algorithm.aggregate.arguments()
  )
  value_count = jnp.maximum(jnp.sum(batch.value_mask_BL), 1)
  microbatches = accumulation.cut(batch, num_microbatches)

  shared = policy.head == 'both'
  whole = functools.partial(state_lib.whole, frozen=frozen)

  def score(params, part):
    return policy.scores(
      whole(policy, params=params),
      part.tokens_BL,
      part.loss_positions_BM,
      part.lengths_B,
      part.expert_ids_BLNE,
      temperature=temperature,
    )

  statistics = None  # one microbatch forms its own
  if num_microbatches > 1:
    statistics = _statistics(
      lambda part: score(policy_params, part)[:2],
      batch,
      microbatches,
      algorithm,
      num_turns=num_turns,
    )

  def policy_parts(params, part):
    logprobs_BL, entropy_BL, values_BL, routing = score(params, part)
    loss = losses.policy_loss(
      algorithm,
      logprobs_BL,
      entropy_BL,
      part,
      statistics=statistics,
      count=count,
      entropy_coefficient=numbers['entropy_coefficient'],
      num_turns=num_turns,
    )
    diagnostics = diagnostics_lib.policy_diagnostics(
      algorithm, loss, logprobs_BL, entropy_BL, part, num_turns=num_turns
    )
    heads = {'policy': loss.policy, 'bias': loss.bias, 'other': loss.other}
    scalars = {'actor/pg_loss': loss.policy, 'actor/kl_loss': loss.kl}
    if shared:
      value_loss, clipped = value_part(values_BL, part, loss.value_weights_BL)
      # Among the rest: a correction of the policy's gradient leaves it alone.
      heads['other'] += numbers['value_coefficient'] * value_loss
      scalars |= {'critic/vf_loss': value_loss, 'critic/vf_clipfrac': clipped}
    if routing is not None:
      balance = load_balance.loss(
        routing.probs_BX,
        part,
        of=batch,
        visited=policy.config.num_experts_per_tok,
      )
      heads['other'] += numbers['load_balance_coefficient'] * balance
      scalars['actor/load_balance'] = balance
    return heads, (scalars, loss.value_weights_BL, diagnostics)

  def value_part(values_BL, part, weights_BL):
    loss = losses.value_loss(
      values_BL,
      part.values_BL,
      part.returns_BL,
      part.value_mask_BL,
      clip=numbers['value_clip'],
      weights_BL=weights_BL,
    )
    return loss.total / value_count, loss.clipped / value_count

  wanted = gradients_lib.pull_backs(algorithm)

  def measure(part):
    heads, pull, (scalars, weights_BL, diagnostics) = jax.vjp(
      lambda params: policy_parts(params, part), policy_params, has_aux=True
    )
    parts = {
      name: pull({head: jnp.float32(head in cotangent) for head in heads})[0]
      for name, cotangent in wanted.items()
    }
    value_gradient = None
    if value is not None:
      (value_loss, clipped), value_gradient = jax.value_and_grad(
        lambda params: value_part(
          value.values(
            whole(value, params=params), part.tokens_BL, part.lengths_B
          ),
          part,
          weights_BL,
        ),
        has_aux=True,
      )(value_params)
      scalars['critic/vf_loss'] = value_loss
      scalars['critic/vf_clipfrac'] = clipped
    parts, value_gradient = accumulation.summand(
      (parts, value_gradient), policy.mesh
    )
    return (parts, value_gradient, scalars), diagnostics

  sums, stacked = accumulation.summed(measure, microbatches)
  parts, value_gradient, metrics = sums
  policy_gradient, corrected = gradients_lib.combine(algorithm, parts)
  return Gradients(
    policy_gradient,
    value_gradient,
    metrics | corrected,
    diagnostics_lib.merge_stacked(stacked),
  )


def _apply(optimizer, model, gradient, numbers):
  params, optimizer_state, report = optimizer_lib.apply_update(
    optimizer, model.params, model.optimizer, gradient, model.updates, numbers
  )
  new = state_lib.ModelState(params, optimizer_state, model.updates + 1)
  return new, report


def _chosen(condition: Array, new: Tree, old: Tree) -> Tree:
  return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _statistics(score, batch, microbatches, algorithm, *, num_turns):
  """What the loss must know of the minibatch: a pass without gradient.

  None of it where the row needs nothing.
  """
  measure = functools.partial(
    losses.minibatch_statistics, algorithm, num_turns=num_turns
  )
  zeros_BL = jnp.zeros(batch.loss_mask_BL.shape, jnp.float32)
  if not jax.tree.leaves(jax.eval_shape(measure, zeros_BL, zeros_BL, batch)):
    return measure(zeros_BL, zeros_BL, batch)
  _, scores = jax.lax.scan(
    lambda _, part: (None, score(part)), None, microbatches
  )
  logprobs_BL, entropy_BL = accumulation.joined(scores)
  return measure(logprobs_BL, entropy_BL, batch)
