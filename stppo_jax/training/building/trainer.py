"""Builds what the training loop works with, and resumes the run.

A config that does not fit its files or devices is refused before anything is
written, where this can be seen without reading weights.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax import types
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.rollout import pack as pack_lib
from stppo_jax.rollout import prefetch
from stppo_jax.rollout import steps as steps_lib
from stppo_jax.training import checkpoint_state
from stppo_jax.training import run as run_lib
from stppo_jax.training import sft
from stppo_jax.training.building import assembly
from stppo_jax.training.building import engines
from stppo_jax.training.building import model_files
from stppo_jax.training.building import origin
from stppo_jax.training.checks import memory_check
from stppo_jax.training.evaluating import evaluation
from stppo_jax.workdir import run_record


class Trainer(NamedTuple):
  """The objects that the loop works with.

  Attributes:
    learner: annotates and updates.
    step_collector: collects one step, and completes its metrics.
    prefetcher: schedules the collections of steps and returns their results.
    pack: turns trajectories into the arrays of a batch.
    placement: the devices that decode; None with rollout.engine=remote.
    state: the state to go on from.
    reference: weights of the frozen reference; None if the state has them.
  """

  learner: learner_lib.Learner
  step_collector: steps_lib.StepCollector
  prefetcher: prefetch.Prefetcher
  pack: Callable[[Sequence[types.Trajectory]], batch_lib.TokenBatch]
  placement: publish_lib.Placement | None
  state: state_lib.TrainState
  reference: functional.Params | None


def build(config, run: run_lib.Run, *, restart: bool, source: Any) -> Trainer:
  """Builds what the loop works with, and resumes the run.

  Args:
    config: the config of the run.
    run: the run, which has been started.
    restart, source: see `loop.train`.

  Raises:
    Exceptions with an `exit_code`, see `loop.train`.
  """
  with run.abandonable():
    # These checks come first: they must refuse the run before it writes.
    expected = origin.expected(config, source, run.workdir)
    components = assembly.build_components(expected)
    memory_check.check(expected, memory_check.device_memory())
    for line in [*components.notes, *_notes(config, components, run)]:
      print(f'note: {line}', flush=True)
    run.record_config(config, restart=restart)
  with run.abandonable():
    services = run.enter(assembly.build_services(config, components.questions))
  with run.together():
    origin.make_start(config, source, run.workdir, run.hosts)
    sft.make_start(config, run, services)
    started = run_record.with_start(config, run.workdir)
    if started is not config:
      config, components = started, assembly.build_components(started)
    learner, tokenizer = components.learner, components.tokenizer
    with exits.as_misconfigured():
      state, note = origin.with_value(config, learner.start(), run.workdir)
      reference = learner.reference()
      sentences = steps_lib.build_sentences(config, tokenizer)
    collecting = _collecting_services(config, services, components)
    engine = engines.build(
      config, collecting, tokenizer, learner.decoded, components.placement
    )
    evaluator = evaluation.Evaluator(
      config,
      services,
      engines.build_collector(config, services, tokenizer, engine),
      run.show,
      run.hosts,
    )
    run.open(
      config,
      num_steps=config.num_steps,
      tokenizer=tokenizer,
      trajectories=config.writer.trajectories,
    )
    ends = model_files.end_token_ids(config, tokenizer)
    names = ', '.join(f'{i} {tokenizer.decode([i])!r}' for i in ends)
    run.show(f'a turn ends at a stop string or at token {names}')
    step_collector, prefetcher = _build_prefetcher(
      config, collecting, components, engine, run
    )
    run.at_end(prefetcher.close)
    checkpoints = checkpoint_state.TrainCheckpoints(learner, prefetcher)
    state = run.resume(state, checkpoints, note=note)

  def evaluate(state: state_lib.TrainState) -> run_lib.Evaluation:
    def publish():
      # Wait for the collections in flight: they use the same engine, and their
      # counts of the retriever would contain the evaluation's queries.
      prefetcher.drain()
      engines.publish(engine, learner, state, 0)

    is_alone = run.hosts.count == 1
    # All hosts publish together, even if one of them must stop afterwards.
    if not is_alone:
      publish()

    def run_evaluation():
      if is_alone:
        publish()
      scores, trajectories = evaluator.run()
      return evaluator.metrics(scores, trajectories), trajectories

    return run_evaluation

  has_evaluations = config.evaluate.every > 0 and evaluator.has_questions
  run.begin(evaluate, prints_samples=not has_evaluations)
  pack = functools.partial(
    pack_lib.pack,
    length_bucket=assembly.length_unit(config),
    sentences=sentences,
    with_expert_ids=config.updates.routing_replay == 'sampler',
    hosts=run.hosts,
  )
  return Trainer(
    learner,
    step_collector,
    prefetcher,
    pack,
    components.placement,
    state,
    reference,
  )


def _notes(
  config, components: assembly.Components, run: run_lib.Run
) -> Iterator[str]:
  """Yields lines about what devices do, and options that do less than hoped."""
  ahead, learning = config.rollout.steps_ahead, components.learner.mesh.size
  if not run.hosts.is_first:
    return
  if placement := _apart(components):
    collecting = len(placement.collecting)
    yield (
      f'mesh.collect_fraction={config.mesh.collect_fraction}: devices of each '
      f'host: {learning // run.hosts.count} learn, {collecting} collect'
    )
  elif ahead and learning > 1:
    yield (
      f'rollout.steps_ahead={ahead}: the next step is collected between '
      'updates, which saves no time; with mesh.collect_fraction some devices '
      'collect beside them'
    )


def _apart(components: assembly.Components) -> publish_lib.Placement | None:
  """Returns the placement if the devices that collect do not learn."""
  placement = components.placement
  return placement if placement and placement.collecting else None


def _collecting_services(
  config, services: assembly.Services, components: assembly.Components
) -> assembly.Services:
  """Returns the services of collections.

  If steps are collected ahead, and on a thread, they have a loop that can be
  stopped, which ends that thread.
  """
  # If several devices both learn and collect, programs of two threads can
  # deadlock: two devices may get them in different orders, and the collectives
  # of each then wait for the other's.
  is_safe = components.learner.mesh.size == 1 or _apart(components)
  if config.rollout.steps_ahead and is_safe:
    loop = prefetch.StoppableLoop(services.loop)
    return dataclasses.replace(services, loop=loop)
  return services


def _build_prefetcher(
  config,
  services: assembly.Services,
  components: assembly.Components,
  engine: engines.Engine,
  run: run_lib.Run,
) -> tuple[steps_lib.StepCollector, prefetch.Prefetcher]:
  """Builds the prefetcher, with a thread of its own if its loop can stop."""
  learner, rollout, loop = components.learner, config.rollout, services.loop
  collector = engines.build_collector(
    config,
    services,
    components.tokenizer,
    engine,
    group_size=rollout.group_size,
  )
  steps = steps_lib.StepCollector(
    config, services, collector, run.show, run.hosts
  )
  build = functools.partial(
    prefetch.Prefetcher,
    copy_policy=learner.copy_policy,
    steps_ahead=rollout.steps_ahead,
    num_steps=config.num_steps,
    loop=loop if isinstance(loop, prefetch.StoppableLoop) else None,
    old_is_sampled=config.updates.old_policy == 'sampled',
  )
  if placement := _apart(components):

    def collect(step: int):
      # Small programs without devices of their own must not wait in the queue
      # of a device that learns.
      with jax.default_device(placement.collecting[0]):
        return steps.collect(step)

    return steps, build(
      collect,
      functools.partial(engines.adopt, engine),
      send=lambda params: engines.copied(engine, run.state, params),
    )
  return steps, build(
    steps.collect,
    lambda params, version: engines.publish(
      engine, learner, run.state, version, trained=params
    ),
  )
