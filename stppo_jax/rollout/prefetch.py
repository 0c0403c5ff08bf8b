"""Collects trajectories of later steps while the learner updates on this one.

With k = `steps_ahead`, step n is collected with the policy after max(0, n - k)
steps. Policy 0 is the initial policy, policy 1 is the policy after step 0, and
so on. For k = 1, over time:

    collected step       0  1     2     3
    updated step            0     1     2
    collecting policy    0  0     1     2

The policy of a step does not depend on how long anything takes, so a run can be
repeated. The result of a collection is a function of (config, step, policy).
The result is the same whether a thread of its own collects during the updates,
or the learner's thread collects between two updates. A collection that was
dropped can be made again. Therefore checkpoints contain the policies that
collect the next steps, and no trajectories.

With turns of several policies (`turns`), a policy is published as soon as it
exists, for all turns that begin from then on. The next k + 1 steps are
collected at the same time, and their dialogues get slots in the order of the
steps. A turn of step n then has one of the policies after n - k, ..., n steps.
Timing decides which of these policies it has.

Threads: the thread of the learner calls the methods of `Prefetcher`. One worker
thread publishes weights and collects, one step after the other. (With turns of
several policies, each step has a worker thread of its own, which only
collects.) The event loop has a thread of its own, on which the environment and
its clients run. The threads share only futures and weights, and no weights that
an update may donate.
"""

from collections.abc import Callable, Coroutine, Sequence
import concurrent.futures
import dataclasses
import functools
import threading
import time
from typing import Any, Protocol

from stppo_jax import types
from stppo_jax.rollout import event_loop

Future = concurrent.futures.Future
# `Params` are the weights of a policy, and `State` is a training state that has
# such weights: `model_roles.Params` and `state.TrainState` of `learner/`.
Params = Any
State = Any
Trajectories = list[types.Trajectory]


# Seconds between two checks of a condition that a thread waits for.
_PAUSE = 0.001


class Abandoned(Exception):
  """Raised to end a collection whose result is not needed any more."""


@dataclasses.dataclass(frozen=True)
class Collected:
  """Holds the collection of one step.

  Attributes:
    trajectories: the trajectories to train on, group after group.
    metrics: the metrics of the collection.
    seconds: the duration of the collection on each host that `metrics`
      describes. Time in which an update ran counts, too.
  """

  trajectories: Trajectories
  metrics: dict[str, float]
  seconds: tuple[float, ...]


class StoppableLoop:
  """Wraps an event loop, so that one of its users can be stopped.

  A thread cannot be ended from outside. But a collection submits coroutines to
  its loop after every chunk of tokens, and waits for nothing else. So `stop`
  ends a collection on another thread: the next `submit` raises, and a wait ends
  because its future is cancelled. The lock ensures that no future is added
  after `stop` has cancelled the futures.
  """

  def __init__(self, loop: event_loop.EventLoop):
    self._loop = loop
    self._lock = threading.Lock()
    self._stopped = False
    self._waiting: set[Future] = set()

  def submit(self, coroutines: Sequence[Coroutine]) -> list[Future]:
    """Starts coroutines, see `EventLoop.submit`.

    Raises:
      Abandoned: if `stop` has been called.
    """
    with self._lock:
      if self._stopped:
        for coroutine in coroutines:
          coroutine.close()
        raise Abandoned
      # Only running futures are kept, because a run has millions of futures.
      futures = self._loop.submit(coroutines)
      self._waiting = {f for f in self._waiting if not f.done()} | {*futures}
    return futures

  def run(self, coroutine: Coroutine) -> Any:
    """Runs a coroutine and returns its result, see `EventLoop.run`.

    Raises:
      Abandoned: if `stop` has been called.
    """
    (future,) = self.submit([coroutine])
    return future.result()

  def stop(self) -> None:
    """Cancels the running coroutines and refuses further coroutines."""
    with self._lock:
      self._stopped = True
      for future in self._waiting:
        future.cancel()


class Turns(Protocol):
  """Coordinates turns of several policies; see `shared_engine.SharedEngine`."""

  repeats: bool

  def has_entered(self, step: int) -> bool: ...
  def may_publish(self, version: int, steps: Sequence[int]) -> bool: ...


