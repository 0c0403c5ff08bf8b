"""The load-balance loss of a policy with experts, over a whole minibatch.

B rows of a minibatch or of one of its microbatches, L tokens, X experts. Rows
without loss tokens, such as failed trajectories, count nowhere.
"""

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.models import moe
from stppo_jax.rl import masking

Array = jax.Array


def loss(
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
