"""Builds what the training loop works with, once, before anything is written.

A config that does not fit its files or devices is refused here. No weight is
read.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax import types
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import memory
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.records import turn_versions
from stppo_jax.rollout import answer_probes
from stppo_jax.rollout import collect
from stppo_jax.rollout import evaluation
from stppo_jax.rollout import pack as pack_lib
from stppo_jax.rollout import prefetch
from stppo_jax.rollout import shared_engine
from stppo_jax.rollout import steps as steps_lib
from stppo_jax.sampling import engine as local_engine
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import checks
from stppo_jax.training import claim
from stppo_jax.training import components as components_lib
from stppo_jax.training import engines
from stppo_jax.training import model_files
from stppo_jax.training import span
from stppo_jax.workdir import agreement
from stppo_jax.workdir import run_record


@dataclasses.dataclass(frozen=True)
class Parts:
  """The objects that the loop works with.

  Attributes:
    config: the config of the run, with a number of slots that fits.
    tokenizer: the policy's tokenizer.
    learner: annotates and updates.
    placement: the devices that decode; None with rollout.engine=remote.
    services: questions, environment, retriever and event loop.
    engine: samples, for collections and evaluations.
    step_collector: collects one step, and completes its metrics.
    prefetcher: schedules the collections of steps and returns their results.
    evaluator: evaluates a published policy.
    pack: makes the batch of a step; see `pack_step`.
    release: frees the memory of the engine that training may use, until the
      next policy is published.
    notes: lines about what the config leads to; of the first host.
  """

  config: Any
  tokenizer: tokenizer_lib.Tokenizer
  learner: learner_lib.Learner
  placement: publish_lib.Placement | None
  services: steps_lib.Services
  engine: engines.Engine
  step_collector: steps_lib.StepCollector
  prefetcher: prefetch.Prefetcher
  evaluator: evaluation.Evaluator
  pack: Callable[..., tuple[batch_lib.TokenBatch, dict[str, float]]]
  release: Callable[[], None]
  notes: Sequence[str]

  def evaluate(
    self, state: state_lib.TrainState, folder: claim.Folder
  ) -> tuple[dict[str, float], list[types.Trajectory]]:
    """Returns the metrics of an evaluation, and this host's trajectories.

    Args:
      state: the state whose policy is evaluated.
      folder: the run's folder, where a signal may cut it short.
    """
    with folder.interruptible():
      # Wait for the collections in flight: they use the same engine, and their
      # counts of the retriever would contain the evaluation's queries.
      self.prefetcher.drain()
    with folder.collective_section():
      engines.publish(self.engine, self.learner, state.params, 0)
    with folder.interruptible():
      measured = self.evaluator.measure()
      # Steps use the same retriever: drop what the evaluation has counted.
      self.step_collector.statistics()
      self.release()
      return measured
    raise AssertionError  # a section that is cut short raises


def build(config, folder: claim.Folder) -> Parts:
  """Builds what the loop works with.

  Args:
    config: the config of the run, with a model that has the shape and the
      tokenizer of its start.
    folder: the run's folder, with which everything is closed.

  Raises:
    Exceptions with an `exit_code`, see `loop.train`.
  """
  with folder.interruptible():
    found = components_lib.build(span.resolved(config, folder.hosts))
    if found.tokenizer.prompts.begun_by_tokenizer:
      folder.check_prompts()
    config = found.config
    checks.check_memory(
      config, found.learner, found.placement, memory.device_limit()
    )
  with folder.interruptible():
    services = folder.enter(
      components_lib.build_services(config, found.questions)
    )
    tokenizer, learner = found.tokenizer, found.learner
    with exits.as_misconfigured():
      sentences = steps_lib.build_sentences(config, tokenizer)
    collecting = services
    # If several devices both learn and collect, programs of two threads can
    # deadlock: two devices may get them in different orders, and the
    # collectives of each then wait for the other's.
    is_safe = learner.mesh.size == 1 or _apart(found)
    swaps_turns = config.rollout.turn_swaps != 'never'
    if swaps_turns and not is_safe:
      raise exits.Misconfigured(
        f'rollout.turn_swaps={config.rollout.turn_swaps}: must be never on '
        f'{learner.mesh.size} devices that learn and collect in turn; with '
        'mesh.collect_fraction some collect beside the others'
      )
    if config.rollout.steps_ahead and is_safe:
      # On a thread, which ends when its loop is stopped.
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
    # The main thread evaluates, so it uses the loop itself: the view of it,
    # with which the other thread collects, may be stopped.
    evaluator = evaluation.Evaluator(
      config, services, collector(services, engine=engine), folder.hosts
    )
    shared = None
    if swaps_turns:
      assert isinstance(engine, local_engine.Engine)  # by configs/relations.py
      shared = shared_engine.SharedEngine(
        engine,
        turn_versions.TurnVersions(folder.path, folder.hosts.index),
        _repeated(config, folder),
      )
    group_size = config.rollout.group_size
    steps = steps_lib.StepCollector(
      config,
      collecting,
      collector(collecting, engine=shared or engine, group_size=group_size),
      folder.hosts,
    )
    prefetcher = _build_prefetcher(
      config, collecting, found, engine, steps, shared
    )
    # Entered after the services, and so closed before them: its thread must
    # have ended when their loop and their connections are closed.
    folder.enter(contextlib.closing(prefetcher))
    pack = functools.partial(
      pack_step,
      config=config,
      tokenizer=tokenizer,
      learner=learner,
      sentences=sentences,
      hosts=folder.hosts,
    )
  return Parts(
    config,
    tokenizer,
    learner,
    found.placement,
    services,
    engine,
    steps,
    prefetcher,
    evaluator,
    pack,
    functools.partial(engines.release, engine, config),
    [*_notes(config, found, folder.hosts.count)] * folder.hosts.is_first,
  )


def pack_step(
  trajectories: Sequence[types.Trajectory],
  state: state_lib.TrainState,
  step: int,
  *,
  config,
  tokenizer: collect.Tokenizer,
  learner: learner_lib.Learner,
  sentences: pack_lib.Sentences | None,
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> tuple[batch_lib.TokenBatch, dict[str, float]]:
  """Returns the batch of a step, see `pack.pack`, and its metrics.

  Rewards that need the policy are added. T turns.

  Args:
    trajectories: this host's trajectories.
    state: the state whose policy is asked for information gains.
    step: the training step.
    config: the config of the run.
    tokenizer: the policy's tokenizer.
    learner: computes log-probabilities.
    sentences: see `pack.pack`.
    hosts: the hosts whose rows make a batch; all of them call this function.

  Raises:
    HostsDiffer: the arrays of the hosts have different shapes.
  """
  bucket = components_lib.length_unit(config)
  packed = pack_lib.pack(
    trajectories,
    length_bucket=bucket,
    sentences=sentences,
    with_expert_ids=config.updates.routing_replay == 'sampler',
    step=None if config.rollout.turn_swaps == 'never' else step,
    hosts=hosts,
  )
  # Before the first program of the step, in which hosts would wait for ever.
  agreement.check_program(hosts, 'annotate and update', step, packed)
  weight = config.env.rewards.information_gain
  if not weight:
    return packed, {}
  num_turns = config.env.max_turns + 1
  probes = answer_probes.build(
    trajectories,
    tokenizer,
    num_turns=num_turns,
    max_length=config.env.max_length,
  )
  not_finite = 0
  asks = any(probe.turns for probe in probes)
  # A host without a probe takes part in the program of the others.
  if any(hosts.exchange('probes', asks)):
    asked = pack_lib.pack(probes, length_bucket=bucket, hosts=hosts)
    agreement.check_program(hosts, 'information gain', step, asked)
    gains_BT = answer_probes.gains(
      learner.mean_logprobs(state, asked), asked.lengths_B, num_turns
    )
    finite_BT = np.isfinite(gains_BT)
    not_finite = sum(hosts.exchange('gains', int(np.sum(~finite_BT))))
    gains_BT = np.where(finite_BT, gains_BT, 0.0)
    packed = answer_probes.rewarded(packed, gains_BT, weight)
  return packed, {'information_gain/not_finite': float(not_finite)}


def _notes(
  config, found: components_lib.Components, num_hosts: int
) -> Iterator[str]:
  """Yields lines about what devices do, and options that do less than hoped."""
  yield from (f'note: {line}' for line in found.notes)
  ahead, learning = config.rollout.steps_ahead, found.learner.mesh.size
  if placement := _apart(found):
    collecting = len(placement.collecting)
    yield (
      f'note: mesh.collect_fraction={config.mesh.collect_fraction}: devices of '
      f'each host: {learning // num_hosts} learn, {collecting} collect'
    )
  elif ahead and learning > 1:
    yield (
      f'note: rollout.steps_ahead={ahead}: the next step is collected between '
      'updates, which saves no time; with mesh.collect_fraction some devices '
      'collect beside them'
    )
  slots = config.rollout.slots
  if 0 < slots < config.rollout.trajectories_per_step // num_hosts:
    yield f'note: each host decodes {slots} trajectories at a time'
  ends = model_files.end_token_ids(config, found.tokenizer)
  names = ', '.join(f'{i} {found.tokenizer.decode([i])!r}' for i in ends)
  yield f'a turn ends at a stop string or at token {names}'


def _apart(
  found: components_lib.Components,
) -> publish_lib.Placement | None:
  """Returns the placement if the devices that collect do not learn."""
  placement = found.placement
  return placement if placement and placement.collecting else None


def _repeated(
  config, folder: claim.Folder
) -> turn_versions.TurnVersions | None:
  """Returns the record of the run that this one repeats; None: it repeats none.

  Raises:
    OtherRun: that run has another config, with a line for each key.
    Misconfigured: the folder has no such record, or a damaged one.
  """
  if not config.rollout.replay_order:
    return None
  path = pathlib.Path(config.rollout.replay_order)
  repeated = turn_versions.TurnVersions(path, folder.hosts.index)
  problem = ''
  with exits.as_misconfigured('rollout.replay_order'):
    # All of them now: a step that cannot be repeated would end the run later.
    first, *_ = [repeated.read(step) for step in range(config.num_steps)]
  if first is None:
    problem = 'no run with rollout.turn_swaps has begun there'
  else:
    run_record.check_config(folder.config, path)
    recorded = json.loads((path / 'config.json').read_text('utf-8'))
    every = recorded['evaluate']['every']
    if config.evaluate.every != every:
      # An evaluation waits for all dialogues, some of which would wait for
      # weights that come after it.
      problem = f'it has evaluate.every={every}, not {config.evaluate.every}'
  if problem:
    raise exits.Misconfigured(f'rollout.replay_order={path}: {problem}')
  return repeated


def _build_prefetcher(
  config,
  services: steps_lib.Services,
  found: components_lib.Components,
  engine: engines.Engine,
  steps: steps_lib.StepCollector,
  shared: shared_engine.SharedEngine | None,
) -> prefetch.Prefetcher:
  """Builds the prefetcher, with threads of its own if its loop can stop.

  They share the engine if `shared` is given.
  """
  loop, learner = services.loop, found.learner
  build_it = functools.partial(
    prefetch.Prefetcher,
    copy_policy=learner.copy_policy,
    steps_ahead=config.rollout.steps_ahead,
    num_steps=config.num_steps,
    loop=loop if isinstance(loop, prefetch.StoppableLoop) else None,
    old_is_sampled=config.updates.old_policy == 'sampled',
    turns=shared,
  )
  placement = _apart(found)
  if placement or shared:
    assert isinstance(engine, local_engine.Engine)  # it has a placement

    def collect(step: int):
      with contextlib.ExitStack() as stack:
        if placement:
          # Small programs without devices of their own must not wait in the
          # queue of a device that learns.
          stack.enter_context(jax.default_device(placement.collecting[0]))
        if shared:
          stack.enter_context(shared.collecting(step))
        return steps.collect(step)

    return build_it(
      collect,
      engine.swap_weights,
      send=functools.partial(engines.transferred, engine),
    )
  return build_it(
    steps.collect, functools.partial(engines.publish, engine, learner)
  )
