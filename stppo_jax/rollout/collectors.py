"""Lets some hosts only collect while others learn (`mesh.collectors`).

A host that only collects has a prefetcher (see `prefetch`), and gets the
weights over the network (`follow`). On the hosts that learn, `Collectors` takes
the place of the prefetcher. A host that learns sends these messages:

    {"base": ...}                the frozen weights under adapters, sent first
    {"weights": 7, ...}          the policy after 7 steps
    {"step": 7}                  step 7 is trained on next
    {"evaluate": 7}              evaluate the policy after 7 steps

The hosts that collect send back the dialogues of a step once the step is
complete. They collect a step only when the weights from `steps_ahead` steps
before that step have arrived, which bounds the number of steps that wait to be
trained on. Each host that learns gets the dialogues of its share of the
questions. The shares depend only on the number of hosts that learn. So the
batches do not depend on the number of hosts that collect.
"""

from collections.abc import Callable, Sequence
import time
from typing import Any

from stppo_jax import exits
from stppo_jax import types
from stppo_jax.envs import protocol as envs
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import transfer
from stppo_jax.rollout import deliveries
from stppo_jax.rollout import gathering
from stppo_jax.rollout import prefetch
from stppo_jax.rollout import steps as steps_lib

Tree = Any
Measured = tuple[dict[str, float], list[types.Trajectory]]
Collect = Callable[[int], tuple[list[types.Trajectory], dict[str, float]]]


class CollectorFailed(exits.RunEnded):
  """Raised if a host could not collect; the hosts that learn can still save.

  Args:
    line: says what has failed.
    exit_code: the exit code of the host that failed.
  """

  def __init__(self, line: str, exit_code: int):
    super().__init__(line)
    self.exit_code = exit_code


