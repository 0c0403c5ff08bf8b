"""Packs trajectories into rows, and runs a model over the rows.

B trajectories, L tokens of each, M loss positions, X experts; s shards, b
trajectories of a shard, m = b L tokens of these trajectories; r packed rows, l
tokens of a packed row, p token positions in all packed rows of a shard.

The rest of the learner, and all of `rl`, have one trajectory per row, [B, L].
If a batch has a `batch.Packing`, its trajectories are moved into packed rows
before the model computes. Each token attends to its own trajectory only, and
the outputs are moved back to [B, L]. All moves are within a shard, so no data
goes from one device to another.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import model_roles
from stppo_jax.models import attention
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models import moe
from stppo_jax.parallel import activations
from stppo_jax.parallel import rows as rows_lib

Array = jax.Array
_Outputs = TypeVar('_Outputs')


class Inputs(NamedTuple):
  """The fields of a `TokenBatch` that models read."""

  tokens_BL: Array
  lengths_B: Array | None = None
  loss_mask_BL: Array | None = None
  loss_positions_BM: Array | None = None
  expert_ids: Array | None = None
  packing: batch_lib.Packing | None = None


def inputs_of(batch: batch_lib.TokenBatch) -> Inputs:
  """Returns the fields of a batch that models read."""
  return Inputs(*(getattr(batch, name) for name in Inputs._fields))


def token_outputs(
  model: functional.Model,
  params: functional.Params,
  inputs: Inputs,
  *,
  temperature: float,
  values_everywhere: bool = True,
) -> functional.TokenOutputs:
  """Returns all outputs of a policy for the tokens of trajectories.

  Args:
    model: the policy.
    params: the weights of the policy.
    inputs: the trajectories.
    temperature: the number that divides the logits.
    values_everywhere: see `functional.Model.token_outputs`.
  """
  return in_rows(
    lambda tokens_BL, **rows: model.token_outputs(
      params,
      tokens_BL,
      temperature=temperature,
      values_everywhere=values_everywhere,
      **rows,
    ),
    inputs,
    model.mesh,
  )


def all_outputs(
  params: model_roles.Params,
  inputs: Inputs,
  *,
  models: model_roles.Models,
  temperature: float,
) -> functional.TokenOutputs:
  """Returns log-probabilities, entropy and values of trajectories.

  A policy with a value head needs one forward pass for all of them. A separate
  value model has a forward pass of its own. Values are returned at every token,
  also outside the loss positions.

  Args:
    params: the weights of both models.
    inputs: the trajectories; only the policy replays their `expert_ids`.
    models: policy and value model.
    temperature: the sampling temperature.
  """
  outputs = token_outputs(
    models.policy,
    models.policy_weights(params),
    inputs,
    temperature=temperature,
  )
  if models.value is None:
    return outputs
  return outputs._replace(
    values=values(models.value, models.value_weights(params), inputs)
  )


def values(
  model: functional.Model,
  params: functional.Params,
  inputs: Inputs,
  *,
  everywhere: bool = True,
) -> heads.Values:
  """Returns the values of a value model.

  Args:
    model: the value model, which replays no experts.
    params: the weights of the value model.
    inputs: the trajectories.
    everywhere: with True values are computed at every token, with False only at
      the loss positions.
  """
  inputs = inputs._replace(expert_ids=None)
  if everywhere:
    inputs = inputs._replace(loss_positions_BM=None)
  return in_rows(
    lambda tokens_BL, **rows: model.values(params, tokens_BL, **rows),
    inputs,
    model.mesh,
  )


def of_pairs(packing: batch_lib.Packing, lengths_Q2: Any) -> batch_lib.Packing:
  """Returns the packing of single trajectories, given the packing of pairs.

  Args:
    packing: the packing of one microbatch of pairs. The trajectories of a pair
      follow each other in a row.
    lengths_Q2: the numbers of tokens of the trajectories of each pair.
  """
  size = packing.num_rows * packing.row_length
  shape = packing.starts.shape
  second = packing.starts + lengths_Q2[:, 0].reshape(shape)
  starts = jnp.stack([packing.starts, jnp.minimum(second, size)], axis=2)
  return dataclasses.replace(packing, starts=starts.reshape(shape[0], -1))


def in_rows(
  function: Callable[..., _Outputs],
  inputs: Inputs,
  mesh: jax.sharding.Mesh | None,
) -> _Outputs:
  """Moves trajectories into rows, applies a function, and moves outputs back.

  Args:
    function: maps (tokens_rl, **`functional.Rows`) to a pytree, whose leaves
      are arrays [r, l] with a number for each token, arrays [r, l, Y], or
      `moe.Routing`.
    inputs: the trajectories. Without a packing they already are the rows.
    mesh: the mesh on which the trajectories are laid out.

  Returns:
    The function's outputs, with arrays [B, L] or [B, L, Y]. If the trajectories
    were packed, outputs are 0 at padding and at the first token of each
    trajectory, which no token predicts. The ids of experts are -1 at padding.
  """
  packing = inputs.packing
  if packing is None:
    return function(
      inputs.tokens_BL,
      lengths_B=inputs.lengths_B,
      loss_positions_BM=inputs.loss_positions_BM,
      expert_ids=inputs.expert_ids,
    )
  s, b = packing.starts.shape
  B, L = inputs.tokens_BL.shape
  r, length = s * packing.num_rows, packing.row_length
  constrain = lambda x: activations.constrain(x, mesh, activations.ROWS)
  assert inputs.lengths_B is not None
  source_sp, target_sm, segments = _maps(packing, inputs.lengths_B, L)
  segments = segments._replace(
    ids_BL=constrain(segments.ids_BL),
    positions_BL=constrain(segments.positions_BL),
  )
  to_rows: Any = lambda x: constrain(
    rows_lib.take_filled(x.reshape(s, b * L, *x.shape[2:]), source_sp).reshape(
      r, length, *x.shape[2:]
    )
  )
  loss_positions_rm = expert_ids = None
  if inputs.loss_positions_BM is not None:
    # The first token of each trajectory has no prediction, so it is left out.
    # All positions of a row that are not loss positions are replaced by the
    # row's length, which marks an unused entry. Sorting puts these entries
    # behind the loss positions.
    mask_rl = to_rows(inputs.loss_mask_BL) & (segments.positions_BL > 0)
    places_rl = jnp.where(mask_rl, jnp.arange(length)[None], length)
    loss_positions_rm = jnp.sort(places_rl, axis=1)[:, : packing.num_losses]
  if inputs.expert_ids is not None:
    # `to_rows` puts 0 at positions without a token. The ids are increased by 1
    # before `to_rows` and decreased by 1 after it, so these positions get the
    # id -1. There, the router chooses the experts.
    expert_ids = to_rows(inputs.expert_ids + 1) - 1
  outputs = function(
    to_rows(inputs.tokens_BL),
    segments=segments,
    loss_positions_BM=loss_positions_rm,
    expert_ids=expert_ids,
  )
  # If two trajectories share a row, the last state of the first trajectory
  # predicts the first token of the second. This prediction has no meaning and
  # is not moved to [B, L].
  first_1m = jnp.arange(b * L)[None] % L == 0
  later_sm = jnp.where(first_1m, source_sp.shape[1], target_sm)
  # `back_sp` inverts `later_sm`, so that the gradient is a gather, too. jax
  # would derive a scatter, which is slow and not deterministic.
  positions_sp = segments.positions_BL.reshape(s, -1)
  back_sp = jnp.where(positions_sp > 0, source_sp, b * L)
  flat = lambda x: x.reshape(s, -1, *x.shape[2:])

  def to_trajectories(x: Any) -> Any:
    if isinstance(x, moe.Routing):
      # The model returns sums of visits and of probabilities for each row and
      # segment number. A segment number of a shard occurs in only one of the
      # shard's rows, so the sum over these rows is the sum of one trajectory.
      ids = rows_lib.take_filled(flat(x.expert_ids + 1), target_sm) - 1
      sums = (
        jnp.sum(y.reshape(s, -1, *y.shape[1:]), axis=1).reshape(B, -1)
        for y in (x.visits_BX, x.probs_BX)
      )
      ids = constrain(ids.reshape(B, L, *ids.shape[2:]))
      return moe.Routing(ids, *sums)
    moved = rows_lib.take_with_inverse(flat(x), later_sm, back_sp)
    return constrain(moved.reshape(B, L, *x.shape[2:]))

  return jax.tree.map(
    to_trajectories, outputs, is_leaf=lambda x: isinstance(x, moe.Routing)
  )


def _maps(
  packing: batch_lib.Packing, lengths_B: Array, L: int
) -> tuple[Array, Array, attention.Segments]:
  """Returns the index maps between trajectories and packed rows.

  Args:
    packing: the packing of one microbatch.
    lengths_B: the number of tokens of each trajectory.
    L: the number of tokens of a trajectory with its padding.

  Returns:
    source [s, p]: for each position in the rows of a shard, the index of its
      token among the b L tokens of the shard's trajectories; b L if the
      position is empty.
    target [s, m]: for each of these b L tokens, its position in the rows; p for
      padding.
    segments: says which trajectory of the shard each position belongs to.
  """
  s, b = packing.starts.shape
  size = packing.num_rows * packing.row_length
  starts_sb, lengths_sb = packing.starts, lengths_B.reshape(s, b)
  # Starts increase, so a position belongs to the trajectory with the last start
  # at or before the position. Comparing each position with all starts is faster
  # than scattering the indices of the trajectories to the positions.
  places_p = jnp.arange(size)
  passed_sbp = starts_sb[..., None] <= places_p[None, None]
  number_sp = jnp.maximum(jnp.sum(passed_sbp, axis=1) - 1, 0)
  of = lambda x_sb: jnp.take_along_axis(x_sb, number_sp, axis=1)
  position_sp = places_p[None] - of(starts_sb)
  # No token stands before the first trajectory, where `position_sp` is
  # negative, or in a gap behind a trajectory, where it is too large.
  text_sp = (position_sp >= 0) & (position_sp < of(lengths_sb))
  only = lambda x_sp: jnp.where(text_sp, x_sp, 0)
  source_sp = jnp.where(text_sp, number_sp * L + position_sp, b * L)
  l_11L = jnp.arange(L)[None, None]
  target_sbL = jnp.where(
    l_11L < lengths_sb[..., None], starts_sb[..., None] + l_11L, size
  )
  by_row = lambda x_sp: x_sp.reshape(-1, packing.row_length)
  segments = attention.Segments(
    by_row(only(number_sp + 1)),
    by_row(only(position_sp)),
    b,
    min(L, packing.row_length),
  )
  return source_sp, target_sbL.reshape(s, b * L), segments
