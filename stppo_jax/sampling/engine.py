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
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slots as slots_lib
from stppo_jax.sampling import stops

_HALVINGS = 4  # of the number of slots: sizes of the batches at work
_COMPANY = 0.25  # rows to be told something, for each that writes


@dataclasses.dataclass(frozen=True)
class Written:
  """One row's turn.

  Attributes:
    token_ids: [N] int32; at least one wherever one fits.
    logprobs: [N] float32, under softmax(logits / temperature).
    drawn_logprobs: [N] float32, under the truncated distribution.
    stopped: False where a length limit ended the turn.
  """

  token_ids: np.ndarray
  logprobs: np.ndarray
  drawn_logprobs: np.ndarray
  stopped: bool


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


class _Flight:
  """A chunk that is being written: which row and turn each place holds."""

  def __init__(self, places: Sequence[tuple[int, int]], chunk: slots_lib.Chunk):
    self.places = places
    self.chunk = chunk


class Engine:
  """Slots that generate; weights come from `publish`, keys from the caller.

  Args:
    model: the policy.
    mesh: local devices; slots are cut over its batch axes.
    automaton: where turns end, over the ids of the tokenizer.
    slots: rows decoded together; divisible by the mesh's batch axes.
    max_length: tokens a row can hold.
    sampling: temperature and truncation.
    extend_chunk: tokens appended per call of `extend`.
    decode_chunk: most tokens written per call of `decode`.
    lookahead: chunks that are started before the last one is looked at.
    deterministic: see the module.

  Attributes:
    version: what `publish` was told last.
  """

  def __init__(
    self,
    model: functional.Model,
    *,
    mesh: jax.sharding.Mesh,
    automaton: stops.StopAutomaton,
    slots: int,
    max_length: int,
    sampling: sampler.Sampling,
    extend_chunk: int,
    decode_chunk: int,
    lookahead: int,
    deterministic: bool,
  ):
    self.slots = slots
    self.max_length = max_length
    self.version = 0
    self._model = model
    self._extend_chunk = extend_chunk
    self._lookahead = lookahead
    self._refills = not deterministic
    self._shards = math.prod(mesh.shape[axis] for axis in mesh_lib.BATCH_AXES)
    # Taking single rows out of cut ones would move caches between devices.
    self._compacts = not deterministic and self._shards == 1
    self._by_row = sharding.batch_sharding(mesh)
    whole = sharding.replicated(mesh)
    self._table_SV = jax.device_put(
      automaton.table(model.config.vocab_size), whole
    )
    self._publish = jax.jit(
      lambda params: jax.tree.map(jnp.copy, params), out_shardings=whole
    )
    self._empty = jax.jit(
      functools.partial(slots_lib.empty, model),
      static_argnums=(0, 1),
      out_shardings=self._by_row,
    )
    self._extend = jax.jit(
      functools.partial(slots_lib.extend, model=model), donate_argnums=1
    )
    self._copy = jax.jit(slots_lib.copy, donate_argnums=0)
    self._repeat = jax.jit(
      slots_lib.repeat, static_argnums=(1, 2), out_shardings=self._by_row
    )
    self._decode = jax.jit(
      functools.partial(
        slots_lib.decode,
        model=model,
        stopped=automaton.stopped,
        sampling=sampling,
        num_tokens=decode_chunk,
      ),
      donate_argnums=1,
    )
    self._params = None
    self._state = None
    self._forget()

  def publish(self, params: functional.Params, version: int) -> None:
    """Takes a copy of the policy's weights; they serve until the next one.

    Args:
      params: in whatever layout.
      version: number of the step that made them.
    """
    self._params = self._publish(params)
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
      ValueError: a group size that does not divide the slots, or a prompt that
        leaves no room to write.
    """
    if self.slots % group_size:
      raise ValueError(
        f'{self.slots} slots are no multiple of group_size={group_size}'
      )
    for prompt in prompts:
      if prompt is not None and len(prompt) >= self.max_length:
        raise ValueError(
          f'a prompt of {len(prompt)} tokens leaves no room to write in '
          f'max_length={self.max_length}'
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
    # What was computed last in each slot; it stays there until overwritten.
    self._group_at: list[int | None] = [None] * self.slots
    self._told: dict[int, np.ndarray] = {}
    self._flights: collections.deque[_Flight] = collections.deque()

  def remaining(self, row: int) -> int:
    """Tokens that still fit into a row."""
    return self.max_length - self._rows[row].length

  def resume(self, row: int, token_ids: np.ndarray) -> None:
    """Appends an observation to a row, whose next turn begins.

    Raises:
      ValueError: it leaves no room to write.
    """
    if len(token_ids) >= self.remaining(row):
      raise ValueError(
        f'{len(token_ids)} tokens leave no room to write in the '
        f'{self.remaining(row)} left of max_length={self.max_length}'
      )
    self._told[row] = token_ids

  def close(self, row: int) -> None:
    """Ends a row; its slot is free."""
    self._row_at[self._rows.pop(row).slot] = None

  @property
  def busy(self) -> bool:
    """Whether a poll can end a turn, with no row resumed or closed before."""
    writing = any(row.writing for row in self._rows.values())
    return bool(writing or self._told or (self._queue and self._free()))

  def poll(self) -> dict[int, Written]:
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
    if not self._queue or not free:
      return
    if len(free) == self.slots:
      self._open_wave()
      return
    copied: dict[int, int] = {}
    while self._queue and free:
      number, slot = self._queue.popleft(), free.pop(0)
      row = self._place(number, slot)
      # A prompt that is being appended now cannot be copied yet.
      source = self._source(row.group)
      if source is None:
        row.length = 0
        self._told[number] = row.prompt
        self._group_at[slot] = None
      else:
        copied[number] = source
        self._group_at[slot] = row.group
    if copied:
      self._copy_prompts(copied)

  def _place(self, number: int, slot: int) -> _Row:
    row = self._rows[number]
    row.slot, self._row_at[slot] = slot, number
    return row

  def _source(self, group: int) -> int | None:
    """A slot that holds the prompt of a group."""
    holders = (n for n, held in enumerate(self._group_at) if held == group)
    return next(holders, None)

  def _open_wave(self) -> None:
    """Fills empty slots: the prompts in a state of their own, then copies."""
    size = self._group_size
    wave = [self._queue.popleft() for _ in range(self._wave_size())]
    first = self._rows[wave[0]].group
    for number in wave:
      row = self._rows[number]
      self._place(number, (row.group - first) * size + number % size)
      self._group_at[row.slot] = row.group
      self._start_turn(row, len(row.prompt))
    # Slots may be more than groups: those that pad them stay empty.
    places = -(-(self.slots // size) // self._shards) * self._shards
    leaders = {self._rows[n].group - first: self._rows[n] for n in wave}
    self._state = None  # its memory is needed
    state = self._append_to(
      self._empty(places, self.max_length),
      {place: (row.prompt, row, True) for place, row in leaders.items()},
      num_slots=places,
    )
    if size > 1:
      state = self._repeat(state, self.slots // size, size)
    self._state = state

  def _wave_size(self) -> int:
    """Rows at the head of the queue whose groups lie within one wave."""
    groups = self.slots // self._group_size
    first = self._rows[self._queue[0]].group
    return sum(self._rows[n].group < first + groups for n in self._queue)

  def _copy_prompts(self, sources: dict[int, int]) -> None:
    rows = [self._rows[number] for number in sources]
    for row in rows:
      self._start_turn(row, len(row.prompt))
    A = self.slots  # one shape: this is rare, and rows that are none are cheap
    pad = lambda values, fill: np.pad(
      np.asarray(values, np.int32), (0, A - len(rows)), constant_values=fill
    )
    self._state = self._copy(
      self._state,
      pad(list(sources.values()), 0),
      pad([row.slot for row in rows], self.slots),
      pad([row.length for row in rows], 0),
      pad([self._budget(row) for row in rows], 0),
    )

  def _start_turn(self, row: _Row, new_tokens: int) -> None:
    row.length += new_tokens
    row.turn += 1
    row.writing = self._budget(row) > 0
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
    company = _COMPANY if self._compacts else 1
    return len(self._told) > 0 and len(self._told) >= writing * company

  def _append(self) -> None:
    """Tells rows what they are to be told, and opens their turns."""
    told, self._told = self._told, {}
    by_slot = {}
    for number, token_ids in told.items():
      row = self._rows[number]
      starts = row.length == 0
      self._start_turn(row, len(token_ids))
      by_slot[row.slot] = (token_ids, row, starts)
      if starts:
        self._group_at[row.slot] = row.group
    self._state = self._append_to(self._state, by_slot, num_slots=self.slots)

  def _append_to(
    self,
    state: slots_lib.SlotState,
    by_slot: dict[int, tuple[np.ndarray, _Row, bool]],
    *,
    num_slots: int,
  ) -> slots_lib.SlotState:
    """A state (donated) with (tokens, row, starts anew) appended to slots."""
    C = self._extend_chunk
    longest = max(len(token_ids) for token_ids, _, _ in by_slot.values())
    for first in range(0, max(longest, 1), C):
      now = {s: x for s, x in by_slot.items() if len(x[0]) > first or not first}
      rows, A = self._at_work(list(now), num_slots)
      places = list(now) if rows is None else range(len(now))
      told = slots_lib.Appended(
        tokens_AC=np.zeros((A, C), np.int32),
        counts_A=np.zeros(A, np.int32),
        starts_A=np.zeros(A, bool),
        prompts_A=np.zeros(A, bool),
        budgets_A=np.full(A, -1, np.int32),
      )
      for place, (token_ids, row, starts) in zip(places, now.values()):
        part = token_ids[first : first + C]
        last = first + C >= len(token_ids)
        told.tokens_AC[place, : len(part)] = part
        told.counts_A[place] = len(part)
        told.starts_A[place] = starts and first == 0
        told.prompts_A[place] = starts and last
        told.budgets_A[place] = self._budget(row) if last else -1
      state = self._extend(self._params, state, *self._send(rows, told))
    return state

  def _at_work(
    self, slots: Sequence[int], num_slots: int
  ) -> tuple[np.ndarray | None, int]:
    """The rows a program runs on (None: all slots) and how many places."""
    if not self._compacts or num_slots != self.slots:
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

  def _start_chunk(self) -> bool:
    """Lets the policy write where it is its turn; False if it is nowhere."""
    writing = [
      (row.slot, number) for number, row in self._rows.items() if row.writing
    ]
    if not writing:
      return False
    writing.sort()
    slots = [slot for slot, _ in writing]
    rows, A = self._at_work(slots, self.slots)
    places: list[tuple[int, int] | None] = [None] * A
    key_data_A2 = np.zeros((A, 2), np.uint32)
    for n, (slot, number) in enumerate(writing):
      place = slot if rows is None else n
      row = self._rows[number]
      places[place] = number, row.turn
      key_data_A2[place] = row.key_data
    self._state, chunk = self._decode(
      self._params,
      self._state,
      *self._send(rows, key_data_A2),
      self._table_SV,
      self._greedy,
    )
    self._flights.append(_Flight(places, chunk))
    return True

  def _land(self) -> dict[int, Written]:
    """Looks at the oldest chunk; the turns that ended with it."""
    flight = self._flights.popleft()
    chunk = jax.device_get(flight.chunk)
    ended = {}
    for place, held in enumerate(flight.places):
      number, turn = held or (None, 0)
      row = self._rows.get(number)
      # The row may have ended its turn in an earlier chunk, and begun another.
      if row is None or row.turn != turn or not row.writing:
        continue
      count = chunk.counts_A[place]
      row.length += int(count)
      row.chunks.append(
        tuple(
          x_AN[place, :count]
          for x_AN in (
            chunk.tokens_AN,
            chunk.logprobs_AN,
            chunk.drawn_logprobs_AN,
          )
        )
      )
      if chunk.ended_A[place]:
        row.writing = False
        ids, *logprobs = (np.concatenate(x) for x in zip(*row.chunks))
        ended[number] = Written(ids, *logprobs, bool(chunk.stopped_A[place]))
    return ended
