"""Holds the options of the local engine."""

import dataclasses
from typing import NamedTuple

from stppo_jax.sampling import engine_rules
from stppo_jax.sampling import sampler


class ProgramOptions(NamedTuple):
  """Holds the options that compiled programs depend on.

  Attributes:
    page_size: tokens of a page of the cache.
    num_pages: pages of a lane.
    sampling: temperature and truncation.
    decode_chunk: the largest number of tokens of a row that one call decodes.
  """

  page_size: int
  num_pages: int
  sampling: sampler.Sampling
  decode_chunk: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
  """Says how the local engine divides its work.

  Only `sampling` and `max_length` change what is generated. All the others
  change how fast that is done. A config with sizes that do not fit each other
  or the devices is refused before (`engine_rules`).

  Attributes:
    slots: rows that are decoded together; a multiple of `lanes` and of the
      devices that cut them.
    max_length: tokens that a row can hold, its prompt included.
    sampling: temperature and truncation.
    page_size: tokens of a page of keys and values; 0: see
      `engine_rules.tokens_per_page`.
    pages: pages of all slots; 0: as many as full slots need. With fewer, rows
      wait for pages of others.
    prefill_chunk: tokens of a prompt or an observation that one call appends.
    decode_chunk: the largest number of tokens of a row that one call decodes.
    early_exit: a chunk ends once this share of its turns has ended; without
      effect if `deterministic`.
    lookahead: chunks that are started before the result of the last is read.
    deterministic: whether to run every program on all slots and to refill them
      in waves, so that the same bits come out whenever observations arrive.
    lanes: groups of slots with a thread each; more than one needs one device.
    batch_rows: most rows that a call decodes; 0 means all rows of a lane.
      Without effect if `deterministic`.
    return_expert_ids: whether `close` returns the experts that each token of
      the row visited.
    turn_swaps: never (weights change between collections only), keep (a turn
      begins with the newest weights), or recompute (the same, and the keys and
      values of earlier tokens are computed again with these weights).
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
    """The number of tokens of a page."""
    return engine_rules.tokens_per_page(self.page_size, self.max_length)

  @property
  def pages_per_row(self) -> int:
    """N, the most pages that a row needs."""
    return -(-self.max_length // self.tokens_per_page)

  @property
  def pages_per_lane(self) -> int:
    """The number of pages of each lane."""
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
    """Whether slots are filled together, and again when all are free."""
    return self.deterministic and self.turn_swaps == 'never'

  @property
  def most_rows(self) -> int:
    """The most slots in a call of `decode`; see `compacts`."""
    if self.compacts and self.batch_rows:
      return min(self.batch_rows, self.slots_per_lane)
    return self.slots_per_lane

  def largest_call(self, shards: int) -> int:
    """Returns the number of slots that the largest call of a program gets.

    Every device gets the same number, even if most of the active slots are on
    one of them.

    Args:
      shards: the number of devices that slots are divided over.
    """
    return shards * min(self.most_rows, self.slots_per_lane // shards)
