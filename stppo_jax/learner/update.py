"""One optimiser step of the policy and the value model.

Order, always: clipping-bias correction, global-norm clip, Adam.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from stppo_jax import batch as batch_lib
from stppo_jax.learner import loss
from stppo_jax.learner import microbatches as microbatches_lib
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics as diagnostics_lib

Array = jax.Array
Tree = Any


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
  found: loss.Gradients,
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
) -> loss.Gradients:
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
  losses = loss.Losses(policy, value, temperature, num_turns)
  weights = losses.weights(state, frozen)
  microbatches = microbatches_lib.cut(batch, num_microbatches)
  cut = num_microbatches > 1  # one microbatch forms its own statistics
  scores = None
  if cut and losses.looks_first(algorithm, batch):
    scores = losses.scores(weights, microbatches)
  whole = losses.whole(algorithm, batch, scores, cut=cut)
  sums = losses.sums(weights, whole, algorithm, numbers, microbatches)
  return loss.combined(algorithm, *sums)


def _apply(optimizer, model, gradient, numbers):
  params, optimizer_state, report = optimizer_lib.apply_update(
    optimizer, model.params, model.optimizer, gradient, model.updates, numbers
  )
  new = state_lib.ModelState(params, optimizer_state, model.updates + 1)
  return new, report


def _chosen(condition: Array, new: Tree, old: Tree) -> Tree:
  return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
