"""The options of the local engine."""

import dataclasses

from stppo_jax.sampling import sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
  """How the local engine cuts its work.

  Only `sampling` and `max_length` change what is generated; all the others
  change how fast.

  Attributes:
    slots: rows that are decoded together; a multiple of `lanes` and of the
      devices that cut them.
    max_length: tokens that a row can hold, its prompt included.
    sampling: temperature and truncation.
    cache_blocks: blocks that a slot's KV cache is cut into. A token attends to
      as many of them as the longest row in its call has begun; more blocks
      waste less attention and compile more programs.
    extend_chunk: tokens of a prompt or an observation that one call appends.
    decode_chunk: most tokens of a row that one call decodes.
    early_exit: share of the turns in a chunk after whose end the chunk ends;
      without effect if `deterministic`.
    lookahead: chunks that are started before the result of the last is read.
    deterministic: run every program on all slots and refill them in waves, so
      that the same bits come out whenever observations arrive.
    lanes: groups of slots with a thread each; more than one needs one device.
    batch_rows: most rows that a call decodes; 0 means all rows of a lane, and
      it is without effect if `deterministic`.
    return_expert_ids: whether `close` returns the experts that each token of
      the row visited.
  """

  slots: int
  max_length: int
  sampling: sampler.Sampling
  cache_blocks: int
  extend_chunk: int
  decode_chunk: int
  early_exit: float
  lookahead: int
  deterministic: bool
  lanes: int
  batch_rows: int
  return_expert_ids: bool = False

  def __post_init__(self):
    if self.slots % self.lanes:
      raise ValueError(
        f'slots={self.slots}: must be a multiple of lanes={self.lanes}'
      )

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

    Every device gets as many, even if most of the active slots are on one.

    Args:
      shards: the number of devices that slots are divided over.
    """
    return shards * min(self.most_rows, self.slots_per_lane // shards)

  def most_copied(self, shards: int) -> int:
    """Returns the most slots whose keys and values a device copies to decode.

    A call on the active slots only reads them from a copy. 0 if every call is
    on all slots.

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
    """Raises ValueError if lanes cannot run on so many devices.

    The threads of two lanes would issue their programs in either order, so
    that collectives of one device could wait for those of another crosswise.
    """
    if self.lanes > 1 and num_devices > 1:
      raise ValueError(
        f'lanes={self.lanes}: must be 1 on {num_devices} devices'
      )

  def check_group_size(self, group_size: int) -> None:
    """Raises ValueError if whole groups do not fill the slots of a lane."""
    if self.slots_per_lane % group_size:
      lanes = f' in {self.lanes} lanes' if self.lanes > 1 else ''
      raise ValueError(
        f'slots={self.slots}{lanes}: the slots of a lane must be a multiple of '
        f'group_size={group_size}'
      )
