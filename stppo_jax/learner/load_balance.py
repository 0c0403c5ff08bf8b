"""The load-balance loss of a policy with experts, over a whole minibatch.

B rows of a minibatch or of a part of it, L tokens, X experts. Rows without loss
tokens, such as failed ones, count nowhere.
"""

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.models import moe
from stppo_jax.rl import masking

Array = jax.Array


def loss(
  probs_BX: Array,
  part: batch_lib.TokenBatch,
  *,
  of: batch_lib.TokenBatch,
  visited: int,
) -> Array:
  """The share of a microbatch in `moe.load_balance`; shares add up.

  The load is that of the old policy's pass over the minibatch. With routing
  replay, and before the first update, it is that of this pass too.

  Args:
    probs_BX: of the microbatch, see `moe.Routing`; the gradient is of them.
    part: the microbatch.
    of: the minibatch.
    visited: E, experts that a token visits.
  """
  visits_X = jnp.sum(_of_rows(of.expert_visits_BX, of), axis=0)
  probs_X = jnp.sum(_of_rows(probs_BX, part), axis=0)
  tokens = jnp.sum(visits_X) / visited
  return moe.load_balance(visits_X, probs_X, tokens)


def _of_rows(x_BX: Array, batch: batch_lib.TokenBatch) -> Array:
  """The rows that count, others 0."""
  rows_B = jnp.any(batch.loss_mask_BL, axis=1)
  return masking.select(x_BX, jnp.broadcast_to(rows_B[:, None], x_BX.shape))
