"""Derives random keys from the seed, the step, the purpose and the row.

No key is stored, because a resumed run derives the same keys again.
"""

import enum

import jax
import jax.numpy as jnp

Array = jax.Array


class Purpose(enum.IntEnum):
  """The purpose of a key; each purpose has its own keys."""

  # These numbers are folded into the keys and must not change. Otherwise a run
  # of an earlier version would resume with other random numbers.
  COLLECT = 0
  EVALUATE = 1
  SHUFFLE = 2
  INIT = 3
  RESAMPLE = 4
  CONTINUE = 5


def step_key(seed: int, step: int, purpose: Purpose) -> Array:
  """Returns the key for one purpose in one step."""
  key = jax.random.fold_in(jax.random.key(seed), step)
  return jax.random.fold_in(key, purpose)


def row_keys(key: Array, first_row: int, count: int) -> Array:
  """Returns keys [count], derived from `key`, for rows from `first_row` on."""
  rows = jnp.arange(first_row, first_row + count)
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
