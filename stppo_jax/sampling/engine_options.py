"""The options of the local engine."""

import dataclasses
from typing import NamedTuple

from stppo_jax.sampling import lane_rules
from stppo_jax.sampling import sampler


class ProgramOptions(NamedTuple):
  """The options that compiled programs depend on.

  Attributes:
    blocks: the number of tokens in each block of a slot's cache.
    sampling: temperature and truncation.
    decode_chunk: most tokens of a row that one call decodes.
  """

  blocks: tuple[int, ...]
  sampling: sampler.Sampling
  decode_chunk: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
  """How the local engine divides its work.

  Only `sampling` and `max_length` change what is generated. All the others
  change how fast that is done.

  Attributes:
    slots: rows that are decoded together; a multiple of `lanes` and of the
      devices that cut them.
    max_length: tokens that a row can hold, its prompt included.
    sampling: temperature and truncation.
    cache_blocks: blocks that a slot's KV cache is cut into. A token attends to
      the blocks that the longest row in its call has begun, so more blocks
      waste less attention, but compile more programs.
    prefill_chunk: tokens of a prompt or an observation that one call appends.
    decode_chunk: most tokens of a row that one call decodes.
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
  """

  slots: int
  max_length: int
  sampling: sampler.Sampling
  cache_blocks: int
  prefill_chunk: int
  decode_chunk: int
  early_exit: float
  lookahead: int
  deterministic: bool
  lanes: int
  batch_rows: int
  return_expert_ids: bool = False

  def __post_init__(self):
    self.check_group_size(1)

  @property
  def slots_per_lane(self) -> int:
    """The number of slots in each lane."""
    return self.slots // self.lanes

  @property
  def block_size(self) -> int:
    """The number of tokens in a block of a slot's cache."""
    return -(-self.max_length // self.cache_blocks)

  @property
  def blocks(self) -> tuple[int, ...]:
    """The number of tokens in each block of a slot's cache."""
    return (self.block_size,) * self.cache_blocks

  @property
  def programs(self) -> ProgramOptions:
    """The options that compiled programs depend on."""
    return ProgramOptions(self.blocks, self.sampling, self.decode_chunk)

  @property
  def compacts(self) -> bool:
    """Whether programs run on the active slots only."""
    return not self.deterministic

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

  def most_copied(self, shards: int) -> int:
    """Returns the most slots whose keys and values a device copies to decode.

    A call on only the active slots reads them from a copy. The number is 0 if
    every call is on all slots.

    Args:
      shards: the number of devices that slots are divided over.
    """
    part = self.slots_per_lane // shards
    if not self.compacts:
      return 0
    if self.most_rows < part:
      return self.most_rows
    return 0 if part % 2 else part // 2

  def check_devices(self, num_devices: int) -> None:
    """Raises ValueError if lanes cannot run on this number of devices."""
    if problem := lane_rules.devices_problem(self.lanes, num_devices):
      raise ValueError(f'lanes={self.lanes}: {problem}')

  def check_group_size(self, group_size: int) -> None:
    """Raises ValueError if whole groups do not fill the slots of a lane."""
    problem = lane_rules.slots_problem(
      self.slots, lanes=self.lanes, group_size=group_size
    )
    if problem:
      raise ValueError(f'slots={self.slots}: {problem}')
