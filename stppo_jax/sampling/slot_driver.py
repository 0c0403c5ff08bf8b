"""Calls the compiled programs on the slots of one lane.

S slots, A active slots, C tokens appended by a call, N pages of a row. The
caller describes, slot by slot, which tokens to append and which slots decode.
This module turns the descriptions into arrays of a few fixed shapes. So no
program is compiled any more once each shape has been used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import slot_calls
from stppo_jax.sampling import slot_programs
from stppo_jax.sampling import slot_state as slot_state_lib

# Batches of active slots have the largest size, its half, its quarter and so
# on, with at most this many halvings. With more sizes, batches would have less
# padding, but more programs would be compiled.
_MAX_HALVINGS = 3


class SlotDriver:
  """Holds the state of a lane's slots on the devices, and calls the programs.

  Programs run on all slots, or, with `EngineOptions.compacts`, on the active
  slots only, in batches of a few fixed sizes. If slots are sharded over
  devices, each device gathers the same number of its own slots, so that no part
  of the cache moves between devices.

  Args:
    programs: the programs to call.
    options: the engine's options.

  Attributes:
    slots: the number of slots, S.
    compacts: whether programs run on the active slots only.
    batch_rows: the most active slots in a call of a program.
    shards: the number of devices that slots and pages are divided over. Device
      d has slots / shards adjacent slots, of which the first is d * slots /
      shards.
    joins: whether other hosts need this host in their programs. If so, the
      engine must call `join`.
    returns_expert_ids: whether `expert_ids` can be called.
  """

  joins = False

  def __init__(
    self,
    programs: compiled_programs.CompiledPrograms,
    options: engine_options.EngineOptions,
  ):
    self._programs = programs
    self._prefill_chunk = options.prefill_chunk
    self.slots = options.slots_per_lane
    self.shards = programs.shards
    self.compacts = options.compacts
    self._waves = options.waves
    self.batch_rows = options.most_rows
    self.returns_expert_ids = options.return_expert_ids
    self._state: slot_state_lib.SlotState | None = None

  def reset(self) -> None:
    """Drops the state, and frees its memory.

    A call that failed may have left the state unusable.
    """
    self._state = None

  def append(
    self, appends: Mapping[int, slot_calls.Append], params: functional.Params
  ) -> None:
    """Appends tokens to slots, and starts turns there with `params`."""
    # In every run, a wave begins with the same prompts in the same call,
    # whatever the timing. So this call may leave out inactive slots and still
    # gives the same bits. With several hosts, it must not leave them out: a
    # call has the same shapes on all hosts, and the other hosts may be at any
    # point of their waves.
    is_wave = self._waves and all(not x.length for x in appends.values())
    compacts = self.compacts or (is_wave and not self.joins)
    for chunk, first in self._chunks(appends):
      # For every slot of a batch, the program reads as many pages as the
      # longest slot of the batch uses. So a batch has slots of similar length.
      by_length = sorted(chunk, key=lambda slot: chunk[slot].length)
      for batch in self._batches(by_length):
        batch_appends = {slot: chunk[slot] for slot in batch}
        pages = self._num_pages(batch_appends.values(), first)
        self._run(
          slot_calls.Call('extend', self._size(batch, compacts), pages),
          functools.partial(self._extend, batch_appends, first, params),
        )

  def copy(self, copies: Mapping[int, slot_calls.CopyPrompt]) -> None:
    """Copies prompts from other slots into slots, and starts turns there.

    A program reads all prompts of a batch before it overwrites any slot.
    """
    for batch in self._batches(list(copies)):
      batch_copies = {slot: copies[slot] for slot in batch}
      self._run(
        slot_calls.Call('copy', self._size(batch, compacts=True)),
        functools.partial(self._copy, batch_copies),
      )

  def decode(
    self,
    decodes: Mapping[int, slot_calls.Decode],
    params: functional.Params,
    *,
    greedy: bool,
    enough: int,
  ) -> tuple[list[int | None], slot_programs.Chunk]:
    """Starts decoding a chunk, without waiting for its result.

    Args:
      decodes: the slots that decode, by number; at most `batch_rows`.
      params: the weights that write the turns of these slots.
      greedy: whether to take the most probable token instead of sampling.
      enough: the chunk ends once this many turns have ended in it.

    Returns:
      The slot number of each row of the chunk's arrays, or None for a row that
      is padding; and the chunk.
    """
    call = slot_calls.Call(
      'decode',
      self._size(decodes, self.compacts),
      self._num_pages(decodes.values()),
      enough,
      greedy,
    )
    return self._run(call, functools.partial(self._decode, decodes, params))

  def join(self, *, done: bool) -> bool:
    """Takes part in a program of other hosts, without an active slot here.

    Args:
      done: whether this host has nothing left to collect.

    Returns:
      Whether all hosts are done.
    """
    return done

  def read(self, chunk: slot_programs.Chunk) -> Any:
    """Waits for a chunk and returns it as numpy arrays."""
    return self._programs.get(chunk)

  def _run(
    self, call: slot_calls.Call, function: Callable[[slot_calls.Call], Any]
  ) -> Any:
    """Calls a function that runs a program, and returns the function's result.

    Only `SliceDriver` first agrees on the call with the other hosts.
    """
    return function(call)

  def _copy(
    self, copies: Mapping[int, slot_calls.CopyPrompt], call: slot_calls.Call
  ) -> None:
    active = self._active(list(copies), call.size, always=True)
    none = cache_lib.NO_PAGE
    arrays = np.zeros((5, active.size), np.int32)
    arrays[3:] = none  # padding must copy no page, and 0 is a real page
    for place, copy in zip(active.places, copies.values()):
      arrays[:, place] = (
        copy.source % (self.slots // self.shards),
        copy.length,
        copy.budget,
        *(copy.last_page or (none, none)),
      )
    sources_A, lengths_A, budgets_A, from_A, to_A = arrays
    assert active.slots is not None
    self._state = self._programs.copy(
      self._state,
      *self._programs.put(
        sources_A.reshape(active.slots.shape),
        active.slots,
        lengths_A,
        budgets_A,
        from_A,
        to_A,
      ),
    )

  def _decode(
    self,
    decodes: Mapping[int, slot_calls.Decode],
    params: functional.Params,
    call: slot_calls.Call,
  ) -> tuple[list[int | None], slot_programs.Chunk]:
    slots = sorted(decodes)
    active = self._active(slots, call.size)
    placed: list[int | None] = [None] * active.size
    key_data_A2 = np.zeros((active.size, 2), np.uint32)
    runs_A = np.zeros(active.size, bool)
    for place, slot in zip(active.places, slots):
      placed[place] = slot
      key_data_A2[place] = decodes[slot].key_data
      runs_A[place] = True
    table_AN = self._table(active, [decodes[slot] for slot in slots])
    slots_A, *arrays = self._programs.put(
      active.slots, key_data_A2, runs_A, table_AN
    )
    self._state, chunk = self._programs.decode(
      params,
      self._state,
      *arrays,
      self._programs.table_ZV,
      slots_A=slots_A,
      greedy=call.greedy,
      enough=call.enough,
      num_pages=call.num_pages,
    )
    return placed, chunk

  def expert_ids(
    self, slot: int, pages: Sequence[int], length: int
  ) -> np.ndarray:
    """Returns the experts to which each token of a slot was routed.

    Waits for the chunks that are in flight.

    Returns:
      int16 [length, layers, E], with E experts per token.
    """
    assert self._state is not None
    # A row's page numbers count the pages of its own device. The program needs
    # numbers that count the pages of all devices, one device after another.
    of_device = self._state.cache[0][0].shape[0] // self.shards
    table_N = np.zeros(self._programs.pages_per_row, np.int32)
    table_N[: len(pages)] = pages
    table_N += slot // (self.slots // self.shards) * of_device
    ids = jax.device_get(self._programs.expert_ids(self._state, table_N))
    return ids[:length]

  def _chunks(
    self, appends: Mapping[int, slot_calls.Append]
  ) -> Iterator[tuple[Mapping[int, slot_calls.Append], int]]:
    """Yields each chunk's appends, and the chunk's start in their token ids."""
    longest = max(len(append.token_ids) for append in appends.values())
    for first in range(0, max(longest, 1), self._prefill_chunk):
      yield (
        {
          slot: append
          for slot, append in appends.items()
          # The first chunk begins the turn even if there is no token to append.
          if not first or first < len(append.token_ids)
        },
        first,
      )

  def _extend(
    self,
    appends: Mapping[int, slot_calls.Append],
    first: int,
    params: functional.Params,
    call: slot_calls.Call,
  ) -> None:
    """Appends the tokens of one chunk, up to C for each slot."""
    active = self._active(list(appends), call.size)
    A, C = active.size, self._prefill_chunk
    batch = slot_programs.AppendBatch(
      tokens_AC=np.zeros((A, C), np.int32),
      counts_A=np.zeros(A, np.int32),
      starts_A=np.zeros(A, bool),
      prompts_A=np.zeros(A, bool),
      budgets_A=np.full(A, -1, np.int32),
    )
    table_AN = self._table(active, list(appends.values()))
    for place, append in zip(active.places, appends.values()):
      token_ids = append.token_ids[first : first + C]
      # The turn begins after the last chunk. Until then, a budget of -1 leaves
      # the slot in the state of a turn that has ended, in which `decode`
      # generates no token.
      last = first + C >= len(append.token_ids)
      batch.tokens_AC[place, : len(token_ids)] = token_ids
      batch.counts_A[place] = len(token_ids)
      batch.starts_A[place] = not append.length and not first
      batch.prompts_A[place] = not append.length and last
      batch.budgets_A[place] = append.budget if last else -1
    slots_A, batch, table_AN = self._programs.put(active.slots, batch, table_AN)
    # The call donates the old state, so the new state must replace it at once.
    self._state = self._programs.extend(
      params,
      self._state or self._programs.empty(self.slots),
      batch,
      table_AN,
      slots_A=slots_A,
      num_pages=call.num_pages,
    )

  def _table(
    self,
    active: '_Active',
    slots: Sequence[slot_calls.Append | slot_calls.Decode],
  ) -> np.ndarray:
    """Returns the page numbers of each active slot, [A, N]."""
    shape = active.size, self._programs.pages_per_row
    table_AN = np.full(shape, cache_lib.NO_PAGE, np.int32)
    for place, slot in zip(active.places, slots):
      table_AN[place, : len(slot.pages)] = slot.pages
    return table_AN

  def _num_pages(
    self,
    slots: Iterable[slot_calls.Append | slot_calls.Decode],
    appended: int = 0,
  ) -> int:
    """Returns the number of pages to read, enough for the longest slot."""
    longest = max(slot.length + appended for slot in slots)
    number = -(-longest // self._programs.page_size)
    if self._programs.takes_any_number or number < 2:
      return number
    # The number is rounded up to a power of 2, so that few numbers occur: each
    # number needs a compiled program of its own.
    return min(2 ** (number - 1).bit_length(), self._programs.pages_per_row)

  def _batches(self, slots: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(slots), self.batch_rows):
      yield slots[first : first + self.batch_rows]

  def _size(self, slots: Iterable[int], compacts: bool) -> int:
    """Returns the number of slots of each device that a program runs on.

    Args:
      slots: the active slots.
      compacts: whether the program may leave out inactive slots. Only a few
        sizes are used, so the result may exceed the number of active slots.
    """
    part = self.slots // self.shards
    if not compacts:
      return part
    # A program has the same shape on all devices, so the device with the most
    # active slots decides the size.
    largest = int(np.bincount([slot // part for slot in slots]).max())
    return _fitting(largest, min(self.batch_rows, part))

  def _active(
    self, slots: Sequence[int], size: int, *, always: bool = False
  ) -> '_Active':
    """Returns the active slots in the form that a program takes.

    Args:
      slots: the active slots.
      size: the number of slots of each device that the program runs on.
      always: whether to list the slots even if the program runs on all slots.
    """
    shards = self.shards
    part = self.slots // shards  # the number of slots of a device
    if size == part and not always:
      return _Active(None, slots, self.slots)
    # Elements that stay at `self.slots` are padding: programs read any slot for
    # them, and store nothing.
    active = np.full((shards, size), self.slots, np.int32)
    counts, places = [0] * shards, []
    for slot in slots:
      shard = slot // part
      active[shard, counts[shard]] = slot % part
      places.append(shard * size + counts[shard])
      counts[shard] += 1
    # With several devices a program takes one list of slots per device, so that
    # the compiler knows that no row moves between devices.
    one = shards == self._programs.num_hosts == 1
    return _Active(active[0] if one else active, places, shards * size)


class _Active(NamedTuple):
  """Describes the active slots of a call.

  Attributes:
    slots: the argument `slots_A` of the programs, see `slot_programs`; None for
      all slots.
    places: the index of each active slot in the program's arrays.
    size: A, the length of these arrays.
  """

  slots: np.ndarray | None
  places: Sequence[int]
  size: int


def _fitting(count: int, largest: int) -> int:
  """Returns the smallest allowed batch size that holds `count` slots."""
  size = largest
  for _ in range(_MAX_HALVINGS):
    if size % 2 or count > size // 2:
      break
    size //= 2
  return size
