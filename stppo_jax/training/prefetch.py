"""Collecting ahead: the dialogues of further steps while this one is learned.

Step n is played by the policy after max(0, n - k) steps, k = `steps_ahead`:

    collected   0  1     2     3            k = 1: step 1 is played by the
    updated        0     1     2            start, step 2 by the policy
    policy      0  0     1     2            after step 0, ...

So far behind is what is trained on, never more and never less, whatever takes
long. What a collection yields is a function of (config, step, policy): it is
the same in the background as between two updates, and one that is thrown away
is played again by whoever still has its policy.
"""

from collections.abc import Callable
from collections.abc import Coroutine
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import threading
import time
from typing import Any

from stppo_jax import types
from stppo_jax.models import functional
from stppo_jax.rollout import event_loop

Future = concurrent.futures.Future
Played = tuple[list[types.Trajectory], dict[str, float]]


class Abandoned(Exception):
  """Nobody wants the rest of a collection; seen by its own thread only."""


@dataclasses.dataclass(frozen=True)
class Collected:
  """A step's collection.

  Attributes:
    trajectories: to train on, groups adjacent.
    metrics: of the collection.
    seconds: that it took, whoever waited for it.
  """

  trajectories: list[types.Trajectory]
  metrics: dict[str, float]
  seconds: float


class StoppableLoop:
  """An event loop that can be told to serve nobody any more.

  A collection shows it every chunk of tokens and waits for nothing else, so
  that stopping it ends a collection on another thread.
  """

  def __init__(self, loop: event_loop.EventLoop):
    self._loop = loop
    self._lock = threading.Lock()
    self._stopped = False
    self._waiting: set[Future] = set()

  def submit(self, coroutines: Sequence[Coroutine]) -> list[Future]:
    """See `EventLoop.submit`. Raises `Abandoned` once stopped."""
    with self._lock:
      if self._stopped:
        for coroutine in coroutines:
          coroutine.close()
        raise Abandoned
      futures = self._loop.submit(coroutines)
      self._waiting = {f for f in self._waiting if not f.done()} | {*futures}
    return futures

  def run(self, coroutine: Coroutine) -> Any:
    """See `EventLoop.run`. Raises `Abandoned` once stopped."""
    (future,) = self.submit([coroutine])
    return future.result()

  def stop(self) -> None:
    """Cancels what is waited for, and refuses the rest."""
    with self._lock:
      self._stopped = True
      for future in self._waiting:
        future.cancel()


class Prefetcher:
  """Plays every step with the policy of `steps_ahead` steps before.

  Args:
    play: collects a step with what was published, see `StepCollector.collect`.
    publish: gives weights and their version to the engine that plays.
    steps_ahead: k above.
    num_steps: of the run; no further step is played.
    loop: what `play` waits on, which makes it play on another thread; None:
      a step is played when it is taken. Programs of two threads must not meet
      on several devices: their collectives could wait for each other.
  """

  def __init__(
    self,
    play: Callable[[int], Played],
    publish: Callable[[functional.Params, int], None],
    *,
    steps_ahead: int,
    num_steps: int,
    loop: StoppableLoop | None,
  ):
    self._play = play
    self._publish = publish
    self._steps_ahead = steps_ahead
    self._num_steps = num_steps
    self._loop = loop
    self._thread = None
    if loop is not None:
      # One thread: weights change between two collections only.
      self._thread = concurrent.futures.ThreadPoolExecutor(1, 'collect-ahead')
    self._policies: dict[int, functional.Params] = {}
    self._under_way: dict[int, Future[Collected]] = {}
    self._broken = threading.Event()

  def restore(
    self, version: int, published: Sequence[functional.Params]
  ) -> None:
    """Goes on after `version` steps with what `published` gave."""
    for behind, params in enumerate(published, start=1):
      self._policies[max(0, version - behind)] = params

  def published(
    self, version: int, params: functional.Params
  ) -> tuple[functional.Params, ...]:
    """The policies that a run needs beside `params` to go on after `version`.

    Those after max(0, version - 1), ..., max(0, version - k) steps.
    """
    policies = self._policies | {version: params}
    return tuple(
      policies[max(0, version - behind)]
      for behind in range(1, self._steps_ahead + 1)
    )

  def schedule(self, version: int, params: functional.Params) -> None:
    """Lets the steps be played that are to be played by this policy.

    Args:
      version: steps done when it was made; one more than at the last call.
      params: kept until `steps_ahead` further ones were offered; for as long,
        nobody may donate them.
    """
    oldest = max(0, version - self._steps_ahead)
    kept = {v: p for v, p in self._policies.items() if v >= oldest}
    self._policies = kept | {version: params}
    if self._thread is None:
      return
    last = min(version + self._steps_ahead, self._num_steps - 1)
    for step in range(max(self._under_way, default=version - 1) + 1, last + 1):
      self._under_way[step] = self._thread.submit(
        self._collect, step, self.policy(step)
      )

  def policy(self, step: int) -> functional.Params:
    """The weights that play a step."""
    return self._policies[self._version(step)]

  def result(self, step: int) -> Collected:
    """The collection of the next step; waits for it.

    Raises:
      RetrieverUnreachable, Outage: the retriever failed it for good.
    """
    if self._thread is None:
      return self._collect(step, self.policy(step))
    return self._under_way.pop(step).result()

  def drain(self) -> None:
    """Waits until no collection is under way, be it that they failed."""
    concurrent.futures.wait(self._under_way.values())

  def close(self) -> None:
    """Throws away what is under way; returns when its thread has ended."""
    if self._thread is not None:
      self._broken.set()
      self._loop.stop()
      self._thread.shutdown(cancel_futures=True)

  def _version(self, step: int) -> int:
    return max(0, step - self._steps_ahead)

  def _collect(self, step: int, params: functional.Params) -> Collected:
    if self._broken.is_set():
      raise Abandoned
    started = time.monotonic()
    try:
      self._publish(params, self._version(step))
      trajectories, metrics = self._play(step)
    except BaseException:
      self._broken.set()  # the steps after this one will not be wanted
      raise
    return Collected(trajectories, metrics, time.monotonic() - started)
