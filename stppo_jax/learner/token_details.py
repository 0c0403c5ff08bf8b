"""Measures the tokens of a few trajectories after the updates of a step.

B trajectories, L tokens.

One forward pass of the new policy over rows of the batch shows how the updates
changed each token: its ratio, whether the objective now cuts its gradient, and
the weight that the corrections give it. Some bounds and corrections read
statistics of a minibatch. These are formed over the chosen rows, as if the rows
were a minibatch.
"""

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.learner import forward
from stppo_jax.learner import minibatches
from stppo_jax.learner import model_roles
from stppo_jax.learner import packing as packing_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import rows as rows_lib
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import losses
from stppo_jax.rl import ratios

Array = jax.Array


def choose_rows(
  num_rows: int, count: int, *, num_hosts: int, num_devices: int
) -> np.ndarray:
  """Chooses the first rows of each host, which all devices share equally.

  Args:
    num_rows: the number of rows of the batch, which holds the rows of one host
      after the other.
    count: the number of rows that are wanted of each host.
    num_hosts: the number of hosts.
    num_devices: the number of devices that share the rows of a batch; divides
      num_rows.

  Returns:
    int32 row numbers, equally many of each host, one host after the other. The
    number of rows is a multiple of num_devices.
  """
  # The loop looks for the smallest number of rows of each host that all devices
  # can share equally. If no smaller number is possible, all rows are chosen.
  size = num_rows // num_hosts
  for each in range(min(count, size), size):
    if each * num_hosts % num_devices == 0:
      break
  else:
    each = size
  starts = np.arange(num_hosts, dtype=np.int32) * size
  return (starts[:, None] + np.arange(each, dtype=np.int32)).reshape(-1)


def measure_tokens(
  state: state_lib.TrainState,
  batch: batch_lib.TokenBatch,
  packed: packing_lib.Packed,
  algorithm: algorithm_lib.Algorithm,
  *,
  models: model_roles.Models,
  temperature: float,
  num_turns: int,
) -> batch_lib.TokenDetails:
  """Returns measurements of the tokens of `packed.rows`, in that order.

  Args:
    state: the state after the updates.
    batch: the annotated batch of these updates.
    packed: rows from `choose_rows`, and their packing.
    algorithm: the algorithm, whose numbers may be traced.
    models: policy and value model, with the mesh of the batch.
    temperature: the sampling temperature.
    num_turns: static, the largest number of turns of a trajectory.
  """
  policy = models.policy
  chosen = rows_lib.select(batch, packed.rows, policy.mesh)
  weights = models.policy_weights(models.cast(state.params))
  logprobs_BL, entropy_BL = minibatches.map_rows(
    lambda inputs: forward.token_outputs(
      policy, weights, inputs, temperature=temperature
    )[:2],
    forward.inputs_of(chosen),
    packed.packing,
  )
  # Only the cut mask and the weights of the loss are used, not its value. So
  # the entropy coefficient is 0, and statistics and count are formed from these
  # rows.
  loss = losses.policy_loss(
    algorithm,
    logprobs_BL,
    entropy_BL,
    chosen,
    statistics=None,
    count=None,
    entropy_coefficient=0.0,
    num_turns=num_turns,
  )
  log_ratio_BL = ratios.token_log_ratio(
    logprobs_BL, chosen.old_logprobs_BL, chosen.loss_mask_BL
  )
  turn_log_ratio_BL = ratios.level_log_ratio(
    log_ratio_BL,
    chosen,
    level='turn',
    gradient='segment',
    reduce=algorithm.ratio.reduce,
    num_turns=num_turns,
  )
  return batch_lib.TokenDetails(
    loss_mask_BL=chosen.loss_mask_BL,
    old_logprobs_BL=chosen.old_logprobs_BL,
    ratio_BL=jnp.exp(log_ratio_BL),
    turn_ratio_BL=jnp.exp(turn_log_ratio_BL),
    entropy_BL=entropy_BL,
    advantages_BL=chosen.advantages_BL,
    values_BL=chosen.values_BL,
    cut_BL=loss.cut_BL,
    weights_BL=jnp.broadcast_to(loss.weights_BL, logprobs_BL.shape),
  )