class Policies:
  """Keeps the policies that collect steps.

  Args:
    copy_policy: copies the policy's weights, because the next update consumes
      the state while collections still need the weights.
    steps_ahead: k, the number of steps by which a policy may lag behind the
      step that it collects.
    old_is_sampled: whether the denominator of a step's ratios is the policy
      that collected the step. If it is false, the denominator is the policy
      before the step's updates. Without steps ahead the two are the same.
    swaps_turns: whether turns begin with the newest policy.
  """

  def __init__(
    self,
    copy_policy: Callable[[State], Params],
    *,
    steps_ahead: int,
    old_is_sampled: bool = False,
    swaps_turns: bool = False,
  ):
    self._copy_policy = copy_policy
    self._steps_ahead = steps_ahead
    self._old_is_sampled, self._swaps_turns = old_is_sampled, swaps_turns
    self._policies: dict[int, Params] = {}

  def restore(self, version: int, published: Sequence[Params]) -> None:
    """Restores the policies that `published` returned after `version` steps."""
    for behind, params in enumerate(published, start=1):
      self._policies[max(0, version - behind)] = params

  def published(self, version: int, params: Params) -> tuple[Params, ...]:
    """Returns the older policies that a run needs after `version` steps.

    These are the policies after max(0, version - 1), ..., max(0, version - k)
    steps, where k is `steps_ahead`.

    Args:
      version: the number of steps that have been done.
      params: the policy after `version` steps. It is returned only if `version`
        is 0: then it takes the place of all older policies.
    """
    # In the first steps, the initial policy replaces earlier policies, which do
    # not exist. So every checkpoint has the same structure.
    policies = self._policies | {version: params}
    return tuple(
      policies[max(0, version - behind)]
      for behind in range(1, self._steps_ahead + 1)
    )

  def policy(self, step: int) -> Params:
    """Returns the weights of the policy that collects a step."""
    return self._policies[self._version(step)]

  def old_policy(self, step: int) -> Params | None:
    """Returns the weights of the policy in the denominator of a step's ratios.

    None stands for the weights of the state before the step's updates.
    """
    if self._steps_ahead and self._old_is_sampled and not self._swaps_turns:
      return self.policy(step)
    return None

  def older_policies(self, step: int) -> tuple[Params, ...]:
    """Returns the weights of policies that may have written turns of a step.

    The first is the policy after `step` - 1 steps, the second is the policy
    after `step` - 2 steps, and so on. The denominator of a turn's ratio is the
    policy that wrote the turn. If the result is empty, the denominator of all
    ratios is `old_policy`.
    """
    if self._old_is_sampled and self._swaps_turns:
      return self.published(step, self._policies[step])
    return ()

  def _keep(self, version: int, state: State) -> None:
    """Keeps the policy of a state, and releases policies that no step needs."""
    params = self._copy_policy(state) if self._steps_ahead else state.params
    oldest = self._version(version)
    kept = {v: p for v, p in self._policies.items() if v >= oldest}
    self._policies = kept | {version: params}

  def _version(self, step: int) -> int:
    return max(0, step - self._steps_ahead)


