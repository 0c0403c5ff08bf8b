"""The arrays of one collected batch, aligned by token.

B trajectories, one per row; L tokens of a row; M loss positions of a row; X
experts; E experts that a token visits; Q pairs. Index l of every [B, L] array
describes token l.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
  """Says where each sequence stands in packed rows of a forward pass.

  A packed row holds one or several sequences, each a trajectory or a pair. n
  microbatches; s shards of the sequences, one per device along the mesh axes
  that rows are sharded along; b slots for the sequences of a shard in a
  microbatch. In the packing of a single microbatch the arrays have no axis n.

  Attributes:
    rows: int32 [n, s, b], the index of each sequence in its shard, ordered by
      `starts`. An unused slot has an index that is too large for the shard.
    starts: int32 [n, s, b], the position of each sequence's first token,
      counted through all packed rows of the shard. The start of an unused slot
      is num_rows * row_length.
    num_rows: the number of packed rows of a shard in a microbatch.
    row_length: the number of tokens of a packed row.
    num_losses: the number of positions of a packed row at which the head
      computes logits, enough for the loss positions of any packed row.
  """

  rows: Any
  starts: Any
  num_rows: int = dataclasses.field(metadata={'static': True})
  row_length: int = dataclasses.field(metadata={'static': True})
  num_losses: int = dataclasses.field(metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
  """Trajectories as arrays.

  The fields from `expert_visits_BX` to `value_mask_BL` are None until
  `annotate` sets them.

  Attributes:
    tokens_BL: int32, token ids, right-padded; the padding's id has no meaning.
    lengths_B: int32, the number of tokens of each row without padding; 0 marks
      an empty row.
    turn_ids_BL: int32, the turn 1..T that a token belongs to; 0 at tokens that
      the policy did not write.
    loss_mask_BL: bool, tokens that the policy wrote and is trained on (called
      response_mask in verl). False everywhere in the row of a trajectory that
      failed.
    sampler_logprobs_BL: float32, log-probabilities that the sampler reported; 0
      at tokens that the policy did not write.
    rewards_BL: float32. The outcome's reward is at the last policy token, and a
      turn's own reward is at the turn's last token. If both are at one token,
      they are added. All other tokens have the reward 0.
    group_ids_B: int32, the same number for all rows of one question.
    sentence_ids_BL: int32, the sentence 1..L of the row that a token belongs
      to; 0 at tokens that the policy did not write. None if the algorithm uses
      no sentences.
    state_ids_BL: int32, the same number for all turns that began in the same
      state (same question, same latest observation); 0 at tokens that the
      policy did not write.
    loss_positions_BM: int32, the positions where the loss mask is true, in
      order, padded with a number that is at least L. None makes models return
      results at all positions.
    expert_ids: int [B, L, layers, E], the experts that the policy must visit in
      an update (routing replay). At a negative id the policy's router chooses.
      `rollout.pack` sets the sampler's experts, and `annotate` sets the old
      policy's experts. None lets the router choose everywhere.
    staleness_BL: int32, by how many training steps the policy that wrote the
      token's turn is behind the present policy; 0 at tokens that the policy did
      not write. None if one policy wrote all turns of the step, and after
      `annotate`, which reads this field last.
    expert_visits_BX: float32, how often a row's tokens visited each expert,
      summed over the layers, in the old policy's pass; None without experts.
    old_logprobs_BL: float32, the trainer's log-probabilities under the old
      policy (`updates.old_policy`), whose probability is the denominator of the
      ratio.
    ref_logprobs_BL: float32, log-probabilities under the frozen reference.
    values_BL: float32, the value of the state before the token, from the value
      model before the step's first update; None without a value model.
    advantages_BL, returns_BL: float32, from `rl.advantages`.
    turn_z_BL: float32, how the reward of the token's turn compares with the
      rewards of other turns, see `rl.turn_advantages.turn_z`; None if the
      bounds do not use it.
    value_mask_BL: bool, tokens that the value model is trained at.
    packing: where the trajectories stand in the packed rows of the forward
      pass; None if each trajectory has a row of its own.
  """

  tokens_BL: Array
  lengths_B: Array
  turn_ids_BL: Array
  loss_mask_BL: Array
  sampler_logprobs_BL: Array
  rewards_BL: Array
  group_ids_B: Array
  sentence_ids_BL: Array | None = None
  state_ids_BL: Array | None = None
  loss_positions_BM: Array | None = None
  expert_ids: Array | None = None
  staleness_BL: Any = None
  # The type of these fields is Any. All code that reads the fields runs after
  # `annotate`, so it need not check for None.
  expert_visits_BX: Any = None
  old_logprobs_BL: Any = None
  ref_logprobs_BL: Any = None
  values_BL: Any = None
  advantages_BL: Any = None
  returns_BL: Any = None
  turn_z_BL: Any = None
  value_mask_BL: Any = None
  packing: Packing | None = None

  def replace(self, **arrays: Any) -> 'TokenBatch':
    """Returns a copy with some arrays replaced."""
    return dataclasses.replace(self, **arrays)


class TokenDetails(NamedTuple):
  """Measurements of each token of some rows, after the updates of a step.

  Attributes:
    loss_mask_BL: bool, see `TokenBatch`. Where this mask is false, the other
      arrays have no meaning.
    old_logprobs_BL: float32, see `TokenBatch`.
    ratio_BL, turn_ratio_BL: float32, the ratio new policy / old policy of the
      token and of the token's turn.
    entropy_BL: float32, the entropy of the new policy in nats.
    advantages_BL: float32, see `TokenBatch`.
    values_BL: float32, see `TokenBatch`; None without a value model.
    cut_BL: bool, tokens whose gradient the objective cuts, such as by clipping.
    weights_BL: float32, the factor of the token's term in the policy loss, from
      the corrections and the normalisation. A term with the factor 0 has no
      gradient.
  """

  loss_mask_BL: Any
  old_logprobs_BL: Any
  ratio_BL: Any
  turn_ratio_BL: Any
  entropy_BL: Any
  advantages_BL: Any
  values_BL: Any
  cut_BL: Any
  weights_BL: Any


class PairBatch(NamedTuple):
  """Pairs of trajectories; both trajectories of a pair answer one question.

  Index 0 of the axis of length 2 is the better trajectory.

  Attributes:
    tokens_Q2L: int32, token ids; 0 after the last token at which the loss mask
      is true.
    loss_mask_Q2L: bool, tokens that the policy wrote and is trained on; false
      everywhere in padding pairs.
    loss_positions_Q2M: int32, the positions where the loss mask is true, see
      `pack.loss_positions`.
    lengths_Q2: int32, the number of tokens up to the last token at which the
      loss mask is true.
    packing: see `TokenBatch`; both trajectories of a pair stand in one packed
      row.
  """

  tokens_Q2L: np.ndarray
  loss_mask_Q2L: np.ndarray
  loss_positions_Q2M: np.ndarray
  lengths_Q2: np.ndarray
  packing: Packing | None = None
