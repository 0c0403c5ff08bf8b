"""Slots on the devices: compiled programs, weights, and the state they pass on.

S slots, A of them at work, C tokens appended and N written by a call. What is
told and who writes is given by slot; here it becomes arrays of one of a few
shapes, so that no program is compiled anew once each shape has come up.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.sampling import decoding
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slots as slots_lib
from stppo_jax.sampling import stops

_HALVINGS = 4  # of the number of slots: sizes of the batches at work


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
class Copy:
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
class Write:
  """A slot in which the policy goes on writing.

  Attributes:
    key_data: uint32 [2].
    length: tokens that the slot holds, at most.
  """

  key_data: np.ndarray
  length: int


class Decoder:
  """The device side of an engine.

  Args:
    model: the policy; its own mesh is not used.
    mesh: local devices; slots are cut over its batch axes.
    automaton: where turns end, over the ids of the tokenizer.
    slots: rows decoded together; divisible by the mesh's batch axes.
    max_length: tokens a slot can hold.
    cache_blocks: parts of a slot's cache; programs read as many of them as the
      slots at work have begun.
    sampling: temperature and truncation.
    extend_chunk: C.
    decode_chunk: N.
    compacts: run programs on the slots at work where these are few; not
      possible where slots are cut over devices.
    replays: `expert_ids` is asked for.

  Attributes:
    compacts: whether it does.
  """

  def __init__(
    self,
    model: functional.Model,
    *,
    mesh: jax.sharding.Mesh,
    automaton: stops.StopAutomaton,
    slots: int,
    max_length: int,
    cache_blocks: int,
    sampling: sampler.Sampling,
    extend_chunk: int,
    decode_chunk: int,
    compacts: bool,
    replays: bool = False,
  ):
    model = dataclasses.replace(model, mesh=mesh)
    self._slots = slots
    self._extend_chunk = extend_chunk
    self._block = -(-max_length // cache_blocks)
    blocks = (self._block,) * cache_blocks
    self._shards = math.prod(mesh.shape[axis] for axis in mesh_lib.BATCH_AXES)
    # Taking single rows out of cut ones would move caches between devices.
    self.compacts = compacts and self._shards == 1
    self._by_row = sharding.batch_sharding(mesh)
    whole = sharding.replicated(mesh)
    self._table_SV = jax.device_put(
      automaton.table(model.config.vocab_size), whole
    )
    # The same layout in and out, or the next call would be another program.
    by_row = {'out_shardings': self._by_row}
    # As they are computed with: every token reads them all.
    self._copy_params = jax.jit(
      lambda params: jax.tree.map(
        jnp.copy,
        model.by_layer(precision.computed(params, model.config.dtype)),
      ),
      out_shardings=whole,
    )
    self._empty = jax.jit(
      lambda num_slots: slots_lib.empty(model, num_slots, blocks),
      static_argnums=0,
      **by_row,
    )
    # A program for each number of blocks, but where branches are cheap.
    cpu = mesh.devices.flat[0].platform == 'cpu'
    by_blocks = by_row | {'static_argnames': () if cpu else 'num_blocks'}
    self._extend = jax.jit(
      functools.partial(decoding.extend, model=model),
      donate_argnums=1,
      **by_blocks,
    )
    self._copy = jax.jit(slots_lib.copy, donate_argnums=0, **by_blocks)
    self._repeat = jax.jit(slots_lib.repeat, static_argnums=(1, 2), **by_row)
    self._decode = jax.jit(
      functools.partial(
        decoding.decode,
        model=model,
        stopped=automaton.stopped,
        sampling=sampling,
        num_tokens=decode_chunk,
      ),
      donate_argnums=1,
      **by_blocks,
    )
    self._expert_ids = None
    if replays:
      self._expert_ids = jax.jit(slots_lib.expert_ids, out_shardings=whole)
    self._params = None
    self._state = None

  def publish(self, params: functional.Params) -> None:
    """Takes a copy of the weights, in whatever layout they come."""
    self._params = self._copy_params(params)

  def open(self, prompts: Mapping[int, Append], group_size: int) -> None:
    """Fills empty slots: prompts in a state of their own, then copies.

    Args:
      prompts: group -> its prompt, for the slots from group * group_size on.
      group_size: divides the slots.
    """
    groups = self._slots // group_size
    # Places may be more than groups: those that pad them stay empty.
    places = -(-groups // self._shards) * self._shards
    self._state = None  # its memory is needed
    state = self._append_to(self._empty(places), prompts, places)
    if group_size > 1:
      state = self._repeat(state, groups, group_size)
    self._state = state

  def append(self, told: Mapping[int, Append]) -> None:
    """Tells slots what they are told; the policy's turn begins in them."""
    self._state = self._append_to(self._state, told, self._slots)

  def copy(self, copies: Mapping[int, Copy]) -> None:
    """Slot -> the prompt it gets; the policy's turn begins in them."""
    rows, A = self._at_work(list(copies), self._slots)
    if rows is None:  # a copy names its rows in any case
      rows = np.full(A, self._slots, np.int32)
      rows[: len(copies)] = list(copies)
    arrays = np.zeros((3, A), np.int32)
    for place, copy in enumerate(copies.values()):
      arrays[:, place] = copy.source, copy.length, copy.budget
    sources, lengths, budgets = arrays
    self._state = self._copy(
      self._state,
      *self._send(sources, rows, lengths, budgets),
      num_blocks=self._num_blocks(copies.values()),
    )

  def write(
    self, writes: Mapping[int, Write], greedy: bool, enough: int
  ) -> tuple[list[int | None], decoding.Chunk]:
    """Lets the policy write in slots; does not wait for it.

    Args:
      writes: by slot.
      greedy: take the likeliest token instead of drawing.
      enough: turns after whose end the chunk ends.

    Returns:
      The slot of each of the chunk's rows (None: of none), and the chunk.
    """
    slots = sorted(writes)
    rows, A = self._at_work(slots, self._slots)
    placed: list[int | None] = [None] * A
    key_data_A2 = np.zeros((A, 2), np.uint32)
    for n, slot in enumerate(slots):
      place = slot if rows is None else n
      placed[place] = slot
      key_data_A2[place] = writes[slot].key_data
    self._state, chunk = self._decode(
      self._params,
      self._state,
      *self._send(rows, key_data_A2),
      self._table_SV,
      greedy,
      enough,
      num_blocks=self._num_blocks(writes.values()),
    )
    return placed, chunk

  def expert_ids(self, slot: int, length: int) -> np.ndarray | None:
    """int16 [length, layers, experts of a token]: where a slot's tokens went.

    None unless that is replayed. Waits for the chunks that are being written.
    """
    if self._expert_ids is None:
      return None
    ids_LNE = jax.device_get(self._expert_ids(self._state, slot))
    return ids_LNE[:length]

  def _append_to(
    self,
    state: slots_lib.SlotState,
    told: Mapping[int, Append],
    num_slots: int,
  ) -> slots_lib.SlotState:
    """The state (donated) with what slots are told, C tokens at a time."""
    C = self._extend_chunk
    longest = max(len(append.token_ids) for append in told.values())
    for first in range(0, max(longest, 1), C):
      now = {
        slot: append
        for slot, append in told.items()
        if not first or first < len(append.token_ids)
      }
      rows, A = self._at_work(list(now), num_slots)
      places = list(now) if rows is None else range(len(now))
      appended = decoding.Appended(
        tokens_AC=np.zeros((A, C), np.int32),
        counts_A=np.zeros(A, np.int32),
        starts_A=np.zeros(A, bool),
        prompts_A=np.zeros(A, bool),
        budgets_A=np.full(A, -1, np.int32),
      )
      for place, append in zip(places, now.values()):
        part = append.token_ids[first : first + C]
        last = first + C >= len(append.token_ids)
        appended.tokens_AC[place, : len(part)] = part
        appended.counts_A[place] = len(part)
        appended.starts_A[place] = not append.length and not first
        appended.prompts_A[place] = not append.length and last
        appended.budgets_A[place] = append.budget if last else -1
      state = self._extend(
        self._params,
        state,
        *self._send(rows, appended),
        num_blocks=self._num_blocks(now.values(), first),
      )
    return state

  def _num_blocks(
    self, slots: Iterable[Append | Copy | Write], further: int = 0
  ) -> int:
    """Blocks that hold what slots have read, and so many tokens more."""
    return -(-max(slot.length + further for slot in slots) // self._block)

  def _at_work(
    self, slots: Sequence[int], num_slots: int
  ) -> tuple[np.ndarray | None, int]:
    """The rows a program runs on (None: all slots) and how many places."""
    if not self.compacts or num_slots != self._slots:
      return None, num_slots
    size = num_slots
    for _ in range(_HALVINGS):
      if size % 2 or len(slots) > size // 2:
        break
      size //= 2
    if size == num_slots:
      return None, num_slots
    rows = np.full(size, num_slots, np.int32)
    rows[: len(slots)] = slots
    return rows, size

  def _send(self, *trees):
    """To the devices, cut by row where all slots are meant."""
    return jax.device_put(trees, self._by_row)
