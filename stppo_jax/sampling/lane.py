"""A lane: slots whose programs run one after the other.

A lane knows the rows in its slots: who is to be told something, who writes,
and which chunks are under way. With several lanes each calls its programs on a
thread of its own: a CPU runs them side by side then, and its cores need not
share small operations.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import math

import jax
import numpy as np

from stppo_jax.sampling import slot_driver as slot_driver_lib
from stppo_jax.sampling import slot_programs
from stppo_jax.sampling import turns as turns_lib

_COMPANY = 0.25  # rows to be told something, for each that writes


@dataclasses.dataclass(eq=False)
class Row:
  """A dialogue, as the host knows it."""

  number: int
  prompt: np.ndarray
  group: int
  key_data: np.ndarray
  lane: 'Lane | None' = None  # None: it waits for a slot
  slot: int = -1
  length: int = 0
  turn: int = 0  # serial number, to tell a late chunk from one of this turn
  writing: bool = False
  flying: int = 0  # chunks under way that write this turn
  chunks: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Flight:
  """A chunk under way.

  Attributes:
    turns: row and turn of each slot in it.
    before: what was called before it, and since the last one.
    chunk: see `SlotDriver.write`.
  """

  turns: Mapping[int, tuple[Row, int]]
  before: Sequence[concurrent.futures.Future]
  chunk: concurrent.futures.Future


class Lane:
  """Slots and the rows in them.

  Args:
    decoder: of the slots.
    decode_chunk, early_exit, lookahead, max_length: see `Engine`.
    threaded: programs are called, and waited for, on a thread.

  Attributes:
    slots: how many there are.
    free: those without a row, in order.
  """

  def __init__(
    self,
    decoder: slot_driver_lib.SlotDriver,
    *,
    decode_chunk: int,
    early_exit: float,
    lookahead: int,
    max_length: int,
    threaded: bool,
  ):
    self.slots = decoder.slots
    self._decoder = decoder
    self._decode_chunk = decode_chunk
    self._early_exit = early_exit
    self._lookahead = lookahead
    self._max_length = max_length
    self._flights: collections.deque[_Flight] = collections.deque()
    self._called: list[concurrent.futures.Future] = []
    self._thread = None
    if threaded:
      self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self.begin(max_turn_tokens=1, greedy=False)

  def begin(self, *, max_turn_tokens: int, greedy: bool) -> None:
    """Leaves all slots empty, for rows of which this holds.

    Waits for what is left from before, and raises what that raised: nobody
    else would hear of it. The next one begins anew.
    """
    self._max_turn_tokens = max_turn_tokens
    self._greedy = greedy
    self.free = list(range(self.slots))
    # Whose prompt each slot holds: also after its row has gone on or ended,
    # until it is given to a row of another group.
    self._group_at: list[int | None] = [None] * self.slots
    self._groups: set[int] = set()  # those of which a row came here
    self._told: list[tuple[Row, np.ndarray]] = []
    self._writing: dict[int, Row] = {}  # by slot; who waits longest comes first
    left = [x for f in self._flights for x in (*f.before, f.chunk)]
    left += self._called
    self._flights.clear()
    self._called = []
    concurrent.futures.wait(left)
    try:
      for future in left:  # as they were called: the cause comes first
        future.result()
    except BaseException:
      self._decoder.forget()
      raise

  @property
  def busy(self) -> bool:
    """Whether a turn can end, with no row told anything or closed before."""
    return bool(self._told or self._writing)

  def open(self, rows: Sequence[Row], group_size: int) -> None:
    """Fills the empty slots, each group side by side; computes prompts once."""
    prompts, places = {}, {}
    self._group_at = [None] * self.slots
    for row in rows:
      group = places.setdefault(row.group, len(places))
      self._place(row, group * group_size + row.number % group_size)
      self._start_turn(row, len(row.prompt))
      self._group_at[row.slot] = row.group
      prompts[group] = slot_driver_lib.Append(row.prompt, 0, self._budget(row))
    self._called.append(self._call(self._decoder.open, prompts, group_size))

  def knows(self, group: int) -> bool:
    """Whether a row of the group came here."""
    return group in self._groups

  def admit(self, row: Row) -> None:
    """Gives a free slot to a row, which is told its prompt.

    If those of a group come one after the other, their prompt is computed once:
    a slot that holds it is not given away while one of them waits for it.
    """
    slot = self.free[0]
    group = self._group_at[slot]
    if group != row.group and any(
      other.group == group and not other.length for other, _ in self._told
    ):
      self._append()
    self._place(row, slot)
    self.tell(row, row.prompt)

  def _place(self, row: Row, slot: int) -> None:
    self.free.remove(slot)
    row.lane, row.slot = self, slot
    self._groups.add(row.group)
    if self._group_at[slot] != row.group:
      self._group_at[slot] = None

  def tell(self, row: Row, token_ids: np.ndarray) -> None:
    """What a row is told before its next turn, be it the prompt."""
    self._told.append((row, token_ids))

  def rests(self, row: Row) -> bool:
    """Whether a row is between two turns."""
    return not row.writing and all(row is not other for other, _ in self._told)

  def close(self, row: Row) -> np.ndarray | None:
    """Ends a row; its slot is free. See `SlotDriver.expert_ids`.

    None unless that is replayed: there is nothing to wait for then.
    """
    self.free.append(row.slot)
    self.free.sort()
    if not self._decoder.return_expert_ids:
      return None
    return self._call(self._decoder.expert_ids, row.slot, row.length).result()

  def go_on(self, *, queued: bool) -> concurrent.futures.Future | None:
    """Starts what can be started.

    Args:
      queued: whether rows wait for a slot.

    Returns:
      Done when there is something to `land`; None: nothing is under way.
    """
    if self._should_append():
      self._append()
    while rows := self._next(queued):
      self._start_chunk(rows)
    return self._flights[0].chunk if self._flights else None

  def _call(self, function: Callable, *args) -> concurrent.futures.Future:
    if self._thread is not None:
      return self._thread.submit(function, *args)
    future = concurrent.futures.Future()
    future.set_result(function(*args))
    return future

  def _start_turn(self, row: Row, new_tokens: int) -> None:
    row.length += new_tokens
    row.turn += 1
    row.writing = True
    row.flying = 0
    row.chunks = []
    self._writing[row.slot] = row

  def _budget(self, row: Row) -> int:
    return min(self._max_turn_tokens, self._max_length - row.length)

  def _should_append(self) -> bool:
    """Whether enough rows wait to be told something.

    A call of `extend` costs much of what it costs for a whole batch, so it
    waits for company while others write. This moves work in time; it changes
    no number.
    """
    company = _COMPANY if self._decoder.compacts else 1
    enough = min(len(self._writing) * company, self._decoder.batch_rows)
    return len(self._told) > 0 and len(self._told) >= enough

  def _append(self) -> None:
    """Tells rows what they are to be told, and opens their turns.

    A prompt that a slot holds, or will hold after this, is copied from there.
    """
    told, self._told = self._told, []
    appends, copied = {}, []
    for row, token_ids in told:
      length = row.length
      starts = length == 0
      self._start_turn(row, len(token_ids))
      if starts and row.group in self._group_at:
        copied.append(row)
        continue
      if starts:
        self._group_at[row.slot] = row.group
      append = slot_driver_lib.Append(token_ids, length, self._budget(row))
      appends[row.slot] = append
    if appends:
      self._called.append(self._call(self._decoder.append, appends))
    copies = {}
    for row in copied:
      source = self._group_at.index(row.group)
      copy = slot_driver_lib.CopyPrompt(source, row.length, self._budget(row))
      copies[row.slot] = copy
    if copies:
      self._called.append(self._call(self._decoder.copy, copies))
    for row in copied:
      self._group_at[row.slot] = row.group

  def _next(self, queued: bool) -> Sequence[Row]:
    """Rows of the chunk that is to start now; none: it is not yet time.

    Where programs work on all slots, a chunk writes in all rows. Else two
    chunks are under way, so that the device need not wait for the host; of the
    other rows one is next, and those that are the most like it in length: what
    is read is what the longest one needs. As long as new rows come, it is the
    one that waits longest, or they would overtake it. Then it is the shortest,
    which has most before it: so all end at about the same time, and few are
    left whose answers nobody's work hides.
    """
    size = self._decoder.batch_rows
    if size == self.slots:
      early = len(self._flights) <= self._lookahead
      return list(self._writing.values()) if early else []
    if len(self._flights) > 1:
      return []
    rows = self._writing.values()
    ready = [row for row in rows if not row.flying]
    if len(ready) > size:
      first = ready[0] if queued else min(ready, key=lambda row: row.length)
      return _alike(first, ready, size)
    ahead = [row for row in rows if 0 < row.flying <= self._lookahead]
    return [*ready, *ahead][:size]

  def _start_chunk(self, rows: Sequence[Row]) -> None:
    """Lets the policy write in rows."""
    writes, turns = {}, {}
    for row in rows:
      ahead = row.flying * self._decode_chunk  # not known of yet
      length = min(row.length + ahead, self._max_length)
      writes[row.slot] = slot_driver_lib.Decode(row.key_data, length)
      turns[row.slot] = row, row.turn
      row.flying += 1
      self._writing[row.slot] = self._writing.pop(row.slot)
    enough = max(math.ceil(len(writes) * self._early_exit), 1)
    chunk = self._call(self._written, writes, self._greedy, enough)
    self._flights.append(_Flight(turns, self._called, chunk))
    self._called = []

  def _written(self, *args) -> tuple[list[int | None], slot_programs.Chunk]:
    slots, chunk = self._decoder.write(*args)
    # Whoever has a thread may wait on it.
    return slots, chunk if self._thread is None else jax.device_get(chunk)

  def land(self) -> dict[int, turns_lib.GeneratedTurn]:
    """Looks at the oldest chunk; the turns that ended with it, by row."""
    flight = self._flights[0]
    for called in flight.before:
      called.result()  # or what it raised
    slots, chunk = flight.chunk.result()
    chunk = jax.device_get(chunk)
    self._flights.popleft()  # now: `begin` is to hear of the cause too
    written = chunk.tokens_AN, chunk.logprobs_AN, chunk.truncated_logprobs_AN
    ended = {}
    for place, slot in enumerate(slots):
      if slot is None:
        continue
      row, turn = flight.turns[slot]
      # It may have ended its turn in an earlier chunk, and begun another.
      if row.turn != turn or not row.writing:
        continue
      row.flying -= 1
      count = int(chunk.counts_A[place])
      row.length += count
      row.chunks.append([x_AN[place, :count] for x_AN in written])
      if chunk.ended_A[place]:
        row.writing = False
        del self._writing[slot]
        ids, *logprobs = (np.concatenate(x) for x in zip(*row.chunks))
        stopped = bool(chunk.stopped_A[place])
        ended[row.number] = turns_lib.GeneratedTurn(ids, *logprobs, stopped)
    return ended


def _alike(row: Row, rows: Sequence[Row], size: int) -> Sequence[Row]:
  """A row and `size` - 1 others of these, with the least range of lengths."""
  by_length = sorted(rows, key=lambda row: row.length)
  place = by_length.index(row)
  firsts = range(max(place - size + 1, 0), min(place, len(rows) - size) + 1)

  def range_of(first):
    return by_length[first + size - 1].length - by_length[first].length

  first = min(firsts, key=range_of)
  return by_length[first : first + size]
