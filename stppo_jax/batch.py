"""TokenBatch: the device arrays of one collection, token-aligned.

B trajectories, L tokens, M of which carry loss at most. Index l of every [B, L]
array speaks about token l. Of a mixture of experts: N layers, X experts, E that
a token visits.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
  """Trajectories as arrays; the last block is filled by `annotate`.

  Attributes:
    tokens_BL: int32 ids, right-padded (the padding's id has no meaning).
    lengths_B: int32, tokens before padding; 0 marks an empty row.
    turn_ids_BL: int32, 0 = not written by the policy, 1..T = its turn.
    loss_mask_BL: bool, written by the policy and to be trained on
      (called response_mask in verl). False everywhere in a failed row.
    sampler_logprobs_BL: float32, the sampler's report; 0 off the policy tokens.
    rewards_BL: float32, the outcome on the last policy token, a turn's own
      reward on the turn's last token, else 0.
    group_ids_B: int32, rows of one question share an id.
    sentence_ids_BL: int32, 0 = not written by the policy, 1..L = its sentence,
      counted through the row. None where no row of the table asks for it.
    state_ids_BL: int32, 0 = not written by the policy; turns that began in the
      same state (same question, same latest observation) share an id.
    loss_positions_BM: int32, the l of the loss mask in order, then L. None: to
      be scored everywhere.
    expert_ids: int, the experts that the policy must visit in an update
      (routing replay), below 0 where its router chooses. Those of the sampler
      come with the batch, those of the old policy from `annotate`. None: its
      router chooses everywhere.
    expert_visits_BX: float32, how often a row's tokens visited each expert in
      all layers of the old policy; None without experts.
    old_logprobs_BL: float32, the trainer's log-probabilities under the policy
      that sampled, before the first update: the ratio's denominator.
    ref_logprobs_BL: float32, under the frozen reference.
    values_BL: float32, V before this token, of the value model before the
      first update.
    advantages_BL, returns_BL: float32.
    value_mask_BL: bool, the steps at which the value model is trained.
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
  # None until `annotate` sets them. The type is Any because everything that
  # reads them runs after it.
  expert_visits_BX: Any = None
  old_logprobs_BL: Any = None
  ref_logprobs_BL: Any = None
  values_BL: Any = None
  advantages_BL: Any = None
  returns_BL: Any = None
  value_mask_BL: Any = None

  def replace(self, **arrays: Array) -> 'TokenBatch':
    """A copy with some arrays exchanged."""
    return dataclasses.replace(self, **arrays)


class PairBatch(NamedTuple):
  """Two trajectories of one question each, the better one first.

  Attributes:
    tokens_Q2L: int32, 0 behind the last token of the loss mask.
    loss_mask_Q2L: bool, tokens of the policy to be trained on; all false in
      the pairs that only fill up a batch.
    loss_positions_Q2M: int32, where the mask is true; see
      `pack.loss_positions`.
    lengths_Q2: int32, tokens up to the last of the loss mask.
  """

  tokens_Q2L: np.ndarray
  loss_mask_Q2L: np.ndarray
  loss_positions_Q2M: np.ndarray
  lengths_Q2: np.ndarray
