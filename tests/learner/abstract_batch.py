"""The shapes of a step's rows, to lower programs without data."""

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib


def packed(rows: int, length: int, losses: int) -> batch_lib.TokenBatch:
  """Returns the shapes of rows, of whose tokens `losses` have a loss."""
  of = lambda dtype, *shape: jax.ShapeDtypeStruct((rows, *shape), dtype)
  ids_BL, numbers_BL = of(jnp.int32, length), of(jnp.float32, length)
  return batch_lib.TokenBatch(
    tokens_BL=ids_BL,
    lengths_B=of(jnp.int32),
    turn_ids_BL=ids_BL,
    loss_mask_BL=of(jnp.bool_, length),
    sampler_logprobs_BL=numbers_BL,
    rewards_BL=numbers_BL,
    group_ids_B=of(jnp.int32),
    loss_positions_BM=of(jnp.int32, losses),
  )
