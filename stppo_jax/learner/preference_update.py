"""One optimiser step of a policy on pairs of trajectories.

P pairs, cut into microbatches; 2 = (preferred, dispreferred); L tokens.
Order, always: global-norm clip, Adam.
"""

from collections.abc import Mapping
from typing import Any

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


def update(
  state: state_lib.ModelState,
  reference: functional.Params,
  batch: batch_lib.PairBatch,
  numbers: Mapping[str, Any],
  frozen: functional.Params | None = None,
  *,
  policy: functional.Model,
  optimizer: optimizer_lib.Optimizer,
  name: str,
  temperature: float,
  num_microbatches: int,
) -> tuple[state_lib.ModelState, dict[str, Array]]:
  """One optimiser step on the mean loss of the pairs.

  Sums are divided once, by the pairs of the whole minibatch, so that cutting
  it changes nothing. A gradient that is not finite changes nothing and is
  counted in `update/skipped`.

  Args:
    state: before; donate it.
    reference: weights of the frozen reference.
    batch: the pairs.
    numbers: 'optimizer' (see `optimizer.apply_update`), 'beta' and 'alpha'
      (see `preferences.preference_loss`); runtime values.
    frozen: the base under adapters; None: everything is trained.
    policy: the model of policy and reference.
    optimizer: from `optimizer.build_optimizer`.
    name: of the loss.
    temperature: of sampling.
    num_microbatches: static; divides the pairs.

  Returns:
    The new state and scalar metrics.
  """

  def total(params, part):
    # Rows are 0's preferred, 0's dispreferred, 1's ...: each device its own.
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), part)
    found = policy.divergence(
      state_lib.join_frozen(policy, frozen, params),
      reference,
      rows.tokens_Q2L,
      lengths_B=rows.lengths_Q2,
      loss_positions_BM=rows.loss_positions_Q2M,
      temperature=temperature,
    )
    loss = preferences.preference_loss(
      *(x_BL.reshape(part.tokens_Q2L.shape) for x_BL in found),
      part.loss_mask_Q2L,
      name=name,
      beta=numbers['beta'],
      alpha=numbers['alpha'],
    )
    return loss.total, loss

  # Cast once an update; sums in float32, where the weights lie.
  computed, reference, frozen = (
    precision.cast(params, policy.config.dtype)
    for params in (state.params, reference, frozen)
  )

  def measure(part):
    gradient, loss = jax.grad(total, has_aux=True)(computed, part)
    return (microbatches_lib.summand(gradient, policy.mesh), loss), ()

  microbatches = microbatches_lib.cut(batch, num_microbatches)
  (gradient, sums), _ = microbatches_lib.summed(measure, microbatches)
  count = jnp.maximum(sums.count, 1)
  gradient, mean = jax.tree.map(lambda x: x / count, (gradient, sums))
  params, optimizer_state, report = optimizer_lib.apply_update(
    optimizer,
    state.params,
    state.optimizer,
    gradient,
    state.updates,
    numbers['optimizer'],
  )
  finite = jnp.isfinite(report['grad_norm'])
  new_state = jax.tree.map(
    lambda new, old: jnp.where(finite, new, old),
    state_lib.ModelState(params, optimizer_state, state.updates + 1),
    state,
  )
  metrics = {
    'preference/loss': mean.total,
    'preference/margin': mean.margin,
    'preference/accuracy': mean.correct,
    'preference/pairs': sums.count,
    'update/skipped': 1.0 - finite.astype(jnp.float32),
  }
  for side, kind in enumerate(('preferred', 'dispreferred')):
    metrics[f'preference/{kind}/log_ratio'] = mean.log_ratio_2[side]
    metrics[f'preference/{kind}/kl'] = mean.divergence_2[side]
  return new_state, metrics | {f'actor/{k}': x for k, x in report.items()}