class Collectors(prefetch.Policies):
  """Represents the hosts that only collect, on a host that learns.

  Args:
    server: serves weights to the hosts that collect, and holds the dialogues
      that they have collected.
    copy_policy, steps_ahead, old_is_sampled, swaps_turns: see
      `prefetch.Policies`.
    exported: function of a policy's weights and a bool. It returns copies of
      the trained weights that an engine needs and, if the bool is true, of the
      frozen weights, in the dtype of the computation.
    hosts: the hosts that learn.
    environment: computes the metrics of trajectories.
    questions: the evaluation questions by data set.
  """

  def __init__(
    self,
    server: transfer.Server,
    copy_policy: Callable[[prefetch.State], prefetch.Params],
    exported: Callable[[prefetch.Params, bool], tuple[Tree, Tree]],
    *,
    steps_ahead: int,
    old_is_sampled: bool,
    swaps_turns: bool,
    hosts: hosts_lib.Hosts,
    environment: envs.Environment,
    questions: dict[str, list[types.Question]],
  ):
    super().__init__(
      copy_policy,
      steps_ahead=steps_ahead,
      old_is_sampled=old_is_sampled,
      swaps_turns=swaps_turns,
    )
    self.questions = questions
    self._server, self._exported, self._hosts = server, exported, hosts
    self._environment = environment
    self._offered: set[int] = set()
    self._done = 0
    self._first_groups: deliveries.Groups = []

  def restore(self, version: int, published: Sequence[prefetch.Params]) -> None:
    """Restores older policies, see `Policies.restore`."""
    super().restore(version, published)
    self._done = version

  def schedule(self, version: int, state: prefetch.State) -> None:
    """Offers the policy of a training state to the hosts that collect.

    These hosts collect later steps with this policy.

    Args:
      version: the number of steps that the state has done.
      state: the training state.
    """
    self._keep(version, state)
    for older, params in sorted(self._policies.items()):
      self._offer(older, params)
    self._server.append({'step': version})
    self._done = version + 1

  def result(self, step: int) -> prefetch.Collected:
    """Waits for the collection of the next step, and returns this host's part.

    Raises:
      CollectorFailed: if a host could not collect the step.
    """
    ahead = range(step, step + self._steps_ahead + 1)
    waiting = [all(x.done() for x in self._messages(_step(n))) for n in ahead]
    groups, first, counts, seconds = [], [], [], []
    for value, arrays in self._received(_step(step)):
      if 'failed' in value:
        raise CollectorFailed(value['failed'], value['code'])
      # The list has the final groups, followed by the groups as they were first
      # collected. For a group that was not replaced, the second half has an
      # empty list, see `Delivery.collect`.
      found = deliveries.unpacked(value['groups'], arrays)
      mine, begun = found[: len(found) // 2], found[len(found) // 2 :]
      groups += mine
      first += [old or new for old, new in zip(begun, mine, strict=True)]
      counts.append(value['counts'])
      seconds.append(value['seconds'])
    self._first_groups = first
    metrics = {}
    if self._hosts.is_first:  # the first host computes metrics for all hosts
      metrics = gathering.joined(counts)
      metrics['hosts/steps_waiting'] = float(sum(waiting))
    return prefetch.Collected(
      steps_lib.rows(groups),
      metrics,
      tuple(seconds) if self._hosts.is_first else (),
    )

  def complete_metrics(
    self, metrics: dict[str, float], step: int
  ) -> dict[str, float]:
    """Returns a step's metrics; on the first host, the metrics of all hosts."""
    return steps_lib.measured(
      self._hosts, self._first_groups, metrics, step, self._environment
    )

  def evaluate(self, params: prefetch.Params) -> Measured:
    """Lets the hosts that collect evaluate the newest policy.

    The result is metrics and trajectories, see `Evaluator.measure`. Only the
    first host that learns receives the trajectories.
    """
    self._offer(self._done, params)
    self._server.append({'evaluate': self._done})
    trajectories, metrics = [], {}
    for value, arrays in self._received(_evaluation(self._done)):
      trajectories += steps_lib.rows(
        deliveries.unpacked(value['groups'], arrays)
      )
      metrics = value['metrics']
    return metrics, trajectories

  def drain(self) -> None:
    """Does nothing, because collections in flight do not use this host."""

  def close(self) -> None:
    """Tells the hosts that collect to end."""
    self._server.close()

  def _offer(self, version: int, params: prefetch.Params) -> None:
    """Offers a policy; the hosts that collect read it when they need it."""
    if version in self._offered:
      return
    # Frozen weights never change, so they are sent only once. They go before
    # the first policy, which cannot be used without them.
    trained, frozen = self._exported(params, not self._offered)
    if frozen:
      self._append('base', None, frozen)
    self._append('weights', version, trained)
    self._offered.add(version)

  def _append(self, kind: str, version: int | None, tree: Tree) -> None:
    places, pieces = transfer.held(tree)
    self._server.append({kind: version, 'places': places}, pieces)

  def _messages(self, what: str) -> list[Any]:
    """Returns, for each host that collects, a future of its message."""
    return [
      self._server.received(f'{what} from {n}')
      for n in range(self._hosts.collectors)
    ]

  def _received(self, what: str) -> list[transfer.Message]:
    """Waits for the messages of all hosts that collect, and returns them."""
    found = [message.result() for message in self._messages(what)]
    for n in range(self._hosts.collectors):
      self._server.forget(f'{what} from {n}')
    return found


class Delivery:
  """Sends the trajectories that this host collects to the hosts that learn.

  Args:
    client: reaches the servers of the hosts that learn.
    steps: collects this host's part of a step.
    hosts: the hosts that collect.
  """

  def __init__(
    self,
    client: transfer.Client,
    steps: steps_lib.StepCollector,
    hosts: hosts_lib.Hosts,
  ):
    self._client, self._steps, self._hosts = client, steps, hosts
    self._learners = hosts.whole.count - hosts.collectors

  def collect(
    self, step: int
  ) -> tuple[list[types.Trajectory], dict[str, float]]:
    """Collects a step, and sends each host that learns its share of the groups.

    Returns:
      No trajectories and no metrics, because this host does not learn.
    """
    began = time.monotonic()
    collected = self._steps.collect_groups(step)
    seconds = time.monotonic() - began
    # Groups are numbered over the whole step, and this host has collected a
    # range of them. Each host that learns gets the overlap of this range with
    # the range that it trains on.
    num_groups, mine = self._steps.num_groups, self._hosts.share
    first = mine(num_groups).start
    for n in range(self._learners):
      theirs = hosts_lib.share(num_groups, n, self._learners)
      part = slice(max(theirs.start - first, 0), max(theirs.stop - first, 0))
      groups, before = collected.groups[part], collected.first[part]
      # A group that was not replaced is sent only once: in the second half, an
      # empty list stands for it.
      before = [
        [] if old is new else old
        for old, new in zip(before, groups, strict=True)
      ]
      value, arrays = deliveries.packed([*groups, *before])
      value = {'groups': value, 'counts': collected.counts, 'seconds': seconds}
      self._put(n, _step(step), transfer.Message(value, arrays))
    return [], {}

  def send_evaluation(self, version: int, measured: Measured) -> None:
    """Sends metrics to all hosts that learn; trajectories only to the first."""
    metrics, trajectories = measured
    for n in range(self._learners):
      value, arrays = deliveries.packed([[] if n else trajectories])
      value = {'groups': value, 'metrics': metrics}
      self._put(n, _evaluation(version), transfer.Message(value, arrays))

  def send_failure(self, step: int, error: BaseException) -> None:
    """Tells the hosts that learn why a step cannot be collected."""
    whole = self._hosts.whole
    line = f'{whole.describe(whole.index)}: {hosts_lib.describe(error)}'
    value = {'failed': line, 'code': getattr(error, 'exit_code', exits.BUG)}
    for n in range(self._learners):
      self._put(n, _step(step), transfer.Message(value, ()))

  def _put(self, learner: int, what: str, message: transfer.Message) -> None:
    self._client.put(learner, f'{what} from {self._hosts.index}', message)


def follow(
  client: transfer.Client,
  prefetcher: prefetch.Prefetcher,
  delivery: Delivery,
  evaluate: Callable[[prefetch.Params], Measured],
  *,
  joined: Callable[[Tree, Tree], prefetch.Params],
  steps_ahead: int,
) -> None:
  """Collects steps for the hosts that learn, until these hosts have ended.

  Args:
    client: reads the messages of the hosts that learn.
    prefetcher: collects steps with `Delivery.collect`.
    delivery: sends failures and evaluations to the hosts that learn.
    evaluate: evaluates a policy.
    joined: returns a policy made of trained and frozen weights.
    steps_ahead: the number of steps by which a policy may lag behind the step
      that it collects.
  """
  policies: dict[int, prefetch.Params] = {}
  base: Tree = {}
  step = None
  while messages := client.read():
    value = messages[0].value
    if 'base' in value or 'weights' in value:
      tree = transfer.whole(
        [transfer.Message(x.value['places'], x.arrays) for x in messages]
      )
      if 'base' in value:
        base = tree
      else:
        policies[value['weights']] = joined(tree, base)
    elif 'evaluate' in value:
      version = value['evaluate']
      # All collections must end first. They use the same engine, and their
      # counts of queries would include the queries of the evaluation.
      prefetcher.drain()
      delivery.send_evaluation(version, evaluate(policies[version]))
    else:
      step, begins = value['step'], step is None
      # A resumed run collects its next steps with older policies.
      if begins:
        older = range(1, steps_ahead + 1)
        prefetcher.restore(step, [policies[max(0, step - n)] for n in older])
      prefetcher.schedule(step, policies[step])
      # Older policies are dropped here, because the prefetcher keeps them.
      policies = {step: policies[step]}
      try:
        prefetcher.result(step)
      except Exception as error:
        if not getattr(error, 'saves', False):
          raise
        delivery.send_failure(step, error)
        # The hosts that learn save the last step and then end the run. This
        # loop waits until they have ended.
        while client.read():
          pass
        raise


def _step(step: int) -> str:
  return f'step {step}'


def _evaluation(version: int) -> str:
  return f'evaluation {version}'
