"""Slots on the devices: their state, and the programs that are called on it.

S slots, A of them at work, C tokens appended and N written by a call. What is
told and who writes is given by slot; here it becomes arrays of one of a few
shapes, so that no program is compiled anew once each shape has come up.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import slot_programs
from stppo_jax.sampling import slot_state as slot_state_lib

_HALVINGS = 4  # of the largest batch: sizes of the batches at work


@dataclasses.dataclass(frozen=True)
class Append:
  """What a slot is told before the policy's turn begins in it.

  Attributes:
    token_ids: [N] int32.
    length: tokens that the slot holds before; 0: they are a prompt, and what
      the slot held is forgotten.
    budget: tokens the policy may write after them.
  """

  token_ids: np.ndarray
  length: int
  budget: int


@dataclasses.dataclass(frozen=True)
class CopyPrompt:
  """A prompt that a slot gets from another one, or gets back from itself.

  Attributes:
    source: the slot that holds it; it may have gone on since.
    length: tokens of the prompt.
    budget: tokens the policy may write after it.
  """

  source: int
  length: int
  budget: int


@dataclasses.dataclass(frozen=True)
class Decode:
  """A slot in which the policy goes on writing.

  Attributes:
    key_data: uint32 [2].
    length: tokens that the slot holds, at most.
  """

  key_data: np.ndarray
  length: int


class SlotDriver:
  """Some slots, their state on the device, and programs that work on them.

  Args:
    programs: what it calls.
    slots: rows that stand side by side; divisible by the programs' shards.
    extend_chunk: C.
    batch_rows: most rows that a program works on where it works on some only.
    compacts: run programs on the slots at work only, in batches of a few
      fixed sizes; not possible where slots are cut over devices.

  Attributes:
    slots: how many.
    compacts: whether it does.
    batch_rows: most rows of a call of `write`.
    return_expert_ids: whether `expert_ids` has any to tell.
  """

  def __init__(
    self,
    programs: compiled_programs.CompiledPrograms,
    *,
    slots: int,
    extend_chunk: int,
    batch_rows: int,
    compacts: bool,
  ):
    self._programs = programs
    self.slots = slots
    self._extend_chunk = extend_chunk
    # Taking single rows out of cut ones would move caches between devices.
    self.compacts = compacts and programs.shards == 1
    self.batch_rows = min(batch_rows, slots) if self.compacts else slots
    self.return_expert_ids = programs.expert_ids is not None
    self._state = None

  def forget(self) -> None:
    """Drops what slots hold: a call that failed may have left it unusable."""
    self._state = None

  def open(self, prompts: Mapping[int, Append], group_size: int) -> None:
    """Fills empty slots: prompts in a state of their own, then copies.

    Args:
      prompts: group -> its prompt, for the slots from group * group_size on.
      group_size: divides the slots.
    """
    groups = self.slots // group_size
    # Places may be more than groups: those that pad them stay empty.
    shards = self._programs.shards
    places = -(-groups // shards) * shards
    self._state = None  # its memory is needed
    state = self._programs.empty(places)
    for told, first in self._chunks(prompts):
      state = self._extended(state, told, first, None, places)
    if group_size > 1:
      state = self._programs.repeat(state, groups, group_size)
    self._state = state

  def append(self, told: Mapping[int, Append]) -> None:
    """Tells slots what they are told; the policy's turn begins in them."""
    if self._state is None:
      self._state = self._programs.empty(self.slots)
    for now, first in self._chunks(told):
      # Those that hold about as much together: fewer blocks are read.
      slots = sorted(now, key=lambda slot: now[slot].length)
      for some in self._batches(slots):
        part = {slot: now[slot] for slot in some}
        rows, A = self._at_work(some)
        self._state = self._extended(self._state, part, first, rows, A)

  def copy(self, copies: Mapping[int, CopyPrompt]) -> None:
    """Slot -> the prompt it gets; the policy's turn begins in them.

    Those of a batch are read before any of them is written.
    """
    for some in self._batches(list(copies)):
      rows, A = self._at_work(some)
      if rows is None:  # a copy names its rows in any case
        rows = np.full(A, self.slots, np.int32)
        rows[: len(some)] = some
      arrays = np.zeros((3, A), np.int32)
      for place, copy in enumerate(copies[slot] for slot in some):
        arrays[:, place] = copy.source, copy.length, copy.budget
      sources, lengths, budgets = arrays
      self._state = self._programs.copy(
        self._state,
        *self._programs.send(sources, rows, lengths, budgets),
        num_blocks=self._num_blocks(copies[slot] for slot in some),
      )

  def write(
    self, writes: Mapping[int, Decode], greedy: bool, enough: int
  ) -> tuple[list[int | None], slot_programs.Chunk]:
    """Lets the policy write in slots; does not wait for it.

    Args:
      writes: by slot; at most `batch_rows`.
      greedy: take the likeliest token instead of drawing.
      enough: turns after whose end the chunk ends.

    Returns:
      The slot of each of the chunk's rows (None: of none), and the chunk.
    """
    slots = sorted(writes)
    rows, A = self._at_work(slots)
    placed: list[int | None] = [None] * A
    key_data_A2 = np.zeros((A, 2), np.uint32)
    for n, slot in enumerate(slots):
      place = slot if rows is None else n
      placed[place] = slot
      key_data_A2[place] = writes[slot].key_data
    self._state, chunk = self._programs.decode(
      self._programs.params,
      self._state,
      *self._programs.send(rows, key_data_A2),
      self._programs.table_SV,
      greedy,
      enough,
      num_blocks=self._num_blocks(writes.values()),
    )
    return placed, chunk

  def expert_ids(self, slot: int, length: int) -> np.ndarray:
    """int16 [length, layers, experts of a token]: where a slot's tokens went.

    Where `return_expert_ids` only. Waits for the chunks that are being written.
    """
    expert_ids = jax.device_get(self._programs.expert_ids(self._state, slot))
    return expert_ids[:length]

  def _chunks(
    self, told: Mapping[int, Append]
  ) -> Iterator[tuple[Mapping[int, Append], int]]:
    """Who is told something from token `first` on, C tokens at a time."""
    longest = max(len(append.token_ids) for append in told.values())
    for first in range(0, max(longest, 1), self._extend_chunk):
      now = {
        slot: append
        for slot, append in told.items()
        if not first or first < len(append.token_ids)
      }
      yield now, first

  def _extended(
    self,
    state: slot_state_lib.SlotState,
    told: Mapping[int, Append],
    first: int,
    rows: np.ndarray | None,
    A: int,
  ) -> slot_state_lib.SlotState:
    """The state (donated) with up to C tokens of what slots are told."""
    C = self._extend_chunk
    places = told if rows is None else range(len(told))
    appended = slot_programs.AppendBatch(
      tokens_AC=np.zeros((A, C), np.int32),
      counts_A=np.zeros(A, np.int32),
      starts_A=np.zeros(A, bool),
      prompts_A=np.zeros(A, bool),
      budgets_A=np.full(A, -1, np.int32),
    )
    for place, append in zip(places, told.values()):
      part = append.token_ids[first : first + C]
      last = first + C >= len(append.token_ids)
      appended.tokens_AC[place, : len(part)] = part
      appended.counts_A[place] = len(part)
      appended.starts_A[place] = not append.length and not first
      appended.prompts_A[place] = not append.length and last
      appended.budgets_A[place] = append.budget if last else -1
    return self._programs.extend(
      self._programs.params,
      state,
      *self._programs.send(rows, appended),
      num_blocks=self._num_blocks(told.values(), first),
    )

  def _num_blocks(
    self, slots: Iterable[Append | CopyPrompt | Decode], further: int = 0
  ) -> int:
    """Blocks that hold what slots have read, and so many tokens more."""
    longest = max(slot.length + further for slot in slots)
    return -(-longest // self._programs.block)

  def _batches(self, slots: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(slots), self.batch_rows):
      yield slots[first : first + self.batch_rows]

  def _at_work(self, slots: Sequence[int]) -> tuple[np.ndarray | None, int]:
    """The rows a program runs on (None: all slots) and how many places."""
    if not self.compacts:
      return None, self.slots
    size = self.batch_rows
    for _ in range(_HALVINGS):
      if size % 2 or len(slots) > size // 2:
        break
      size //= 2
    if size == self.slots:
      return None, size
    rows = np.full(size, self.slots, np.int32)
    rows[: len(slots)] = slots
    return rows, size
