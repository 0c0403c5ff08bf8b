"""Schedules the rows in the slots of one lane.

A lane decides which rows append a prompt or an observation, and which rows
decode together. It keeps the chunks that are in flight. Its programs run one
after the other. With several lanes, each lane calls its programs on a thread of
its own. A CPU then runs the lanes in parallel, which uses its cores better than
splitting the small operations of one program.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import math
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import rows as rows_lib
from stppo_jax.sampling import slot_calls
from stppo_jax.sampling import slot_driver
from stppo_jax.sampling import slot_programs

# Appends wait until the number of waiting rows reaches this share of the number
# of generating rows, because a large call of `extend` costs little more than a
# small one.
_APPEND_SHARE = 0.25

Row = rows_lib.Row


@dataclasses.dataclass(frozen=True)
class _ChunkInFlight:
  """Describes a chunk that has been started.

  Attributes:
    turns: for each slot of the chunk, the row and the number of its turn.
    earlier: the futures of the calls since the previous chunk. If one of these
      calls failed, this chunk is useless.
    result: the future of the result of `SlotDriver.decode`.
  """

  turns: Mapping[int, tuple[Row, int]]
  earlier: Sequence[concurrent.futures.Future]
  result: concurrent.futures.Future


class Lane:
  """Schedules the rows in the slots of one driver.

  Args:
    driver: holds the slots, and calls the programs that change them.
    options: the engine's options.
    turn_weights: returns the weights of turns that begin now.

  Attributes:
    free: the slots without a row, in order.
  """

  def __init__(
    self,
    driver: slot_driver.SlotDriver,
    options: engine_options.EngineOptions,
    turn_weights: Callable[[], compiled_programs.Weights],
  ):
    self._driver = driver
    self._options = options
    self._turn_weights = turn_weights
    self._recomputes = options.turn_swaps == 'recompute'
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

    Waits for the calls of the last collection. If one of them failed, resets
    the driver and raises the first error. The next `begin` then succeeds.

    Args:
      max_turn_tokens: the most tokens of a turn.
      greedy: whether to take the most probable token instead of sampling.
    """
    self._max_turn_tokens = max_turn_tokens
    self._greedy = greedy
    self.free = list(range(self._driver.slots))
    self._rows: dict[int, Row] = {}  # the rows by slot number
    shards = self._driver.shards
    self._pools = [
      rows_lib.PagePool(
        self._options.pages_per_lane // shards,
        page_size=self._options.tokens_per_page,
        pages_per_row=self._options.pages_per_row,
      )
      for _ in range(shards)
    ]
    self._to_append: list[tuple[Row, np.ndarray]] = []
    # Rows by slot number, in the order in which their last chunks were started.
    self._generating: dict[int, Row] = {}
    left = [x for c in self._in_flight for x in (*c.earlier, c.result)]
    left += self._calls
    self._in_flight.clear()
    self._calls = []
    concurrent.futures.wait(left)
    try:
      # The calls are in order, so the first error is the cause of later errors.
      for future in left:
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
    """Whether a turn can end even if the caller resumes or closes no row."""
    if any(self._fits(row, len(ids)) for row, ids in self._to_append):
      return True
    rows = self._generating.values()
    return any(row.in_flight or self._fits(row) for row in rows)

  def has_group(self, group: int) -> bool:
    """Returns whether a slot holds the prompt of a group."""
    return any(row.group == group for row in self._rows.values())

  def admit(self, row: Row) -> None:
    """Gives a free slot to a row, and schedules the append of its prompt."""
    row.lane, row.slot = self, self.free.pop(0)
    self._rows[row.slot] = row
    self._pool(row).add(row)
    self.append_observation(row, row.prompt)

  def append_observation(self, row: Row, token_ids: np.ndarray) -> None:
    """Schedules an append of tokens to a row before its next turn."""
    self._to_append.append((row, token_ids))

  def close(self, row: Row) -> np.ndarray | None:
    """Frees the slot of a row.

    Returns:
      The result of `SlotDriver.expert_ids`. If the engine's options do not ask
      for experts, the result is None, and the call waits for no other thread.
    """
    self.free.append(row.slot)
    self.free.sort()
    del self._rows[row.slot]
    held = row.pages
    self._pool(row).remove(row)
    if not self._driver.returns_expert_ids:
      return None
    return self._call(
      self._driver.expert_ids, row.slot, held, row.length
    ).result()

  def schedule(self, *, queued: bool) -> concurrent.futures.Future | None:
    """Starts the calls that are due.

    Args:
      queued: whether rows in the queue wait for a slot.

    Returns:
      A future that is done once `collect_done` can return without waiting; None
      if no chunk is in flight.
    """
    if self._should_append():
      self._append_scheduled()
    while rows := self._next_batch(queued):
      self._start_chunk(rows)
    return self._in_flight[0].result if self._in_flight else None

  def _call(self, function: Callable, *args) -> concurrent.futures.Future:
    """Calls a driver function, on the thread of the lane if it has one."""
    if self._thread is not None:
      return self._thread.submit(function, *args)
    future = concurrent.futures.Future()
    try:
      future.set_result(function(*args))
    except Exception as error:
      # The error is treated like an error of a thread: `collect_done` raises it
      # later, and `begin` resets the slots.
      future.set_exception(error)
    return future

  def _shard(self, row: Row) -> int:
    return row.slot * self._driver.shards // self._driver.slots

  def _pool(self, row: Row) -> rows_lib.PagePool:
    return self._pools[self._shard(row)]

  def _room(self, row: Row, appended: int | None) -> int:
    """Returns the number of tokens for which a row needs pages.

    Args:
      row: the row.
      appended: the number of tokens that the next call appends to the row; None
        if that call decodes.
    """
    if appended is not None:
      return row.length + appended
    ahead = (row.in_flight + 1) * self._options.decode_chunk
    return min(row.length + ahead, self._options.max_length)

  def _fits(self, row: Row, appended: int | None = None) -> bool:
    if appended is not None and row.due:
      if not row.is_due(self._turn_weights()):
        return False
    all_fit = not self._options.pages
    return all_fit or self._pool(row).fits(row, self._room(row, appended))

  def _grow(self, row: Row, appended: int | None = None) -> bool:
    """Gives a row its pages for the next call; returns whether it has them."""
    return self._pool(row).grow(row, self._room(row, appended))

  def _budget(self, row: Row) -> int:
    return min(self._max_turn_tokens, self._options.max_length - row.length)

  def _should_append(self) -> bool:
    """Returns whether enough rows wait for an append.

    Waiting changes only the time at which a token is computed, not the token.
    """
    share = _APPEND_SHARE if self._driver.compacts else 1
    decoding = sum(map(self._fits, self._generating.values()))
    enough = min(decoding * share, self._driver.batch_rows)
    ready = sum(self._fits(row, len(ids)) for row, ids in self._to_append)
    return ready > 0 and ready >= enough

  def _append_scheduled(self) -> None:
    """Appends the scheduled tokens for which there are pages, and starts turns.

    A prompt is copied instead of computed if another row holds it, or if
    another row of this call computes it.
    """
    scheduled, self._to_append = self._to_append, []
    appends, copies = {}, {}
    weights = self._turn_weights()
    for row, token_ids in scheduled:
      if not row.is_due(weights):
        self._to_append.append((row, token_ids))
        continue
      if row.begins_anew(token_ids, weights.version, self._recomputes):
        token_ids = self._pool(row).emptied(row, token_ids)
      # Before its first turn, a row has the same tokens as the rest of its
      # group.
      source = None if row.turn else self._source(row, weights.version)
      if source is not None:
        self._pool(row).share(row, source, len(token_ids))
      shared = len(row.pages)
      if not self._grow(row, len(token_ids)):
        # A row that has not begun gives the shared pages back. If waiting rows
        # held pages, there might be too few for the oldest row, which never
        # waits.
        if not row.length:
          self._pool(row).release(row)
        self._to_append.append((row, token_ids))
        continue
      length = row.length
      row.begin_turn(token_ids, weights)
      self._generating[row.slot] = row
      if source is None:
        appends[row.slot] = slot_calls.Append(
          token_ids, length, self._budget(row), tuple(row.pages)
        )
        continue
      last_page = None
      if len(row.pages) > shared:
        last_page = source.pages[shared], row.pages[shared]
      copies[row.slot] = slot_calls.CopyPrompt(
        source.slot, row.length, self._budget(row), last_page
      )
    if appends:
      append = self._call(self._driver.append, appends, weights.params)
      self._calls.append(append)
    if copies:
      self._calls.append(self._call(self._driver.copy, copies))

  def _source(self, row: Row, version: int) -> Row | None:
    """Returns another row on the same device that holds a row's prompt, if any.

    The first token after a prompt depends on the weights that have read the
    prompt. So the other row must have read it with the weights of `version`.
    """
    for other in self._rows.values():
      if other.group == row.group and other.prompt_version == version:
        if self._shard(other) == self._shard(row):
          return other
    return None

  def _next_batch(self, queued: bool) -> Sequence[Row]:
    """Returns the rows of the next chunk; none if no chunk is due yet.

    If a chunk has room for all slots, it decodes all generating rows, and
    `lookahead` further chunks are started before the oldest result is read.

    Otherwise two chunks are in flight, so that the device need not wait for the
    host. A chunk may read as many pages of each row as its longest row needs,
    so it decodes a chosen row and the rows that are closest to it in length.
    While rows wait for a slot (`queued`), the chosen row is the row that has
    waited longest for a chunk: new rows are short, and if the shortest row were
    chosen, new rows would overtake all others for ever. Once the queue is
    empty, the shortest row is chosen, because it may grow most. So all rows end
    at about the same time. Otherwise a few rows would be left at the end, and
    the device would be idle while these rows wait for the retriever.
    """
    size = self._driver.batch_rows
    rows = [row for row in self._generating.values() if self._fits(row)]
    # A call uses weights of one version. The first row without a chunk in
    # flight chooses this version, so that every version gets calls.
    first = [row for row in rows if not row.in_flight] or rows
    rows = [row for row in rows if row.weights is first[0].weights]
    if size == self._driver.slots:
      early = len(self._in_flight) <= self._options.lookahead
      return rows if early else []
    if len(self._in_flight) > 1:
      return []
    ready = [row for row in rows if not row.in_flight]
    if len(ready) > size:
      first = ready[0] if queued else min(ready, key=lambda row: row.length)
      return rows_lib.closest_in_length(first, ready, size)
    # The rest of the batch goes to rows whose last chunk is still in flight.
    ahead = [
      row for row in rows if 0 < row.in_flight <= self._options.lookahead
    ]
    return [*ready, *ahead][:size]

  def _start_chunk(self, rows: Sequence[Row]) -> None:
    """Starts a chunk that decodes in these rows."""
    decodes, row_turns = {}, {}
    for row in rows:
      # Another row of this batch may have taken the last free pages.
      if not self._grow(row):
        continue
      # The chunks in flight may make the row longer by all their tokens.
      ahead = row.in_flight * self._options.decode_chunk
      length = min(row.length + ahead, self._options.max_length)
      # The exact length is known only after these chunks. `length` is an upper
      # bound, with which the program may read some pages that are still empty.
      decodes[row.slot] = slot_calls.Decode(
        row.key_data, length, tuple(row.pages)
      )
      # The number of the turn shows `collect_done` whether a result is late.
      row_turns[row.slot] = row, row.turn
      row.in_flight += 1
      self._generating[row.slot] = self._generating.pop(row.slot)
    enough = max(math.ceil(len(decodes) * self._exit_share), 1)
    assert rows[0].weights is not None
    params = rows[0].weights.params
    result = self._call(self._decode, decodes, params, enough)
    self._in_flight.append(_ChunkInFlight(row_turns, self._calls, result))
    self._calls = []

  def _decode(
    self, decodes: Mapping[int, slot_calls.Decode], params: Any, enough: int
  ) -> tuple[list[int | None], slot_programs.Chunk]:
    slots, chunk = self._driver.decode(
      decodes, params, greedy=self._greedy, enough=enough
    )
    # The lane's thread may wait for the device; the caller's thread must not.
    return slots, chunk if self._thread is None else self._driver.read(chunk)

  def collect_done(self) -> dict[int, types.GeneratedTurn]:
    """Reads the oldest chunk and returns the turns that ended in it, by row."""
    oldest = self._in_flight[0]
    for future in oldest.earlier:
      future.result()  # raises the error of a failed call
    slots, chunk = oldest.result.result()
    chunk = self._driver.read(chunk)
    # The chunk is removed only now, because `begin` must find a failed chunk.
    self._in_flight.popleft()
    columns = chunk.tokens_AC, chunk.logprobs_AC, chunk.truncated_logprobs_AC
    ended = {}
    for place, slot in enumerate(slots):
      if slot is None:
        continue
      row, turn = oldest.turns[slot]
      # If the turn ended in an earlier chunk, which was still in flight when
      # this one started, the device has decoded no token of the row here.
      if row.turn != turn or not row.generating:
        continue
      row.in_flight -= 1
      count = int(chunk.counts_A[place])
      row.length += count
      row.chunks.append([x_AC[place, :count] for x_AC in columns])
      if chunk.ended_A[place]:
        del self._generating[slot]
        ended[row.number] = row.end_turn(stopped=bool(chunk.stopped_A[place]))
    return ended
