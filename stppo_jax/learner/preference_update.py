"""One optimiser step of a policy on pairs of trajectories.

Q pairs, split into microbatches; 2 = (preferred, dispreferred); L tokens.
The order is always: global-norm clip, Adam.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import microbatches as microbatches_lib
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.rl import preferences

Array = jax.Array


class Hyperparameters(NamedTuple):
  """Runtime numbers of an update; another value does not recompile.

  Attributes:
    optimizer: numbers of the optimiser.
    beta, alpha: see `preferences.preference_loss`.
  """

  optimizer: optimizer_lib.Hyperparameters
  beta: Array | float
  alpha: Array | float


def update(
  state: state_lib.ModelState,
  batch: batch_lib.PairBatch,
  hyperparameters: Hyperparameters,
  reference: functional.Params,
  *,
  frozen: functional.Params | None = None,
  policy: functional.Model,
  optimizer: optimizer_lib.Optimizer,
  name: str,
  temperature: float,
  num_microbatches: int,
) -> tuple[state_lib.ModelState, dict[str, Array]]:
  """Takes one optimiser step on the mean loss of the pairs.

  Sums are divided once, by the pairs of the whole minibatch, so splitting it
  changes nothing. An update whose gradient, new weights or new moments are not
  finite changes nothing and is counted in the metric `update/skipped`.

  Args:
    state: the policy before the update; donate it.
    batch: the pairs.
    hyperparameters: runtime numbers.
    reference: weights of the frozen reference.
    frozen: the base under adapters; None where everything is trained.
    policy: the model of policy and reference.
    optimizer: see `optimizer.from_config`.
    name: a key of `preferences.PREFERENCES`.
    temperature: the sampling temperature.
    num_microbatches: static; divides the pairs.

  Returns:
    The new state and scalar metrics.
  """

  def loss(params, microbatch):
    # From [Q, 2, ...] to rows: pair 0's preferred, pair 0's dispreferred, pair
    # 1's preferred, ... In this order each device keeps its own rows.
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), microbatch)
    outputs = policy.divergence(
      state_lib.join_frozen(policy, frozen, params),
      reference,
      rows.tokens_Q2L,
      lengths_B=rows.lengths_Q2,
      loss_positions_BM=rows.loss_positions_Q2M,
      temperature=temperature,
    )
    logprobs, ref_logprobs, divergence = (
      x_BL.reshape(microbatch.tokens_Q2L.shape) for x_BL in outputs
    )
    loss = preferences.preference_loss(
      logprobs,
      ref_logprobs,
      divergence,
      microbatch.loss_mask_Q2L,
      name=name,
      beta=hyperparameters.beta,
      alpha=hyperparameters.alpha,
    )
    return loss.total, loss

  # Cast once per update, outside the loop over microbatches.
  params, reference, frozen = precision.cast(
    (state.params, reference, frozen), policy.config.dtype
  )

  def step(microbatch):
    (_, loss_sums), gradient = jax.value_and_grad(loss, has_aux=True)(
      params, microbatch
    )
    gradient = microbatches_lib.to_accumulator(gradient, policy.mesh)
    return (gradient, loss_sums), ()

  microbatches = microbatches_lib.split(batch, num_microbatches)
  (gradient, sums), _ = microbatches_lib.accumulate(step, microbatches)
  count = jnp.maximum(sums.count, 1)
  gradient, mean = jax.tree.map(lambda x: x / count, (gradient, sums))
  new_state, sound, report = state_lib.take_step(
    optimizer, state, gradient, hyperparameters.optimizer, loss=mean.total
  )
  new_state = state_lib.select(sound, new_state, state)
  metrics = {
    'preference/loss': mean.total,
    'preference/margin': mean.margin,
    'preference/accuracy': mean.correct,
    'preference/pairs': sums.count,
    'update/skipped': 1.0 - sound.astype(jnp.float32),
  }
  for index, side in enumerate(('preferred', 'dispreferred')):
    metrics[f'preference/{side}/log_ratio'] = mean.log_ratio_2[index]
    metrics[f'preference/{side}/kl'] = mean.divergence_2[index]
  return new_state, metrics | {f'actor/{k}': x for k, x in report.items()}
