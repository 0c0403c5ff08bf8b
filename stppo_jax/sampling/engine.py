"""Decoding many dialogues at once, each at its own pace.

R rows (dialogues) are played on S slots. The caller begins a collection, then
polls: a poll appends what rows were told, lets the policy write a chunk of
tokens in all of them, and returns the turns that ended. Whoever got a turn
resumes the row with an observation, or closes it, whenever it is ready: other
rows write meanwhile.

With `deterministic=True` every program runs on all slots and a slot is used
once until all are closed (waves): shapes never depend on what happens when, so
that a row's tokens and log-probabilities are the same bits whenever its
observations come. Without it a slot is refilled from the queue as soon as its
row is closed, and programs run on the rows at work only, in batches of a few
fixed sizes: the same tokens, log-probabilities to rounding.
"""

import collections
from collections.abc import Sequence
import dataclasses
import math

import jax
import numpy as np

from stppo_jax.models import functional
from stppo_jax.sampling import decoder as decoder_lib
from stppo_jax.sampling import rows
from stppo_jax.sampling import sampler
from stppo_jax.sampling import stops

_COMPANY = 0.25  # rows to be told something, for each that writes


@dataclasses.dataclass
class _Row:
  """A dialogue, as the host knows it."""

  prompt: np.ndarray
  group: int
  key_data: np.ndarray
  slot: int = -1
  length: int = 0
  turn: int = 0  # serial number, to tell a late chunk from one of this turn
  writing: bool = False
  chunks: list = dataclasses.field(default_factory=list)