class Prefetcher(Policies):
  """Collects step n with the policy after n - `steps_ahead` steps.

  A worker thread publishes each policy before it collects. Without a worker
  thread, or with `turns`, `schedule` publishes the policies.

  Args:
    collect: collects a step with the published weights, see
      `StepCollector.collect`.
    publish: gives weights and their version to the engine that samples.
    copy_policy, steps_ahead, old_is_sampled: see `Policies`.
    num_steps: the number of steps of the run; no later step is collected.
    loop: the event loop of `collect`. If it is given, steps are collected on
      another thread. If it is None, `result` collects the step. It must be None
      if several devices both learn and collect: the collectives of programs
      that two threads start could wait for each other.
    send: copies weights to the devices that collect, for `publish`. It is
      called in `schedule`, because several hosts that learn copy weights
      together, in the order of their other programs. If it is None, `publish`
      copies them.
    turns: decides when policies are published and steps begin, if turns begin
      with the newest policy. This needs `loop` and `send`, and several threads
      then call `collect`. If it is None, a step is collected with one policy.
  """

  def __init__(
    self,
    collect: Callable[[int], tuple[Trajectories, dict[str, float]]],
    publish: Callable[[Params, int], None],
    copy_policy: Callable[[State], Params],
    *,
    steps_ahead: int,
    num_steps: int,
    loop: StoppableLoop | None,
    send: Callable[[Params], Params] | None = None,
    old_is_sampled: bool = False,
    turns: Turns | None = None,
  ):
    super().__init__(
      copy_policy,
      steps_ahead=steps_ahead,
      old_is_sampled=old_is_sampled,
      swaps_turns=turns is not None,
    )
    self._collect, self._num_steps = collect, num_steps
    self._publish = publish
    self._loop = loop
    self._send, self._turns = send, turns
    self._newest = -1
    self._sent: tuple[int, Params] | None = None
    self._thread = None
    if loop is not None:
      # With one thread, weights are published only between two collections.
      # With `turns`, each step that is collected at the same time has a thread.
      self._thread = concurrent.futures.ThreadPoolExecutor(
        1 + steps_ahead if turns else 1, 'collect-ahead'
      )
    self._in_flight: dict[int, Future[Collected]] = {}
    self._broken = threading.Event()

  def schedule(self, version: int, state: State) -> None:
    """Starts the collections that need the policy of a training state.

    Args:
      version: the number of steps that the state has done; one more than in the
        last call.
      state: the training state. Without steps ahead its weights are not copied,
        so no update may consume the state before `result` has returned.
    """
    self._keep(version, state)
    if self._thread is None:
      # Weights are published here and not in `result`. All hosts must publish
      # together, but one host may be told to abandon its collection before the
      # collection begins.
      self._publish(self.policy(version), self._version(version))
      return
    versions = []
    if self._turns:
      # A resumed run that repeats another run publishes the older policies
      # first, because recorded turns wait for these policies.
      versions = [v for v in sorted(self._policies) if v > self._newest]
      versions = versions if self._turns.repeats else [version]
      # The first policy is published before the collections below start,
      # because none of them may begin with an older policy.
      self._publish_when_due(versions.pop(0), version)
    # All steps whose policy exists now are started, except the steps that an
    # earlier call has started.
    last = min(version + self._steps_ahead, self._num_steps - 1)
    for step in range(max(self._in_flight, default=version - 1) + 1, last + 1):
      self._in_flight[step] = self._thread.submit(
        self._collect_step, step, self._sent_policy(step)
      )
      # Dialogues get slots in the order of their steps.
      if self._turns:
        self._wait_until(functools.partial(self._turns.has_entered, step))
    for newer in versions:
      self._publish_when_due(newer, version)

  def _publish_when_due(self, newest: int, version: int) -> None:
    """Waits until turns may begin with a policy, and publishes the policy.

    Args:
      newest: the version of the policy.
      version: the first step that may still be in collection, see `schedule`.
    """
    assert self._send is not None and self._turns is not None
    last = min(newest + self._steps_ahead, self._num_steps)
    steps = range(version, last)
    may_publish = self._turns.may_publish
    self._wait_until(functools.partial(may_publish, newest, steps))
    # Weights are sent even after an error of a collection, because all hosts
    # must take part in the program that sends them. `result` raises the error.
    self._publish(self._send(self._policies[newest]), newest)
    self._newest = newest

  def _wait_until(self, condition: Callable[[], bool]) -> None:
    """Waits for a condition, or for an error of a collection."""
    while not condition() and not self._broken.is_set():
      time.sleep(_PAUSE)

  def result(self, step: int) -> Collected:
    """Returns the collection of the next step when it is complete.

    Without a thread that collects ahead, this call collects the step itself.

    Raises:
      RetrieverUnreachable, Outage: if the retriever does not recover.
    """
    if self._thread is None:
      return self._collect_step(step, self.policy(step))
    return self._in_flight.pop(step).result()

  def drain(self) -> None:
    """Waits until no collection is in flight; ignores errors of collections."""
    concurrent.futures.wait(self._in_flight.values())

  def close(self) -> None:
    """Drops the collections in flight; returns when all threads have ended."""
    if self._thread is not None:
      # The flag is set first, so that no collection begins that still waits for
      # a thread. Then the loop is stopped, which ends the collections that run.
      self._broken.set()
      assert self._loop is not None
      self._loop.stop()
      self._thread.shutdown(cancel_futures=True)

  def _sent_policy(self, step: int) -> Params:
    """Returns the weights that collect a step, on the devices that collect."""
    if self._send is None or self._turns:
      return self.policy(step)
    # The first k + 1 steps share a policy, which is sent once.
    version = self._version(step)
    if self._sent is None or self._sent[0] != version:
      self._sent = version, self._send(self.policy(step))
    return self._sent[1]

  def _collect_step(self, step: int, params: Params) -> Collected:
    if self._broken.is_set():
      raise Abandoned
    started = time.monotonic()
    try:
      if self._thread is not None and not self._turns:
        self._publish(params, self._version(step))
      trajectories, metrics = self._collect(step)
    except BaseException:
      # The run ends with this error, so later collections are not needed.
      self._broken.set()
      raise
    return Collected(trajectories, metrics, (time.monotonic() - started,))
