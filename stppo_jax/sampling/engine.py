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
import concurrent.futures

import jax
import numpy as np

from stppo_jax.models import functional
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import lane as lane_lib
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slot_driver as slot_driver_lib
from stppo_jax.sampling import stops
from stppo_jax.sampling import turns


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
    lanes: parts that the slots are cut into, see `lane`; more than one on a
      single device only.
    batch_rows: most rows that a program works on; 0 = all of a lane. Not where
      `deterministic`.
    return_expert_ids: `close` tells where the row's tokens went.

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
    lanes: int,
    batch_rows: int,
    return_expert_ids: bool = False,
  ):
    if slots % lanes:
      raise ValueError(f'slots={slots} is no multiple of lanes={lanes}')
    if lanes > 1 and mesh.size > 1:  # their collectives could wait crosswise
      raise ValueError(f'lanes={lanes}: must be 1 on {mesh.size} devices')
    self.slots = slots
    self.max_length = max_length
    self.version = 0
    self._refills = not deterministic
    self._programs = compiled_programs.CompiledPrograms(
      model,
      mesh=mesh,
      automaton=automaton,
      max_length=max_length,
      cache_blocks=cache_blocks,
      sampling=sampling,
      decode_chunk=decode_chunk,
      return_expert_ids=return_expert_ids,
    )
    self._lanes = [
      lane_lib.Lane(
        slot_driver_lib.SlotDriver(
          self._programs,
          slots=slots // lanes,
          extend_chunk=extend_chunk,
          batch_rows=batch_rows or slots,
          compacts=not deterministic,
        ),
        decode_chunk=decode_chunk,
        early_exit=1.0 if deterministic else early_exit,
        lookahead=lookahead,
        max_length=max_length,
        threaded=lanes > 1,
      )
      for _ in range(lanes)
    ]
    self._rows: dict[int, lane_lib.Row] = {}
    self._queue: collections.deque[lane_lib.Row] = collections.deque()

  def publish(self, params: functional.Params, version: int) -> None:
    """Takes a copy of the policy's weights; they serve until the next one.

    Args:
      params: in whatever layout.
      version: number of the step that made them.
    """
    self._programs.publish(params)
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
        that are not played. A prompt is computed once for its group, or, where
        slots are refilled, once in each lane that rows of the group come to.
      keys: one typed key per row; token t of a row is drawn with
        fold_in(key, t), t its position in the row.
      group_size: rows of a prompt; divides the slots.
      max_turn_tokens: longest turn.
      greedy: take the likeliest token instead of drawing.

    Raises:
      ValueError: a group size that does not divide the slots, a prompt that is
        empty or leaves no room to write, or too few keys.
      Exception: what a lane's thread raised since the last one began, also
        where a poll has told it.
    """
    if self.slots // len(self._lanes) % group_size:
      of_lanes = f' in {len(self._lanes)} lanes' if len(self._lanes) > 1 else ''
      raise ValueError(
        f'{self.slots} slots{of_lanes} are no multiple of '
        f'group_size={group_size}'
      )
    turns.check_prompts(
      prompts, keys, group_size=group_size, max_length=self.max_length
    )
    for lane in self._lanes:
      lane.begin(max_turn_tokens=max_turn_tokens, greedy=greedy)
    self._group_size = group_size
    self._rows = {}
    key_data = np.asarray(jax.random.key_data(keys))
    for group, prompt in enumerate(prompts):
      for n in range(group * group_size, (group + 1) * group_size):
        if prompt is not None:
          self._rows[n] = lane_lib.Row(n, prompt, group, key_data[n])
    self._queue = collections.deque(self._rows.values())

  def remaining(self, row: int) -> int:
    """Tokens that still fit into a row."""
    return self.max_length - self._rows[row].length

  def resume(self, row: int, token_ids: np.ndarray) -> None:
    """Appends an observation to a row, whose next turn begins.

    Raises:
      ValueError: it leaves no room to write, or no turn of the row has ended.
    """
    lane = self._resting(row)
    turns.check_observation(
      token_ids, remaining=self.remaining(row), max_length=self.max_length
    )
    lane.tell(self._rows[row], token_ids)

  def close(self, row: int) -> np.ndarray | None:
    """Ends a row; its slot is free. See `SlotDriver.expert_ids`.

    Raises:
      ValueError: no turn of the row has ended.
    """
    return self._resting(row).close(self._rows.pop(row))

  def statistics(self) -> dict[str, float]:
    """Nothing: no turn can fail here; see `RemoteEngine.statistics`."""
    return {}

  def _resting(self, number: int) -> lane_lib.Lane:
    row = self._rows[number]
    if row.lane is None or not row.lane.rests(row):
      raise ValueError(f'row {number} is not between two turns')
    return row.lane

  @property
  def busy(self) -> bool:
    """Whether a poll can end a turn, with no row resumed or closed before."""
    if any(lane.busy for lane in self._lanes):
      return True
    return bool(self._queue) and self._may_admit()

  def poll(self) -> dict[int, turns.GeneratedTurn]:
    """Goes on for a while; the turns that ended, by row."""
    if self._queue and self._may_admit():
      self._admit()
    ended, landing = {}, {}
    for lane in self._lanes:
      if future := lane.go_on(queued=bool(self._queue)):
        landing[future] = lane
    done, _ = concurrent.futures.wait(
      landing, return_when=concurrent.futures.FIRST_COMPLETED
    )
    for future, lane in landing.items():
      if future in done:
        ended |= lane.land()
    return ended

  def _may_admit(self) -> bool:
    """Whether there are slots for rows of the queue."""
    counts = [len(lane.free) for lane in self._lanes]
    return any(counts) if self._refills else sum(counts) == self.slots

  def _admit(self) -> None:
    """Gives free slots to the rows that come next."""
    if not self._refills:
      self._open_wave()
      return
    while self._queue and (free := [x for x in self._lanes if x.free]):
      row = self._queue.popleft()
      # To where its prompt is, else to where most of its group find a slot.
      lane = max(free, key=lambda x: (x.knows(row.group), len(x.free)))
      lane.admit(row)

  def _open_wave(self) -> None:
    """Fills all slots; groups go to the lanes in turn."""
    first = self._queue[0].group
    rows_of = [[] for _ in self._lanes]
    while self._queue:
      group = self._queue[0].group - first
      if group >= self.slots // self._group_size:
        break
      rows_of[group % len(self._lanes)].append(self._queue.popleft())
    for lane, some in zip(self._lanes, rows_of):
      if some:
        lane.open(some, self._group_size)
