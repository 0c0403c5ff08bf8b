"""Lets the collections of several steps share the slots of one engine.

With turns of several policies, a step need not wait until all dialogues of the
step before have ended. Its dialogues begin in the slots that become free. Each
step is collected by a thread of its own, and each thread uses the engine as if
it had an engine of its own.

The versions of the turns of each step are recorded. A run that repeats the
recorded versions has the same turns bit for bit: a turn waits for its recorded
version, and new weights wait until all turns of older versions have ended.

Only one of these threads runs at a time, namely the thread that has the baton.
At each poll, this thread hands the baton over to the thread that has waited
longest. So between two polls of the engine every thread has the baton once. A
thread that has the baton answers its dialogues whose turns have ended.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import itertools
import threading
import time
from typing import Any, Protocol

import numpy as np

from stppo_jax import types
from stppo_jax.records import turn_versions
from stppo_jax.rollout import collect

# Seconds until a thread polls again if all rows wait for the environment.
_PAUSE = 0.003


class Engine(collect.Engine, Protocol):
  """An engine to which rows can be added; see `sampling.engine.Engine`."""

  def begin(
    self,
    prompts: Sequence[np.ndarray | None],
    keys: Any,
    *,
    group_size: int,
    max_turn_tokens: int,
    greedy: bool,
    due: Sequence[Sequence[int]] | None = None,
  ) -> None: ...
  def add(
    self,
    prompts: Sequence[np.ndarray | None],
    keys: Any,
    due: Sequence[Sequence[int]] | None,
  ) -> int: ...
  def poll(self) -> Mapping[int, types.GeneratedTurn]: ...


@dataclasses.dataclass
class _Share(threading.local):
  """Holds what a thread collects; each thread sees attributes of its own.

  Attributes:
    step: the step that the thread collects.
    versions: the versions of the turns that ended, by collection, row and turn.
    due: the recorded versions of the step in the same form, if a run is
      repeated. In collections that were not recorded, turns take the newest
      weights.
    first: the number by which the engine knows the first row of the current
      collection.
    ended: maps the engine's number of a row to the turn of the row that has
      ended, until the thread takes the turn.
  """

  step: int = 0
  versions: list[list[list[int]]] = dataclasses.field(default_factory=list)
  due: turn_versions.Versions = ()
  first: int = 0
  ended: dict[int, types.GeneratedTurn] = dataclasses.field(
    default_factory=dict
  )


class _Baton:
  """A lock that threads get in the order in which they ask for it."""

  def __init__(self):
    self._changed = threading.Condition()
    self._tickets, self._serving = itertools.count(), 0

  def queue(self) -> int:
    """Returns a ticket for `take`, without waiting."""
    return next(self._tickets)

  def take(self, ticket: int) -> None:
    """Waits until the lock is given to a ticket."""
    with self._changed:
      self._changed.wait_for(lambda: self._serving == ticket)

  def hand_over(self) -> None:
    """Gives the lock to the next ticket."""
    with self._changed:
      self._serving += 1
      self._changed.notify_all()


class SharedEngine:
  """Lets several threads use one engine, see `collect.Engine`.

  Args:
    engine: the engine; no other code uses it while a thread collects.
    recorded: the record to which the versions of the turns are written.
    repeated: the record of the run that this run repeats; None if it repeats
      none.

  Attributes:
    max_length: the most tokens of a row.
    repeats: whether this run repeats another run.
    busy: always true, so that a thread polls even if all its rows wait: it must
      hand the baton over to other threads.
  """

  busy = True

  def __init__(
    self,
    engine: Engine,
    recorded: turn_versions.TurnVersions,
    repeated: turn_versions.TurnVersions | None = None,
  ):
    self.max_length = engine.max_length
    self._engine = engine
    self._recorded, self._repeated = recorded, repeated
    self.repeats = repeated is not None
    # The number of turns that ended, by step and version.
    self._counts: collections.Counter[tuple[int, int]] = collections.Counter()
    self._baton = _Baton()
    self._share = _Share()
    # For each open row, by its number, the dict in which its thread looks for
    # turns that have ended; None if the thread no longer collects.
    self._ended: dict[int, dict[int, types.GeneratedTurn] | None] = {}
    # The numbers of the open rows that are between two turns.
    self._waiting: set[int] = set()
    # The steps whose collection has begun.
    self._entered: set[int] = set()

  @contextlib.contextmanager
  def collecting(self, step: int) -> Iterator[None]:
    """Lets the calling thread collect a step in the body of the context.

    Threads take turns in using the engine, see the module.
    """
    share = self._share
    share.step, share.versions, share.due = step, [], self._due(step)
    ticket = self._baton.queue()
    self._entered.add(step)
    self._baton.take(ticket)
    try:
      yield
      self._recorded.write(step, share.versions)
    finally:
      # After an error, some rows of this thread are still open. Other threads
      # need their slots, so rows between two turns are closed here. The other
      # rows are closed by `poll` once their turns have ended.
      for number, ended in list(self._ended.items()):
        if ended is share.ended:
          self._ended[number] = None
          if number in self._waiting:
            self._close(number)
      self._baton.hand_over()

  def begin(
    self, prompts: Sequence[np.ndarray | None], keys: Any, **options: Any
  ) -> None:
    """Begins a collection of the calling thread; see `collect.Engine`.

    All threads begin their collections with the same options.
    """
    share, size = self._share, options['group_size']
    number = len(share.versions)
    due = share.due[number] if number < len(share.due) else None
    # If other threads have open rows, this collection joins the current
    # collection of the engine. A new one would drop the rows of the other
    # threads.
    if self._ended:
      share.first = self._engine.add(prompts, keys, due)
    else:
      self._engine.begin(prompts, keys, due=due, **options)
      share.first = 0
    share.ended = {}
    share.versions.append([[] for _ in range(len(prompts) * size)])
    for n in range(len(prompts) * size):
      if prompts[n // size] is not None:
        self._ended[share.first + n] = share.ended

  def poll(self) -> Mapping[int, types.GeneratedTurn]:
    """Lets other threads go on, and returns the ended turns of this thread."""
    share = self._share
    # The engine is asked before the baton is handed over, because afterwards
    # other threads may be changing the engine.
    is_idle = not self._engine.busy
    self._baton.hand_over()
    if is_idle:
      time.sleep(_PAUSE)
    self._baton.take(self._baton.queue())
    if not share.ended and self._engine.busy:
      for number, turn in self._engine.poll().items():
        self._waiting.add(number)
        ended = self._ended[number]
        if ended is None:
          self._close(number)
        else:
          ended[number] = turn
    ended = {number - share.first: x for number, x in share.ended.items()}
    share.ended.clear()
    for row, turn in ended.items():
      share.versions[-1][row].append(turn.version)
      self._counts[share.step, turn.version] += 1
    return ended

  def has_entered(self, step: int) -> bool:
    """Returns whether a thread collects a step, or has collected it.

    Threads get slots for their dialogues in the order in which they enter the
    context of `collecting`.
    """
    return step in self._entered

  def may_publish(self, version: int, steps: Iterable[int]) -> bool:
    """Returns whether turns may begin with new weights.

    If this run repeats another run, all turns that were recorded with older
    versions must have ended first.

    Args:
      version: the version of the new weights.
      steps: the steps that are being collected.
    """
    for step in steps:
      turns = itertools.chain(*itertools.chain(*self._due(step)))
      older = collections.Counter(x for x in turns if x < version)
      if any(self._counts[step, x] < count for x, count in older.items()):
        return False
    return True

  def remaining(self, row: int) -> int:
    """Returns how many tokens still fit into a row."""
    return self._engine.remaining(self._share.first + row)

  def resume(self, row: int, token_ids: np.ndarray) -> None:
    """Appends an observation to a row, and begins the row's next turn."""
    self._waiting.remove(self._share.first + row)
    self._engine.resume(self._share.first + row, token_ids)

  def close(self, row: int) -> np.ndarray | None:
    """Ends a row; see `close` of `sampling.engine.Engine`."""
    return self._close(self._share.first + row)

  def statistics(self) -> Mapping[str, float]:
    """Returns the counts of the engine since the last call."""
    return self._engine.statistics()

  def finish(self) -> None:
    """Does nothing, because no other host takes part."""

  def _due(self, step: int) -> turn_versions.Versions:
    return (self._repeated and self._repeated.read(step)) or ()

  def _close(self, number: int) -> np.ndarray | None:
    del self._ended[number]
    self._waiting.remove(number)
    return self._engine.close(number)
