"""Decodes many dialogues at once, each at its own pace.

R rows share S slots; a row is one dialogue. The caller begins a collection,
then polls. A poll appends observations, lets the policy decode a chunk of
tokens, and returns the turns that ended. For each of these turns, the caller
resumes the row with an observation, or closes the row, at any later time. The
other rows decode meanwhile.

With `deterministic=True` every program runs on all slots, and slots are filled
in waves: new rows are admitted when the last row of a wave is closed. The
shapes of programs then never depend on timing, so the tokens and
log-probabilities of a row do not depend on when observations arrive, not even
in one bit.

With `deterministic=False` a slot is refilled from the queue as soon as its row
is closed, and programs run on the active rows only, in batches of a few fixed
sizes. The tokens are the same as with `deterministic=True`, and the
log-probabilities are equal up to rounding.

Weights change between turns only. A turn takes the newest weights when it
begins and keeps them to its end, so one policy writes the whole turn. The
result of a turn contains the version of its weights. While turns of two
versions are being written, each call decodes the turns of one version only.
Turns of two versions can occur only with the option `turn_swaps` at 'keep' or
'recompute'. A slot is then refilled as soon as its row is closed, even with
`deterministic=True`, and timing can change the versions of a row's turns. With
`deterministic=True`, timing changes the bits of the row in no other way.
"""

import collections
from collections.abc import Callable, Sequence
import concurrent.futures

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.models import functional
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import lane as lane_lib
from stppo_jax.sampling import rows as rows_lib
from stppo_jax.sampling import slot_driver
from stppo_jax.sampling import stops


