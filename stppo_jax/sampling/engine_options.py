"""Holds the options of the local engine."""

import dataclasses
from typing import NamedTuple

from stppo_jax.sampling import engine_rules
from stppo_jax.sampling import sampler


class ProgramOptions(NamedTuple):
  """Holds the options that compiled programs depend on.

  Attributes:
    page_size: the number of tokens in a page of the KV cache.
    num_pages: the number of pages of a lane.
    sampling: temperature and truncation.
    decode_chunk: the most tokens of a row that one call decodes.
  """

  page_size: int
  num_pages: int
  sampling: sampler.Sampling
  decode_chunk: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
  """Holds all options of the local engine.

  `sampling`, `max_length` and `turn_swaps` decide which tokens the engine
  generates. The other options change only the speed, and the rounding of
  log-probabilities. `engine_rules` checks beforehand that the numbers of slots,
  lanes and pages fit each other and the devices.

  Attributes:
    slots: the number of rows that are decoded together; a multiple of `lanes`
      and of the number of devices that the slots are divided over.
    max_length: the most tokens of a row, including its prompt.
    sampling: temperature and truncation.
    page_size: the number of tokens in a page of the KV cache. If 0,
      `engine_rules.tokens_per_page` chooses it.
    pages: the number of cache pages of all slots. If 0, all slots have enough
      pages for rows of `max_length`. With fewer pages, a row may have to wait
      until other rows free theirs.
    prefill_chunk: the most tokens of a prompt or an observation that one call
      appends to a row.
    decode_chunk: the most tokens of a row that one call decodes.
    early_exit: a chunk ends once this share of its turns has ended. It has no
      effect if `deterministic`, or on a GPU.
    lookahead: the number of further chunks that are started before the result
      of the oldest chunk is read.
    deterministic: whether every program runs on all slots, so that the bits of
      a row do not depend on when observations arrive. With `turn_swaps` never,
      new rows are then admitted only when all slots are free.
    lanes: the number of lanes that the slots are divided among. If there are
      several lanes, each has a thread of its own, and the engine must have only
      one device.
    batch_rows: the most rows that one call decodes; 0 means all rows of a lane.
      It has no effect if `deterministic`.
    return_expert_ids: whether `Engine.close`, which ends a row, returns the
      experts to which each token of that row was routed.
    turn_swaps: says when a row may change to newer weights: never (only between
      collections), keep (at each turn, which begins with the newest weights),
      or recompute (as keep, but the keys and values of earlier tokens are
      computed again with the newest weights).
  """

  slots: int
  max_length: int
  sampling: sampler.Sampling
  page_size: int
  pages: int
  prefill_chunk: int
  decode_chunk: int
  early_exit: float
  lookahead: int
  deterministic: bool
  lanes: int
  batch_rows: int
  return_expert_ids: bool = False
  turn_swaps: str = 'never'

  @property
  def slots_per_lane(self) -> int:
    """The number of slots in each lane."""
    return self.slots // self.lanes

  @property
  def tokens_per_page(self) -> int:
    """The number of tokens in a page of the KV cache."""
    return engine_rules.tokens_per_page(self.page_size, self.max_length)

  @property
  def pages_per_row(self) -> int:
    """N, the most cache pages that a row needs."""
    return -(-self.max_length // self.tokens_per_page)

  @property
  def pages_per_lane(self) -> int:
    """The number of cache pages of each lane."""
    full = self.slots_per_lane * self.pages_per_row
    return self.pages // self.lanes or full

  @property
  def programs(self) -> ProgramOptions:
    """The options that compiled programs depend on."""
    return ProgramOptions(
      self.tokens_per_page,
      self.pages_per_lane,
      self.sampling,
      self.decode_chunk,
    )

  @property
  def compacts(self) -> bool:
    """Whether programs run on the active slots only."""
    return not self.deterministic

  @property
  def waves(self) -> bool:
    """Whether new rows are admitted only when all slots are free."""
    return self.deterministic and self.turn_swaps == 'never'

  @property
  def most_rows(self) -> int:
    """The most active slots of a lane in one call of a program."""
    if self.compacts and self.batch_rows:
      return min(self.batch_rows, self.slots_per_lane)
    return self.slots_per_lane

  def largest_call(self, shards: int) -> int:
    """Returns the most slots, counted over all devices, in one program call.

    A call has the same number of slots on every device, even if most of the
    active slots are on one device.

    Args:
      shards: the number of devices that the slots are divided over.
    """
    return shards * min(self.most_rows, self.slots_per_lane // shards)
