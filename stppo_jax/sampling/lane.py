"""Schedules the rows in the slots of one lane.

A lane decides which rows append a prompt or an observation, and which rows
decode together, and keeps the chunks that are in flight. Its programs run one
after the other. With several lanes, each calls its programs on a thread of its
own: a CPU then runs them in parallel, which uses its cores better than cutting
the small operations of one program into pieces.
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

from stppo_jax import types
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import slot_driver
from stppo_jax.sampling import slot_programs

# Append once the number of rows that wait for it is this share of the number of
# generating rows: a larger call of `extend` costs little more than a small one.
_APPEND_SHARE = 0.25


@dataclasses.dataclass(eq=False)
class Row:
  """A dialogue, as the host sees it.

  Attributes:
    number: the number of the row in the collection.
    prompt: [L] int32, token ids.
    group: the group that shares the prompt.
    key_data: uint32 [2], the data of the row's key.
    lane: the lane of its slot; None while it waits for one.
    slot: its slot in the lane.
    length: tokens so far, without those of chunks in flight.
    turn: serial number of the turn; it tells a late chunk of an earlier turn
      from one of this turn.
    generating: whether it is the policy's turn.
    in_flight: chunks in flight that decode this turn.
    chunks: token ids and log-probabilities of this turn so far.
  """

  number: int
  prompt: np.ndarray
  group: int
  key_data: np.ndarray
  lane: 'Lane | None' = None
  slot: int = -1
  length: int = 0
  turn: int = 0
  generating: bool = False
  in_flight: int = 0
  chunks: list[list[np.ndarray]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _ChunkInFlight:
  """A chunk that has been started.

  Attributes:
    turns: the row and its turn in each slot of the chunk.
    earlier: the calls since the previous chunk; if one of them failed, this
      chunk is of no use.
    result: the future of what `SlotDriver.decode` returns.
  """

  turns: Mapping[int, tuple[Row, int]]
  earlier: Sequence[concurrent.futures.Future]
  result: concurrent.futures.Future


class Lane:
  """The scheduler of some slots.

  Args:
    driver: the slots, and the calls that change them.
    options: the engine's options.

  Attributes:
    free: the slots without a row, in order.
  """

  def __init__(
    self,
    driver: slot_driver.SlotDriver,
    options: engine_options.EngineOptions,
  ):
    self._driver = driver
    self._options = options
    # If chunks ended early, the number of tokens that a row decodes in a chunk
    # would depend on the other rows, and the run would not be deterministic.
    self._exit_share = 1.0 if options.deterministic else options.early_exit
    self._in_flight: collections.deque[_ChunkInFlight] = collections.deque()
    self._calls: list[concurrent.futures.Future] = []  # since the last chunk
    self._thread = None
    if options.lanes > 1:
      self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self.begin(max_turn_tokens=1, greedy=False)

  def begin(self, *, max_turn_tokens: int, greedy: bool) -> None:
    """Empties all slots for a new collection.

    Waits for the calls of the last collection and raises the first error of
    them, which would otherwise be lost. The next call then succeeds.

    Args:
      max_turn_tokens: longest turn.
      greedy: whether to take the most probable token instead of sampling.
    """
    self._max_turn_tokens = max_turn_tokens
    self._greedy = greedy
    self.free = list(range(self._driver.slots))
    # The group whose prompt each slot holds. It stays when the row goes on or
    # ends, until the slot is given to a row of another group.
    self._group_at: list[int | None] = [None] * self._driver.slots
    self._groups: set[int] = set()  # the groups of all rows of this lane so far
    self._to_append: list[tuple[Row, np.ndarray]] = []
    # By slot; the row whose last chunk was started longest ago comes first.
    self._generating: dict[int, Row] = {}
    left = [x for c in self._in_flight for x in (*c.earlier, c.result)]
    left += self._calls
    self._in_flight.clear()
    self._calls = []
    concurrent.futures.wait(left)
    try:
      for future in left:  # in the order of the calls, so the cause is first
        future.result()
    except BaseException:
      self._driver.reset()
      raise

  def release(self) -> None:
    """Empties all slots, as `begin` does, and frees their memory."""
    self.begin(max_turn_tokens=1, greedy=False)
    self._driver.reset()

  @property
  def busy(self) -> bool:
    """Whether a turn can end before a row is resumed or closed."""
    return bool(self._to_append or self._generating)

  def start_wave(self, rows: Sequence[Row], group_size: int) -> None:
    """Fills empty slots with whole groups, computing each prompt once."""
    prompts, places = {}, {}
    self._group_at = [None] * self._driver.slots
    for row in rows:
      group = places.setdefault(row.group, len(places))
      self._place(row, group * group_size + row.number % group_size)
      self._start_turn(row, len(row.prompt))
      self._group_at[row.slot] = row.group
      prompts[group] = slot_driver.Append(row.prompt, 0, self._budget(row))
    self._calls.append(self._call(self._driver.start_wave, prompts, group_size))

  def has_group(self, group: int) -> bool:
    """Returns whether a row of the group has come to this lane."""
    return group in self._groups

  def admit(self, row: Row) -> None:
    """Gives a free slot to a row and schedules its prompt.

    The rows of a group come one after the other, and their prompt is computed
    once: the later ones copy it from a slot that holds it. So a slot must not
    be given to another group while a row still waits to copy from it.
    """
    slot = self.free[0]
    group = self._group_at[slot]
    if group != row.group and any(
      other.group == group and not other.length for other, _ in self._to_append
    ):
      self._append_scheduled()
    self._place(row, slot)
    self.append_observation(row, row.prompt)

  def _place(self, row: Row, slot: int) -> None:
    self.free.remove(slot)
    row.lane, row.slot = self, slot
    self._groups.add(row.group)
    if self._group_at[slot] != row.group:
      self._group_at[slot] = None

  def append_observation(self, row: Row, token_ids: np.ndarray) -> None:
    """Schedules tokens to be appended to a row before its next turn."""
    self._to_append.append((row, token_ids))

  def is_between_turns(self, row: Row) -> bool:
    """Returns whether a row can be resumed or closed."""
    scheduled = any(row is other for other, _ in self._to_append)
    return not row.generating and not scheduled

  def close(self, row: Row) -> np.ndarray | None:
    """Frees the slot of a row.

    Returns:
      See `SlotDriver.expert_ids`; None, without waiting for a thread, unless
      the engine's options ask for them.
    """
    self.free.append(row.slot)
    self.free.sort()
    if not self._driver.returns_expert_ids:
      return None
    return self._call(self._driver.expert_ids, row.slot, row.length).result()

  def schedule(self, *, queued: bool) -> concurrent.futures.Future | None:
    """Starts the calls that are due.

    Args:
      queued: whether rows wait for a slot.

    Returns:
      A future that is done as soon as `collect_done` would not wait; None if
      nothing is in flight.
    """
    if self._should_append():
      self._append_scheduled()
    while rows := self._next_batch(queued):
      self._start_chunk(rows)
    return self._in_flight[0].result if self._in_flight else None

  def _call(self, function: Callable, *args) -> concurrent.futures.Future:
    """Calls a function of the driver, on the lane's thread if it has one."""
    if self._thread is not None:
      return self._thread.submit(function, *args)
    future = concurrent.futures.Future()
    try:
      future.set_result(function(*args))
    except Exception as error:
      # As with a thread, `collect_done` raises the error later, and `begin`
      # resets the slots.
      future.set_exception(error)
    return future

  def _start_turn(self, row: Row, new_tokens: int) -> None:
    row.length += new_tokens
    row.turn += 1
    row.generating = True
    row.in_flight = 0
    row.chunks = []
    self._generating[row.slot] = row

  def _budget(self, row: Row) -> int:
    return min(self._max_turn_tokens, self._options.max_length - row.length)

  def _should_append(self) -> bool:
    """Returns whether enough rows wait to be appended to.

    Waiting changes when a token is computed, but no token.
    """
    share = _APPEND_SHARE if self._driver.compacts else 1
    enough = min(len(self._generating) * share, self._driver.batch_rows)
    return len(self._to_append) > 0 and len(self._to_append) >= enough

  def _append_scheduled(self) -> None:
    """Appends all scheduled tokens and starts the turns after them.

    A prompt that a slot holds, or that another row of this call computes, is
    copied from there.
    """
    scheduled, self._to_append = self._to_append, []
    appends, copied = {}, []
    for row, token_ids in scheduled:
      length = row.length
      self._start_turn(row, len(token_ids))
      if not length and row.group in self._group_at:
        copied.append(row)
        continue
      if not length:
        self._group_at[row.slot] = row.group
      append = slot_driver.Append(token_ids, length, self._budget(row))
      appends[row.slot] = append
    if appends:
      self._calls.append(self._call(self._driver.append, appends))
    copies = {}
    for row in copied:
      source = self._group_at.index(row.group)
      copies[row.slot] = slot_driver.CopyPrompt(
        source, row.length, self._budget(row)
      )
    if copies:
      self._calls.append(self._call(self._driver.copy, copies))
    for row in copied:
      self._group_at[row.slot] = row.group

  def _next_batch(self, queued: bool) -> Sequence[Row]:
    """Returns the rows of the next chunk; none if it is not yet time for one.

    If a chunk has room for all slots, it decodes all generating rows, and
    `lookahead` chunks are started before the last result is read.

    Otherwise two chunks are in flight, so that the device need not wait for the
    host. A chunk reads as many blocks of the cache as its longest row needs, so
    a batch is one row and those closest to it in length. The queue decides
    which row that is. While rows wait for a slot, it is the row that has waited
    longest: new rows are short, and if the shortest row went first, new ones
    would overtake the others for ever. Once the queue is empty, it is the
    shortest row, which has most tokens ahead of it. All rows then end at about
    the same time. Otherwise a few would be left at the end, and the device
    would be idle while they wait for the retriever.
    """
    size = self._driver.batch_rows
    rows = self._generating.values()
    if size == self._driver.slots:
      early = len(self._in_flight) <= self._options.lookahead
      return list(rows) if early else []
    if len(self._in_flight) > 1:
      return []
    ready = [row for row in rows if not row.in_flight]
    if len(ready) > size:
      first = ready[0] if queued else min(ready, key=lambda row: row.length)
      return _closest_in_length(first, ready, size)
    # Room that is left goes to rows whose last chunk is still in flight.
    ahead = [
      row for row in rows if 0 < row.in_flight <= self._options.lookahead
    ]
    return [*ready, *ahead][:size]

  def _start_chunk(self, rows: Sequence[Row]) -> None:
    """Starts decoding in rows."""
    decodes, row_turns = {}, {}
    for row in rows:
      # The row may be longer by all tokens of its chunks in flight.
      ahead = row.in_flight * self._options.decode_chunk
      length = min(row.length + ahead, self._options.max_length)
      decodes[row.slot] = slot_driver.Decode(row.key_data, length)
      row_turns[row.slot] = row, row.turn
      row.in_flight += 1
      self._generating[row.slot] = self._generating.pop(row.slot)
    enough = max(math.ceil(len(decodes) * self._exit_share), 1)
    result = self._call(self._decode, decodes, enough)
    self._in_flight.append(_ChunkInFlight(row_turns, self._calls, result))
    self._calls = []

  def _decode(
    self, decodes: Mapping[int, slot_driver.Decode], enough: int
  ) -> tuple[list[int | None], slot_programs.Chunk]:
    slots, chunk = self._driver.decode(
      decodes, greedy=self._greedy, enough=enough
    )
    # A lane's thread may wait for the device; the caller's thread must not.
    return slots, chunk if self._thread is None else jax.device_get(chunk)

  def collect_done(self) -> dict[int, types.GeneratedTurn]:
    """Reads the oldest chunk and returns the turns that ended in it, by row."""
    oldest = self._in_flight[0]
    for future in oldest.earlier:
      future.result()  # raises what the call raised
    slots, chunk = oldest.result.result()
    chunk = jax.device_get(chunk)
    # Removed only now, because `begin` must find a chunk that failed.
    self._in_flight.popleft()
    columns = chunk.tokens_AC, chunk.logprobs_AC, chunk.truncated_logprobs_AC
    ended = {}
    for place, slot in enumerate(slots):
      if slot is None:
        continue
      row, turn = oldest.turns[slot]
      # The turn has ended in an earlier chunk, after this one was started. The
      # device has decoded nothing for it here.
      if row.turn != turn or not row.generating:
        continue
      row.in_flight -= 1
      count = int(chunk.counts_A[place])
      row.length += count
      row.chunks.append([x_AC[place, :count] for x_AC in columns])
      if chunk.ended_A[place]:
        row.generating = False
        del self._generating[slot]
        ids, logprobs, truncated_logprobs = (
          np.concatenate(x) for x in zip(*row.chunks)
        )
        ended[row.number] = types.GeneratedTurn(
          token_ids=ids,
          logprobs=logprobs,
          truncated_logprobs=truncated_logprobs,
          stopped=bool(chunk.stopped_A[place]),
        )
    return ended


def _closest_in_length(
  row: Row, rows: Sequence[Row], size: int
) -> Sequence[Row]:
  """Returns the `size` rows, `row` among them, with the least length range."""
  by_length = sorted(rows, key=lambda row: row.length)
  place = by_length.index(row)
  firsts = range(max(place - size + 1, 0), min(place, len(rows) - size) + 1)

  def length_range(first):
    return by_length[first + size - 1].length - by_length[first].length

  first = min(firsts, key=length_range)
  return by_length[first : first + size]
