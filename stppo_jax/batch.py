"""The arrays of one collection, token-aligned.

B trajectories, L tokens, M loss positions of a row, X experts, E experts that a
token visits, Q pairs. Index l of every [B, L] array speaks about token l.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
  """The places of sequences in rows of a forward pass, which hold several.

  n microbatches, s shards of their rows, one for each device along the axes of
  rows, b sequences of a shard in a microbatch. Within one microbatch the arrays
  have no axis n.

  Attributes:
    rows: int32 [n, s, b], numbers of sequences among those of their shard, in
      the order of their starts; a number that is too large stands for none.
    starts: int32 [n, s, b], the place of the first token of each, counted
      through all rows of the shard; behind them where there is no sequence.
    num_rows: rows of a shard in a microbatch.
    row_length: tokens of a row.
    num_losses: the most loss positions of a row.
  """

  rows: Any
  starts: Any
  num_rows: int = dataclasses.field(metadata={'static': True})
  row_length: int = dataclasses.field(metadata={'static': True})
  num_losses: int = dataclasses.field(metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
  """Trajectories as arrays; `annotate` fills the fields from `old_logprobs_BL`.

  Attributes:
    tokens_BL: int32, token ids, right-padded; the padding's id has no meaning.
    lengths_B: int32, tokens of each row without padding; 0 marks an empty row.
    turn_ids_BL: int32, the turn 1..T that a token of the policy belongs to; 0:
      the policy did not write the token.
    loss_mask_BL: bool, tokens that the policy wrote and is trained on (called
      response_mask in verl). False everywhere in a failed row.
    sampler_logprobs_BL: float32, log-probabilities that the sampler reported; 0
      at tokens that the policy did not write.
    rewards_BL: float32, the outcome's reward at the last policy token, a turn's
      own reward at the turn's last token, else 0.
    group_ids_B: int32, the same number for all rows of one question.
    sentence_ids_BL: int32, the sentence 1..L of the row that a token of the
      policy belongs to; 0: the policy did not write it. None unless an
      algorithm uses sentences.
    state_ids_BL: int32, the same number for turns that began in the same state
      (same question, same latest observation); 0: the policy did not write the
      token.
    loss_positions_BM: int32, the positions of the loss mask in order, filled up
      with a number of at least L. None: results are wanted at all positions.
    expert_ids: int [B, L, layers, E], the experts that the policy must visit in
      an update (routing replay); negative where its router chooses. Those
      of the sampler come with the packed batch, those of the old policy from
      `annotate`. None: the router chooses everywhere.
    staleness_BL: int32, the training steps since the policy that wrote the
      token's turn; 0 at tokens that the policy did not write. None if all turns
      of a step are of one policy. `annotate` drops it.
    expert_visits_BX: float32, how often a row's tokens visited each expert, in
      all layers of the old policy; None without experts.
    old_logprobs_BL: float32, log-probabilities by the trainer before the first
      update, under the policy that sampled the turn: the ratio's denominator.
    ref_logprobs_BL: float32, log-probabilities under the frozen reference.
    values_BL: float32, V before this token, by the value model before the first
      update.
    advantages_BL, returns_BL: float32, from `rl.advantages`.
    turn_z_BL: float32, how the reward of the token's turn compares with others,
      see `rl.turn_advantages.turn_z`; None unless bounds use it.
    value_mask_BL: bool, tokens that the value model is trained at.
    packing: where the trajectories of a microbatch are in the rows that models
      see; None: each has a row.
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
  # None until `annotate` sets them. The type is Any because everything that
  # reads them runs after it.
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
  """The numbers of the tokens of some rows after the updates of a step.

  Attributes:
    loss_mask_BL: bool, see `TokenBatch`; the rest has no meaning off the mask.
    old_logprobs_BL: float32, see `TokenBatch`.
    ratio_BL, turn_ratio_BL: float32, new policy / old policy, of the token and
      of its turn.
    entropy_BL: float32, the entropy of the new policy in nats.
    advantages_BL: float32, see `TokenBatch`.
    values_BL: float32, see `TokenBatch`; None without a value model.
    cut_BL: bool, tokens whose gradient the objective cuts.
    weights_BL: float32, the corrections' multiplier; 0 silences a token.
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
  """Pairs of trajectories of one question each; index 0 is the better one.

  Attributes:
    tokens_Q2L: int32, token ids; 0 behind the last token of the loss mask.
    loss_mask_Q2L: bool, tokens that the policy wrote and is trained on; all
      false in pairs that only fill up a batch.
    loss_positions_Q2M: int32, positions of the loss mask, see
      `pack.loss_positions`.
    lengths_Q2: int32, tokens up to the last of the loss mask.
    packing: see `TokenBatch`; a pair stands in one row.
  """

  tokens_Q2L: np.ndarray
  loss_mask_Q2L: np.ndarray
  loss_positions_Q2M: np.ndarray
  lengths_Q2: np.ndarray
  packing: Packing | None = None