class Engine:
  """Generates turns with a policy on devices of this process.

  Args:
    model: the policy.
    placement: the devices that decode, with their mesh. Weights are sharded
      along the mesh axis `tensor`, and slots along the other axes.
    automaton: the stop automaton over the tokenizer's ids.
    options: the options of the engine.
    make_driver: makes the slot driver of each lane.

  Attributes:
    slots: the number of rows that are decoded together.
    max_length: the most tokens of a row.
  """

  def __init__(
    self,
    model: functional.Model,
    *,
    placement: publish_lib.Placement,
    automaton: stops.StopAutomaton,
    options: engine_options.EngineOptions,
    make_driver: Callable[..., slot_driver.SlotDriver] = slot_driver.SlotDriver,
  ):
    self.slots = options.slots
    self.max_length = options.max_length
    self._options = options
    self._programs = compiled_programs.CompiledPrograms(
      model, placement=placement, automaton=automaton, options=options
    )
    drivers = [
      make_driver(self._programs, options) for _ in range(options.lanes)
    ]
    self._driver = drivers[0]  # an engine that spans hosts has only one driver
    self._lanes = [
      lane_lib.Lane(driver, options, self._turn_weights) for driver in drivers
    ]
    self._rows: dict[int, rows_lib.Row] = {}
    self._queue: collections.deque[rows_lib.Row] = collections.deque()

  def publish(
    self,
    params: functional.Params,
    version: int,
    *,
    base: functional.Params | None = None,
  ) -> None:
    """Copies the weights with which turns begin from now on.

    The weights must be copied: the learner donates its weights to the next
    update, and the engine may still decode then.

    Args:
      params: the trained weights, on the devices of training.
      version: the number of training steps that made the weights.
      base: the frozen weights, if the trained weights are adapters. They are
        copied in the first call, and in each later call with another `base`.
    """
    self._programs.publish(params, version, base=base)

  def transferred(
    self, params: functional.Params, *, base: functional.Params | None = None
  ) -> functional.Params:
    """Returns a copy of weights for `swap_weights`, see `publish`.

    The engine may decode meanwhile. Its devices then hold both the old and the
    new weights.
    """
    return self._programs.transferred(params, base=base)

  def swap_weights(self, weights: functional.Params, version: int) -> None:
    """Publishes weights that `transferred` has returned.

    Any thread may call this method at any time. A turn that has begun keeps its
    old weights to its end.
    """
    self._programs.weights = compiled_programs.Weights(version, weights)

  def release(self) -> None:
    """Drops the weights, the keys and values, and the rows of a collection.

    The memory stays free until the next `publish`. But if the trained weights
    are adapters, the frozen weights stay on the devices.

    Raises:
      Exception: the error that a lane's thread has raised, see `begin`.
    """
    self._queue.clear()
    self._programs.weights = None
    for lane in self._lanes:
      lane.release()

  def begin(
    self,
    prompts: Sequence[np.ndarray | None],
    keys: jax.Array,
    *,
    group_size: int,
    max_turn_tokens: int,
    greedy: bool,
    due: Sequence[Sequence[int]] | None = None,
  ) -> None:
    """Begins a collection, and drops all rows of the previous collection.

    Args:
      prompts: token ids, one array for each group of adjacent rows; None for a
        group that is left out. A prompt is computed only if no row on the
        device holds it already.
      keys: one typed key for each row; the token at position t of a row is
        sampled with fold_in(key, t).
      group_size: the number of rows that share a prompt; it must divide the
        slots of a lane.
      max_turn_tokens: the most tokens of a turn.
      greedy: whether to take the most probable token instead of sampling.
      due: for each row, one version for each of its turns, in order. A turn
        begins once the weights have this or a later version. If None, no turn
        waits for weights.

    Raises:
      ValueError: if `group_size` does not divide the slots of a lane. A lane
        decodes the rows of a group together.
      Exception: the error that a lane's thread has raised since the previous
        collection began, even if a poll has raised the same error already.
    """
    slots = self._options.slots_per_lane
    if slots % group_size:
      raise ValueError(f'{group_size} must divide the {slots} slots of a lane')
    for lane in self._lanes:
      lane.begin(max_turn_tokens=max_turn_tokens, greedy=greedy)
    self._group_size, self._next = group_size, 0
    self._rows = {}
    self._queue.clear()
    self.add(prompts, keys, due)

  def add(
    self,
    prompts: Sequence[np.ndarray | None],
    keys: jax.Array,
    due: Sequence[Sequence[int]] | None = None,
  ) -> int:
    """Adds rows to the current collection, and returns the first row's number.

    Args:
      prompts, keys, due: see `begin`.
    """
    first = self._next
    # The keys stay on the host, which sends them to the devices with each call
    # of `decode`.
    key_data = np.asarray(jax.random.key_data(keys))
    self._next += len(key_data)
    for number in range(first, self._next):
      group = number // self._group_size
      prompt = prompts[group - first // self._group_size]
      if prompt is not None:
        row = rows_lib.Row(number, prompt, group, key_data[number - first])
        row.due = due[number - first] if due else ()
        self._rows[number] = row
        self._queue.append(row)
    return first

  def remaining(self, row: int) -> int:
    """Returns how many tokens still fit into a row."""
    return self.max_length - self._rows[row].length

  def resume(self, row: int, token_ids: np.ndarray) -> None:
    """Appends an observation to a row, and begins the row's next turn.

    Args:
      row: a row whose turn has ended.
      token_ids: [L] int32, the observation; L must be less than `remaining`.
    """
    self._rows[row].lane.append_observation(self._rows[row], token_ids)

  def close(self, row: int) -> np.ndarray | None:
    """Ends a row whose turn has ended, and frees its slot.

    Returns:
      The experts to which each token was routed, see `SlotDriver.expert_ids`.
      The result is None if the option `return_expert_ids` is off.
    """
    closed = self._rows.pop(row)
    return closed.lane.close(closed)

  def statistics(self) -> dict[str, float]:
    """Returns no metrics, because no turn can fail here."""
    return {}

  @property
  def busy(self) -> bool:
    """Whether the caller should poll before it resumes or closes a row.

    The caller should do so if the poll can end a turn, or if other hosts may
    wait for this host to poll.
    """
    joins = self._driver.joins and bool(self._rows)
    if joins or any(lane.busy for lane in self._lanes):
      return True
    return bool(self._queue) and self._can_admit()

  def poll(self) -> dict[int, types.GeneratedTurn]:
    """Decodes until a chunk is done; returns the turns that ended, by row."""
    if self._queue and self._can_admit():
      self._admit()
    ended, lanes = {}, {}
    # Calls are started in all lanes before this thread waits for any result.
    # The wait ends with the first lane that is done, so that the rows of this
    # lane do not wait for other lanes.
    for lane in self._lanes:
      if future := lane.schedule(queued=bool(self._queue)):
        lanes[future] = lane
    if not lanes and self._rows:
      # All rows of this host wait for observations, but other hosts may need
      # this host in their programs.
      self._driver.join(done=False)
    done, _ = concurrent.futures.wait(
      lanes, return_when=concurrent.futures.FIRST_COMPLETED
    )
    # The result lists lanes in a fixed order, whichever lane is done first.
    for future, lane in lanes.items():
      if future in done:
        ended |= lane.collect_done()
    return ended

  def finish(self) -> None:
    """Takes part in the programs of other hosts until all hosts are done.

    All hosts call this method after one or several collections of their own.
    """
    while not self._driver.join(done=True):
      pass

  def _can_admit(self) -> bool:
    """Returns whether rows of the queue can get slots now."""
    counts = [len(lane.free) for lane in self._lanes]
    # If a slot were refilled while other slots decode, shapes and rounding
    # would depend on when observations arrive.
    if self._options.waves:
      return sum(counts) == self.slots
    return any(counts) and bool(self._due())

  def _admit(self) -> None:
    """Gives free slots to the rows at the head of the queue."""
    if self._options.waves:
      self._start_wave()
      return
    for row in self._due():
      if not (free := [x for x in self._lanes if x.free]):
        break
      self._queue.remove(row)
      # A lane that holds the group's prompt is preferred, then the lane with
      # the most free slots for the rest of the group.
      lane = max(free, key=lambda x: (x.has_group(row.group), len(x.free)))
      lane.admit(row)

  def _turn_weights(self) -> compiled_programs.Weights:
    """Returns the weights of turns that begin now.

    These are the newest weights. But if turns of two older versions are still
    being written, new turns take the newer of these two versions. The reason is
    that each version in use needs a call of its own, which reads all weights.
    """
    newest = self._programs.weights
    assert newest is not None
    in_use = {
      row.weights.version: row.weights
      for row in self._rows.values()
      if row.weights is not None
    }
    if len(in_use) < 2 or newest.version in in_use:
      return newest
    return in_use[max(in_use)]

  def _due(self) -> list[rows_lib.Row]:
    """Returns the rows of the queue whose first turn may begin."""
    weights = self._turn_weights()
    return [row for row in self._queue if row.is_due(weights)]

  def _start_wave(self) -> None:
    """Fills the slots from the queue.

    The lanes get groups in turn: the first group goes to the first lane, the
    next group to the next lane, and so on. A group that `begin` leaves out
    takes its turn too, so some slots stay free.
    """
    first = self._queue[0].group
    while self._queue:
      group = self._queue[0].group - first
      if group >= self.slots // self._group_size:
        break
      self._lanes[group % len(self._lanes)].admit(self._queue.popleft())
