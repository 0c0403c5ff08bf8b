"""One optimiser step of the policy and the value model.

`update` takes `jax.value_and_grad` of `loss.loss`, sums the gradients of the
microbatches and applies the optimisers. Two properties of an algorithm add to
this:

  - `uses_minibatch_statistics`: a forward pass over all microbatches comes
    first, from which `loss.minibatch_context` forms the statistics;
  - `divides_by_bias_norm`: three gradients are taken instead of one, and
    `rl/clipping_bias.py` combines them after the sum.

A gradient is divided by the bias norm, if at all, then clipped by its global
norm, then given to Adam.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import forward
from stppo_jax.learner import loss as loss_lib
from stppo_jax.learner import microbatches as microbatches_lib
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.parallel import rows as rows_lib
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import clipping_bias as clipping_bias_lib
from stppo_jax.rl import diagnostics as diagnostics_lib

Array = jax.Array
Tree = Any


class Hyperparameters(NamedTuple):
  """Runtime numbers of an update; another value does not recompile.

  Attributes:
    loss: coefficients of the loss terms.
    policy, value: numbers of the two optimisers.
    policy_learns: False updates the value model alone.
  """

  loss: loss_lib.Coefficients
  policy: optimizer_lib.Hyperparameters
  value: optimizer_lib.Hyperparameters
  policy_learns: Array | bool


def update(
  state: state_lib.TrainState,
  batch: batch_lib.TokenBatch,
  algorithm: algorithm_lib.Algorithm,
  hyperparameters: Hyperparameters,
  *,
  frozen: functional.Params | None = None,
  spec: loss_lib.UpdateSpec,
) -> tuple[state_lib.TrainState, loss_lib.LossOutputs]:
  """Updates both models on one annotated minibatch.

  An update changes nothing, and is counted in the metric `update/skipped`, if
  its loss, gradient, new weights or new moments are not finite, or if the norm
  of a gradient is above `skip_grad_norm`.

  Args:
    state: the state before the update, without its frozen weights; donate it.
    batch: the annotated minibatch.
    algorithm: the algorithm, whose numbers may be traced.
    hyperparameters: runtime numbers.
    frozen: the base under adapters; None where everything is trained.
    spec: models and static sizes.

  Returns:
    The new state, and metrics with diagnostics of the ratios.
  """
  gradient, outputs = gradients(
    state,
    batch,
    algorithm,
    hyperparameters.loss,
    frozen=frozen,
    spec=spec,
  )
  return apply_gradients(state, gradient, outputs, hyperparameters, spec=spec)


def update_rows(
  state: state_lib.TrainState,
  batch: batch_lib.TokenBatch,
  rows: Array,
  algorithm: algorithm_lib.Algorithm,
  hyperparameters: Hyperparameters,
  *,
  frozen: functional.Params | None = None,
  mesh: jax.sharding.Mesh,
  spec: loss_lib.UpdateSpec,
) -> tuple[state_lib.TrainState, loss_lib.LossOutputs]:
  """Updates on some rows of a batch on a mesh, laid out again; see `update`.

  Selecting the rows and updating are one program: two programs in flight, both
  with collectives, can block each other on CPU devices.
  """
  minibatch = rows_lib.select(batch, rows, mesh)
  return update(
    state, minibatch, algorithm, hyperparameters, frozen=frozen, spec=spec
  )


def gradients(
  state: state_lib.TrainState,
  batch: batch_lib.TokenBatch,
  algorithm: algorithm_lib.Algorithm,
  coefficients: loss_lib.Coefficients,
  *,
  frozen: functional.Params | None = None,
  spec: loss_lib.UpdateSpec,
) -> tuple[forward.TrainedParams, loss_lib.LossOutputs]:
  """Returns the float32 gradients of a minibatch before norms are clipped.

  Args:
    state, batch, algorithm, frozen, spec: see `update`.
    coefficients: the coefficients of the loss terms.
  """
  params, frozen = forward.cast_params(
    state, frozen=frozen, dtype=spec.policy.config.dtype
  )
  microbatches = microbatches_lib.split(batch, spec.num_microbatches)
  policy_outputs = None
  if algorithm.uses_minibatch_statistics and spec.num_microbatches > 1:
    policy_outputs = loss_lib.policy_outputs(
      params, microbatches, frozen=frozen, spec=spec
    )
  context = loss_lib.minibatch_context(
    batch, algorithm, outputs=policy_outputs, spec=spec
  )
  sums = sum_gradients(
    params,
    microbatches,
    context,
    algorithm,
    coefficients,
    frozen=frozen,
    spec=spec,
  )
  return finish_gradients(algorithm, *sums)


def sum_gradients(
  params: forward.TrainedParams,
  microbatches: batch_lib.TokenBatch,
  context: loss_lib.MinibatchContext,
  algorithm: algorithm_lib.Algorithm,
  coefficients: loss_lib.Coefficients,
  *,
  frozen: functional.Params | None = None,
  spec: loss_lib.UpdateSpec,
) -> tuple[tuple[Tree, dict[str, Array]], diagnostics_lib.Diagnostics]:
  """Sums gradients and metrics over microbatches.

  Args:
    params, context, algorithm, coefficients, frozen, spec: see `loss.loss`.
    microbatches: arrays with leading axes (n, B / n): all microbatches of the
      minibatch, or some of them.

  Returns:
    ((gradients, metrics), stacked diagnostics) for `finish_gradients`; the sums
    of several calls add up.
  """
  differentiate = jax.value_and_grad(loss_lib.loss, has_aux=True)
  if algorithm.divides_by_bias_norm:
    differentiate = _differentiate_terms

  def step(microbatch):
    (_, outputs), gradient = differentiate(
      params,
      microbatch,
      context,
      algorithm,
      coefficients,
      frozen=frozen,
      spec=spec,
    )
    gradient = microbatches_lib.to_accumulator(gradient, spec.policy.mesh)
    return (gradient, outputs.metrics), outputs.diagnostics

  return microbatches_lib.accumulate(step, microbatches)


def finish_gradients(
  algorithm: algorithm_lib.Algorithm,
  sums: tuple[Tree, dict[str, Array]],
  diagnostics: diagnostics_lib.Diagnostics,
) -> tuple[forward.TrainedParams, loss_lib.LossOutputs]:
  """Returns gradient and outputs of a minibatch from `sum_gradients`."""
  gradient, metrics = sums
  bias_norm = jnp.zeros(())
  if algorithm.divides_by_bias_norm:
    policy_gradient, bias_norm = clipping_bias_lib.divide_by_bias_norm(
      gradient._replace(other=gradient.other.policy),
      floor=algorithm.correction.clipping_bias.floor,
    )
    gradient = gradient.other._replace(policy=policy_gradient)
  return gradient, loss_lib.LossOutputs(
    metrics | {'stab/bias_grad_norm': bias_norm},
    diagnostics_lib.merge_stacked(diagnostics),
  )


def apply_gradients(
  state: state_lib.TrainState,
  gradient: forward.TrainedParams,
  outputs: loss_lib.LossOutputs,
  hyperparameters: Hyperparameters,
  *,
  spec: loss_lib.UpdateSpec,
) -> tuple[state_lib.TrainState, loss_lib.LossOutputs]:
  """Takes a step with both optimisers, or with neither if one is not sound.

  The policy also stays as it is if `policy_learns` is false.
  """
  metrics = dict(outputs.metrics)
  new_policy, sound, report = state_lib.take_step(
    spec.policy_optimizer,
    state.policy,
    gradient.policy,
    hyperparameters.policy,
    loss=outputs.metrics,
  )
  metrics |= {f'actor/{name}': x for name, x in report.items()}
  new_value = None
  if gradient.value is not None:
    assert state.value is not None  # both come from one config
    new_value, value_sound, report = state_lib.take_step(
      spec.value_optimizer,
      state.value,
      gradient.value,
      hyperparameters.value,
      loss=outputs.metrics,
    )
    sound &= value_sound
    metrics |= {f'critic/{name}': x for name, x in report.items()}
  new_state = state_lib.TrainState(
    state_lib.select(
      sound & hyperparameters.policy_learns, new_policy, state.policy
    ),
    state_lib.select(sound, new_value, state.value),
  )
  metrics['update/skipped'] = 1.0 - sound.astype(jnp.float32)
  return new_state, outputs._replace(metrics=metrics)


def _differentiate_terms(params: forward.TrainedParams, *arrays, **options):
  """Returns what `value_and_grad` of the loss does, with a gradient per term.

  The value model has no share in the policy and bias terms, so only the
  policy's gradients are kept of these two.
  """
  gradients, outputs = clipping_bias_lib.term_gradients(
    lambda p: loss_lib.loss_terms(p, *arrays, **options), params
  )
  gradients = gradients._replace(
    policy=gradients.policy.policy, bias=gradients.bias.policy
  )
  return (None, outputs), gradients
