"""Calls the compiled programs on the slots of one lane.

S slots, A active slots, C tokens appended by a call. The caller gives what to
append, and where to decode, by slot. This module turns it into arrays of a few
fixed shapes, so that nothing is compiled once each shape has been used.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import slot_programs
from stppo_jax.sampling import slot_state as slot_state_lib

# The size of a batch of active slots is that of the largest batch, halved at
# most this many times. With more sizes, batches are fuller, but each size is
# compiled.
_MAX_HALVINGS = 3


@dataclasses.dataclass(frozen=True)
class Append:
  """A prompt or an observation, after which a turn begins in the slot.

  Attributes:
    token_ids: [L] int32.
    length: tokens that the slot holds before; 0 for a prompt, before which the
      slot is emptied.
    budget: tokens that the policy may generate after them.
  """

  token_ids: np.ndarray
  length: int
  budget: int


@dataclasses.dataclass(frozen=True)
class CopyPrompt:
  """A prompt that a slot gets from another slot, or gets back from itself.

  Attributes:
    source: the slot that holds the prompt; its row may have gone on since.
    length: tokens of the prompt.
    budget: tokens that the policy may generate after it.
  """

  source: int
  length: int
  budget: int


@dataclasses.dataclass(frozen=True)
class Decode:
  """A slot in which the policy generates.

  Attributes:
    key_data: uint32 [2], the data of the row's key.
    length: most tokens that the slot can hold when the chunk begins.
  """

  key_data: np.ndarray
  length: int


class SlotDriver:
  """Some slots, their state on the devices, and the calls that change it.

  Programs run on all slots, or on the active slots only
  (`EngineOptions.compacts`), then in batches of a few fixed sizes. If slots are
  sharded over devices, each device gathers the same number of its own slots, so
  that no cache moves between devices.

  Args:
    programs: the programs to call.
    options: the engine's options.

  Attributes:
    slots: S.
    compacts: whether programs run on the active slots only.
    batch_rows: most slots in a call of `decode`.
    returns_expert_ids: whether `expert_ids` can be called.
  """

  def __init__(
    self,
    programs: compiled_programs.CompiledPrograms,
    options: engine_options.EngineOptions,
  ):
    self._programs = programs
    self._prefill_chunk = options.prefill_chunk
    self.slots = options.slots_per_lane
    self.compacts = options.compacts
    self.batch_rows = options.most_rows
    self.returns_expert_ids = options.return_expert_ids
    self._state: slot_state_lib.SlotState | None = None

  def reset(self) -> None:
    """Drops the state, and frees its memory.

    A call that failed may have left it unusable.
    """
    self._state = None

  def start_wave(self, prompts: Mapping[int, Append], group_size: int) -> None:
    """Fills empty slots with groups, computing each prompt once.

    The prompts get a state of their own, with one slot for each group, which
    is then repeated.

    Args:
      prompts: the prompt of each group; group g gets the slots from
        g * group_size on.
      group_size: divides the slots.
    """
    groups = self.slots // group_size
    # Every device needs the same number of slots, so empty slots are added.
    shards = self._programs.shards
    num_slots = -(-groups // shards) * shards
    self._state = None  # frees the old cache before the new one is allocated
    state = self._programs.empty(num_slots)
    for appends, first in self._chunks(prompts):
      everywhere = _Active(None, list(appends), num_slots)
      state = self._extend(state, appends, first, everywhere)
    if group_size > 1:
      state = self._programs.repeat(state, groups, group_size)
    self._state = state

  def append(self, appends: Mapping[int, Append]) -> None:
    """Appends tokens to slots, in which turns begin."""
    state = self._state or self._programs.empty(self.slots)
    for chunk, first in self._chunks(appends):
      # A batch reads as many blocks as its longest slot has begun, so slots of
      # like lengths go together.
      by_length = sorted(chunk, key=lambda slot: chunk[slot].length)
      for batch in self._batches(by_length):
        batch_appends = {slot: chunk[slot] for slot in batch}
        # Set after every call, because the call donates the previous state.
        state = self._extend(state, batch_appends, first, self._active(batch))
        self._state = state

  def copy(self, copies: Mapping[int, CopyPrompt]) -> None:
    """Copies prompts to slots, in which turns begin.

    All prompts of a call are read before any slot is overwritten, so two slots
    can swap theirs, as long as they are in one batch.
    """
    for batch in self._batches(list(copies)):
      # A prompt may be on another device than its copy, so slots have their
      # numbers among all slots here, not among those of a device.
      A = self.slots
      if self.compacts and self._programs.shards == 1:
        A = _size(len(batch), self.batch_rows)
      active = np.full(A, self.slots, np.int32)
      active[: len(batch)] = batch
      arrays = np.zeros((3, A), np.int32)
      for place, copy in enumerate(copies[slot] for slot in batch):
        arrays[:, place] = copy.source, copy.length, copy.budget
      sources_A, lengths_A, budgets_A = arrays
      self._state = self._programs.copy(
        self._state,
        *self._programs.put(sources_A, active, lengths_A, budgets_A),
        num_blocks=self._num_blocks(copies[slot] for slot in batch),
      )

  def decode(
    self, decodes: Mapping[int, Decode], *, greedy: bool, enough: int
  ) -> tuple[list[int | None], slot_programs.Chunk]:
    """Starts decoding a chunk, without waiting for its result.

    Args:
      decodes: by slot; at most `batch_rows`.
      greedy: whether to take the most probable token instead of sampling.
      enough: the chunk ends once this many turns have ended in it.

    Returns:
      The slot of each entry of the chunk, None for padding; and the chunk.
    """
    slots = sorted(decodes)
    active, places, A = self._active(slots)
    placed: list[int | None] = [None] * A
    key_data_A2 = np.zeros((A, 2), np.uint32)
    for place, slot in zip(places, slots):
      placed[place] = slot
      key_data_A2[place] = decodes[slot].key_data
    slots_A, key_data_A2 = self._programs.put(active, key_data_A2)
    self._state, chunk = self._programs.decode(
      self._programs.params,
      self._state,
      key_data_A2,
      self._programs.table_ZV,
      slots_A=slots_A,
      greedy=greedy,
      enough=enough,
      num_blocks=self._num_blocks(decodes.values()),
    )
    return placed, chunk

  def expert_ids(self, slot: int, length: int) -> np.ndarray:
    """Returns the experts that each token of a slot visited.

    Waits for the chunks that are in flight.

    Returns:
      int16 [length, layers, E].
    """
    ids = jax.device_get(self._programs.expert_ids(self._state, slot))
    return ids[:length]

  def _chunks(
    self, appends: Mapping[int, Append]
  ) -> Iterator[tuple[Mapping[int, Append], int]]:
    """Yields the slots with tokens in a chunk of C, and the chunk's start."""
    longest = max(len(append.token_ids) for append in appends.values())
    for first in range(0, max(longest, 1), self._prefill_chunk):
      yield (
        {
          slot: append
          for slot, append in appends.items()
          # The first chunk begins the turn even if it has no token.
          if not first or first < len(append.token_ids)
        },
        first,
      )

  def _extend(
    self,
    state: slot_state_lib.SlotState,
    appends: Mapping[int, Append],
    first: int,
    active: '_Active',
  ) -> slot_state_lib.SlotState:
    """Appends up to C tokens to slots of a state, which is donated."""
    A, C = active.size, self._prefill_chunk
    batch = slot_programs.AppendBatch(
      tokens_AC=np.zeros((A, C), np.int32),
      counts_A=np.zeros(A, np.int32),
      starts_A=np.zeros(A, bool),
      prompts_A=np.zeros(A, bool),
      budgets_A=np.full(A, -1, np.int32),
    )
    for place, append in zip(active.places, appends.values()):
      token_ids = append.token_ids[first : first + C]
      last = first + C >= len(append.token_ids)
      batch.tokens_AC[place, : len(token_ids)] = token_ids
      batch.counts_A[place] = len(token_ids)
      batch.starts_A[place] = not append.length and not first
      batch.prompts_A[place] = not append.length and last
      batch.budgets_A[place] = append.budget if last else -1
    slots_A, batch = self._programs.put(active.slots, batch)
    return self._programs.extend(
      self._programs.params,
      state,
      batch,
      slots_A=slots_A,
      num_blocks=self._num_blocks(appends.values(), first),
    )

  def _num_blocks(
    self, slots: Iterable[Append | CopyPrompt | Decode], appended: int = 0
  ) -> int:
    """Returns how many blocks hold all tokens that the slots have so far."""
    longest = max(slot.length + appended for slot in slots)
    return -(-longest // self._programs.block_size)

  def _batches(self, slots: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(slots), self.batch_rows):
      yield slots[first : first + self.batch_rows]

  def _active(self, slots: Sequence[int]) -> '_Active':
    """Returns the active slots as a program gets them."""
    shards = self._programs.shards
    part = self.slots // shards  # slots of a device
    largest = int(np.bincount([slot // part for slot in slots]).max())
    size = _size(largest, min(self.batch_rows, part))
    if not self.compacts or size == part:
      return _Active(None, slots, self.slots)
    active = np.full((shards, size), self.slots, np.int32)
    counts, places = [0] * shards, []
    for slot in slots:
      shard = slot // part
      active[shard, counts[shard]] = slot % part
      places.append(shard * size + counts[shard])
      counts[shard] += 1
    return _Active(active if shards > 1 else active[0], places, shards * size)


class _Active(NamedTuple):
  """The active slots of a call.

  Attributes:
    slots: `slots_A` of the programs, see `slot_programs`; None for all slots.
    places: the place of each active slot in the program's arrays.
    size: A, the length of these arrays.
  """

  slots: np.ndarray | None
  places: Sequence[int]
  size: int


def _size(count: int, largest: int) -> int:
  """Returns the smallest size of a batch that holds so many slots."""
  size = largest
  for _ in range(_MAX_HALVINGS):
    if size % 2 or count > size // 2:
      break
    size //= 2
  return size