class Engine:
  """Slots that generate; weights come from `publish`, keys from the caller.

  Args:
    model: the policy.
    mesh: local devices; slots are cut over its batch axes.
    automaton: where turns end, over the ids of the tokenizer.
    slots: rows decoded together; divisible by the mesh's batch axes.
    max_length: tokens a row can hold.
    cache_blocks: parts of a slot's cache: a token costs as many as the longest
      row has begun; more of them compile more programs.
    sampling: temperature and truncation.
    extend_chunk: tokens appended per call of `extend`.
    decode_chunk: most tokens written per call of `decode`.
    early_exit: a call of `decode` ends when so large a share of the turns in it
      has ended; not where `deterministic`.
    lookahead: chunks that are started before the last one is looked at.
    deterministic: see the module.
    replays: `close` tells where the row's tokens went.

  `version` is what `publish` was told last.
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
    early_exit: float,
    lookahead: int,
    deterministic: bool,
    replays: bool = False,
  ):
    self.slots = slots
    self.max_length = max_length
    self.version = 0
    self._lookahead = lookahead
    self._decode_chunk = decode_chunk
    self._early_exit = 1.0 if deterministic else early_exit
    self._refills = not deterministic
    self._decoder = decoder_lib.Decoder(
      model,
      mesh=mesh,
      automaton=automaton,
      slots=slots,
      max_length=max_length,
      cache_blocks=cache_blocks,
      sampling=sampling,
      extend_chunk=extend_chunk,
      decode_chunk=decode_chunk,
      compacts=not deterministic,
      replays=replays,
    )
    self._forget()

  def publish(self, params: functional.Params, version: int) -> None:
    """Takes a copy of the policy's weights; they serve until the next one.

    Args:
      params: in whatever layout.
      version: number of the step that made them.
    """
    self._decoder.publish(params)
    self.version = version

  def begin(
    self,
    prompts: Sequence[np.ndarray | None],
    keys: jax.Array,
    *,
    group_size: int,
    max_turn_tokens: int,
    greedy: bool,
  ) -> None:
    """Begins a collection; what was left of another one is forgotten.

    Args:
      prompts: token ids, one for each group of adjacent rows; None for rows
        that are not played. A prompt is computed once for its group.
      keys: one typed key per row; token t of a row is drawn with
        fold_in(key, t), t its position in the row.
      group_size: rows of a prompt; divides the slots.
      max_turn_tokens: longest turn.
      greedy: take the likeliest token instead of drawing.

    Raises:
      ValueError: a group size that does not divide the slots, a prompt that is
        empty or leaves no room to write, or too few keys.
    """
    if self.slots % group_size:
      raise ValueError(
        f'{self.slots} slots are no multiple of group_size={group_size}'
      )
    rows.check_begin(
      prompts, keys, group_size=group_size, max_length=self.max_length
    )
    self._forget()
    self._group_size = group_size
    self._max_turn_tokens = max_turn_tokens
    self._greedy = greedy
    key_data = np.asarray(jax.random.key_data(keys))
    for group, prompt in enumerate(prompts):
      for row in range(group * group_size, (group + 1) * group_size):
        if prompt is not None:
          self._rows[row] = _Row(prompt, group, key_data[row])
    self._queue.extend(self._rows)

  def _forget(self) -> None:
    self._rows: dict[int, _Row] = {}
    self._queue = collections.deque()
    self._row_at: list[int | None] = [None] * self.slots
    # Whose prompt each slot holds: also after its row has gone on or ended,
    # until it is given to a row of another group.
    self._group_at: list[int | None] = [None] * self.slots
    self._told: dict[int, np.ndarray] = {}
    # Chunks that are being written, and the row and turn in each place.
    self._flights = collections.deque()

  def remaining(self, row: int) -> int:
    """Tokens that still fit into a row."""
    return self.max_length - self._rows[row].length

  def resume(self, row: int, token_ids: np.ndarray) -> None:
    """Appends an observation to a row, whose next turn begins.

    Raises:
      ValueError: it leaves no room to write, or no turn of the row has ended.
    """
    self._check_rests(row)
    rows.check_room(
      token_ids, remaining=self.remaining(row), max_length=self.max_length
    )
    self._told[row] = token_ids

  def close(self, row: int) -> np.ndarray | None:
    """Ends a row; its slot is free. See `Decoder.expert_ids`.

    Raises:
      ValueError: no turn of the row has ended.
    """
    self._check_rests(row)
    closed = self._rows.pop(row)
    self._row_at[closed.slot] = None
    return self._decoder.expert_ids(closed.slot, closed.length)

  def statistics(self) -> dict[str, float]:
    """Nothing: no turn can fail here; see `RemoteEngine.statistics`."""
    return {}

  def _check_rests(self, number: int) -> None:
    row = self._rows[number]
    if row.slot < 0 or row.writing or number in self._told:
      raise ValueError(f'row {number} is not between two turns')

  @property
  def busy(self) -> bool:
    """Whether a poll can end a turn, with no row resumed or closed before."""
    writing = any(row.writing for row in self._rows.values())
    return bool(writing or self._told or (self._queue and self._free()))

  def poll(self) -> dict[int, rows.Written]:
    """Goes on for a while; the turns that ended, by row."""
    self._admit()
    if self._should_append():
      self._append()
    while len(self._flights) <= self._lookahead and self._start_chunk():
      pass
    return self._land() if self._flights else {}

  def _free(self) -> list[int]:
    """Slots that may be given to rows of the queue."""
    free = [n for n, row in enumerate(self._row_at) if row is None]
    return free if self._refills or len(free) == self.slots else []

  def _admit(self) -> None:
    """Gives free slots to the rows that come next."""
    free = self._free()
    if self._queue and len(free) == self.slots:
      self._open_wave()
      return
    for slot, number in zip(free, list(self._queue)):
      self._place(self._queue.popleft(), slot)
      self._told[number] = self._rows[number].prompt

  def _place(self, number: int, slot: int) -> None:
    row = self._rows[number]
    row.slot, self._row_at[slot] = slot, number
    if self._group_at[slot] != row.group:
      self._group_at[slot] = None

  def _open_wave(self) -> None:
    """Fills empty slots, each group side by side."""
    size = self._group_size
    first = self._rows[self._queue[0]].group
    prompts = {}
    self._group_at = [None] * self.slots
    while self._queue:
      number = self._queue[0]
      row, group = self._rows[number], self._rows[number].group - first
      if group >= self.slots // size:
        break
      self._place(self._queue.popleft(), group * size + number % size)
      self._start_turn(row, len(row.prompt))
      self._group_at[row.slot] = row.group
      prompts[group] = decoder_lib.Append(row.prompt, 0, self._budget(row))
    self._decoder.open(prompts, size)

  def _start_turn(self, row: _Row, new_tokens: int) -> None:
    row.length += new_tokens
    row.turn += 1
    row.writing = True
    row.chunks = []

  def _budget(self, row: _Row) -> int:
    return min(self._max_turn_tokens, self.max_length - row.length)

  def _should_append(self) -> bool:
    """Whether enough rows wait to be told something.

    A call of `extend` costs much of what it costs for all rows, so it waits
    for company while others write. This moves work in time; it changes no
    number.
    """
    writing = sum(row.writing for row in self._rows.values())
    company = _COMPANY if self._decoder.compacts else 1
    return len(self._told) > 0 and len(self._told) >= writing * company

  def _append(self) -> None:
    """Tells rows what they are to be told, and opens their turns.

    A prompt that a slot holds, or will hold after this, is copied from there.
    """
    told, self._told = self._told, {}
    appends, copied = {}, []
    for number, token_ids in told.items():
      row = self._rows[number]
      length = row.length
      starts = length == 0
      self._start_turn(row, len(token_ids))
      if starts and row.group in self._group_at:
        copied.append(row)
        continue
      if starts:
        self._group_at[row.slot] = row.group
      append = decoder_lib.Append(token_ids, length, self._budget(row))
      appends[row.slot] = append
    if appends:
      self._decoder.append(appends)
    copies = {}
    for row in copied:
      source = self._group_at.index(row.group)
      copy = decoder_lib.Copy(source, row.length, self._budget(row))
      copies[row.slot] = copy
    if copies:
      self._decoder.copy(copies)
    for row in copied:
      self._group_at[row.slot] = row.group

  def _start_chunk(self) -> bool:
    """Lets the policy write where it is its turn; False if it is nowhere."""
    writing = {row.slot: n for n, row in self._rows.items() if row.writing}
    if not writing:
      return False
    ahead = len(self._flights) * self._decode_chunk  # not known of yet
    writes = {}
    for slot, row in ((slot, self._rows[n]) for slot, n in writing.items()):
      length = min(row.length + ahead, self.max_length)
      writes[slot] = decoder_lib.Write(row.key_data, length)
    enough = max(math.ceil(len(writes) * self._early_exit), 1)
    slots, chunk = self._decoder.write(writes, self._greedy, enough)
    numbers = [None if slot is None else writing[slot] for slot in slots]
    places = [n if n is None else (n, self._rows[n].turn) for n in numbers]
    self._flights.append((places, chunk))
    return True

  def _land(self) -> dict[int, rows.Written]:
    """Looks at the oldest chunk; the turns that ended with it."""
    places, chunk = self._flights.popleft()
    chunk = jax.device_get(chunk)
    written = chunk.tokens_AN, chunk.logprobs_AN, chunk.drawn_logprobs_AN
    ended = {}
    for place, held in enumerate(places):
      number, turn = held or (None, 0)
      row = self._rows.get(number)
      # The row may have ended its turn in an earlier chunk, and begun another.
      if row is None or row.turn != turn or not row.writing:
        continue
      count = int(chunk.counts_A[place])
      row.length += count
      row.chunks.append([x_AN[place, :count] for x_AN in written])
      if chunk.ended_A[place]:
        row.writing = False
        ids, *logprobs = (np.concatenate(x) for x in zip(*row.chunks))
        stopped = bool(chunk.stopped_A[place])
        ended[number] = rows.Written(ids, *logprobs, stopped)
    return ended
