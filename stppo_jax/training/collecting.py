"""Builds the objects with which a host collects trajectories and evaluates.

If other hosts collect, this module builds objects that stand for these hosts.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from typing import Any

import jax

from stppo_jax import exits
from stppo_jax import types
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.parallel import transfer
from stppo_jax.records import turn_versions
from stppo_jax.rollout import collectors
from stppo_jax.rollout import evaluation
from stppo_jax.rollout import prefetch
from stppo_jax.rollout import shared_engine
from stppo_jax.rollout import steps as steps_lib
from stppo_jax.sampling import engine as local_engine
from stppo_jax.training import claim
from stppo_jax.training import components as components_lib
from stppo_jax.training import engines


@dataclasses.dataclass(frozen=True)
class Collecting:
  """Collects and evaluates, or stands for the hosts that collect and evaluate.

  Attributes:
    config: the config of the run.
    learner: the learner of the policy.
    engine: samples turns, for collections and evaluations; None if other hosts
      sample.
    step_collector: collects one step, and completes its metrics.
    prefetcher: schedules the collections of steps and returns their results.
    evaluator: evaluates a published policy.
    follow: collects for the hosts that learn until they have ended; None if
      this host learns.
  """

  config: Any
  learner: learner_lib.Learner
  engine: engines.Engine | None
  step_collector: steps_lib.StepCollector | collectors.Collectors
  prefetcher: prefetch.Prefetcher | collectors.Collectors
  evaluator: evaluation.Evaluator | collectors.Collectors
  follow: Callable[[], None] | None = None

  def evaluate(
    self, state: state_lib.TrainState, folder: claim.Folder
  ) -> tuple[dict[str, float], list[types.Trajectory]]:
    """Returns the metrics of an evaluation, and this host's trajectories.

    Args:
      state: the state whose policy is evaluated.
      folder: the run's folder, through which a signal may cut the evaluation
        short.
    """
    if isinstance(self.evaluator, collectors.Collectors):
      with folder.interruptible():
        return self.evaluator.evaluate(state.params)
    assert isinstance(self.step_collector, steps_lib.StepCollector)
    assert self.engine is not None
    with folder.interruptible():
      # Wait until no collection is running: collections use the same engine,
      # and their counts of searches would include the evaluation's queries.
      self.prefetcher.drain()
    with folder.collective_section():
      engines.publish(self.engine, self.learner, state.params, 0)
    with folder.interruptible():
      measured = self.evaluator.measure()
      # Steps use the same retriever, so drop the evaluation's counts here.
      self.step_collector.statistics()
      self.release()
      return measured
    raise AssertionError  # never reached: an interrupted section raises

  def release(self) -> None:
    """Frees the memory of the engine until the next policy is published."""
    if self.engine is not None:
      engines.release(self.engine, self.config)


def build(
  config,
  found: components_lib.Components,
  services: steps_lib.Services,
  folder: claim.Folder,
) -> Collecting:
  """Builds the objects that collect and evaluate on this host's devices.

  Raises:
    Misconfigured: `rollout.turn_swaps` is on, and several devices both learn
      and collect.
  """
  tokenizer, learner, hosts = found.tokenizer, found.learner, folder.hosts
  collecting = services
  # If several devices both learn and collect, the programs of two threads can
  # deadlock: one device may get program A first and another device program B.
  # The collectives of A and B then wait for each other.
  is_safe = learner.mesh.size == 1 or apart(found)
  swaps_turns = config.rollout.turn_swaps != 'never'
  if swaps_turns and not is_safe:
    raise exits.Misconfigured(
      f"rollout.turn_swaps={config.rollout.turn_swaps}: must be 'never', "
      f'because the same {learner.mesh.size} devices learn and collect; set '
      'mesh.collect_fraction to let some devices only collect'
    )
  if config.rollout.steps_ahead and is_safe:
    # Steps are then collected on another thread. The thread ends when its
    # `StoppableLoop` is stopped.
    loop = prefetch.StoppableLoop(services.loop)
    collecting = dataclasses.replace(services, loop=loop)
  engine = engines.build(
    config,
    collecting,
    tokenizer,
    learner.decoded,
    found.placement,
    folder.agreed,
  )
  collector = functools.partial(
    engines.build_collector, config, tokenizer=tokenizer
  )
  # The main thread evaluates with `services`, which has the event loop itself
  # and not the `StoppableLoop` of the collecting thread, which may be stopped.
  evaluator = evaluation.Evaluator(
    config, services, collector(services, engine=engine), hosts
  )
  shared = None
  if swaps_turns:
    # configs/relations.py refuses turn swaps with a remote engine.
    assert isinstance(engine, local_engine.Engine)
    shared = shared_engine.SharedEngine(
      engine,
      turn_versions.TurnVersions(folder.path, hosts.index),
      turn_versions.repeated(config, folder.config, hosts.index),
    )
  group_size = config.rollout.group_size
  steps = steps_lib.StepCollector(
    config,
    collecting,
    collector(collecting, engine=shared or engine, group_size=group_size),
    hosts,
  )
  build_it = functools.partial(
    _build_prefetcher, config, collecting, found, engine, shared=shared
  )
  made = functools.partial(Collecting, config, learner)
  if not hosts.collectors:
    return made(engine, steps, build_it(steps.collect), evaluator)
  # From here on, this host only collects. At a signal, the hosts that learn
  # save the run and print what was saved, so this host prints nothing.
  folder.interrupt.outlook = 'ending; the hosts that learn save the run'
  folder.interrupt.is_told = True
  addresses = hosts.whole.exchange('addresses', None)
  client = folder.enter(
    contextlib.closing(
      transfer.Client([transfer.Address(*x) for x in addresses if x])
    )
  )
  delivery = collectors.Delivery(client, steps, hosts)
  prefetcher = build_it(delivery.collect)

  def evaluate(params: model_roles.Params):
    engines.publish(engine, learner, params, 0)
    measured = evaluator.measure()
    steps.statistics()  # drops the evaluation's counts of searches
    return measured

  follow = functools.partial(
    collectors.follow,
    client,
    prefetcher,
    delivery,
    evaluate,
    joined=lambda trained, base: model_roles.Params(
      model_roles.Trained(trained, None), base
    ),
    steps_ahead=config.rollout.steps_ahead,
  )
  return made(engine, steps, prefetcher, evaluator, follow)


def build_collectors(
  config,
  found: components_lib.Components,
  services: steps_lib.Services,
  folder: claim.Folder,
) -> Collecting:
  """Builds, on a host that learns, stand-ins for the hosts that collect."""
  hosts, learner = folder.hosts, found.learner
  server = transfer.Server(hosts.whole.reached_at, hosts.collectors)
  hosts.whole.exchange('addresses', server.address)
  dtype = learner.policy.config.dtype
  others = collectors.Collectors(
    server,
    learner.copy_policy,
    functools.partial(engines.exported, dtype=dtype),
    steps_ahead=config.rollout.steps_ahead,
    old_is_sampled=config.updates.old_policy == 'sampled',
    swaps_turns=config.rollout.turn_swaps != 'never',
    hosts=hosts,
    environment=services.environment,
    questions=services.questions.evaluation(config.evaluate.num_questions),
  )
  return Collecting(config, learner, None, others, others, others)


def apart(
  found: components_lib.Components,
) -> publish_lib.Placement | None:
  """Returns the placement if its devices do not learn; otherwise None."""
  placement = found.placement
  return placement if placement and placement.collecting else None


def _build_prefetcher(
  config,
  services: steps_lib.Services,
  found: components_lib.Components,
  engine: engines.Engine,
  collect_step: collectors.Collect,
  *,
  shared: shared_engine.SharedEngine | None,
) -> prefetch.Prefetcher:
  """Builds the prefetcher of a host that collects.

  If the services have a `StoppableLoop`, steps are collected on another thread.
  If `shared` is given, too, several such threads collect, and share the engine.
  """
  loop, learner, placement = services.loop, found.learner, apart(found)
  copy_policy = learner.copy_policy
  # A host that only collects gets its weights over the network. No update
  # donates these weights, so they need no copy.
  if placement and placement.collectors:
    copy_policy = lambda params: params
  build_it = functools.partial(
    prefetch.Prefetcher,
    copy_policy=copy_policy,
    steps_ahead=config.rollout.steps_ahead,
    num_steps=config.num_steps,
    loop=loop if isinstance(loop, prefetch.StoppableLoop) else None,
    old_is_sampled=config.updates.old_policy == 'sampled',
    turns=shared,
  )
  if placement or shared:
    # Only a local engine has a placement or is shared.
    assert isinstance(engine, local_engine.Engine)

    def collect(step: int):
      with contextlib.ExitStack() as stack:
        if placement:
          # Small programs that name no device run on the default device. This
          # must be a device that collects: on a device that learns, the
          # programs would wait behind the updates.
          stack.enter_context(jax.default_device(placement.collecting[0]))
        if shared:
          stack.enter_context(shared.collecting(step))
        return collect_step(step)

    return build_it(
      collect,
      engine.swap_weights,
      send=functools.partial(engines.transferred, engine),
    )
  return build_it(
    collect_step, functools.partial(engines.publish, engine, learner)
  )
