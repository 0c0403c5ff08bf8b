"""Builds the objects that the training loop works with.

The objects are built once, before the run is recorded in its folder, and no
weight is read. A config that does not fit its files or devices is refused here.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax import types
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import memory
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.rollout import answer_probes
from stppo_jax.rollout import collect
from stppo_jax.rollout import pack as pack_lib
from stppo_jax.rollout import steps as steps_lib
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import checks
from stppo_jax.training import claim
from stppo_jax.training import collecting
from stppo_jax.training import components as components_lib
from stppo_jax.training import model_files
from stppo_jax.training import span
from stppo_jax.workdir import agreement


@dataclasses.dataclass(frozen=True)
class Parts:
  """The objects that the training loop works with.

  Attributes:
    config: the config of the run, with a number of slots that fits in memory.
    tokenizer: the policy's tokenizer.
    learner: annotates batches and updates the models.
    placement: the devices that decode; None if this host does not decode.
    services: questions, environment, retriever and event loop.
    collecting: collects the trajectories of steps, and evaluates policies.
    pack: makes the batch of a step; see `pack_step`.
    notes: lines for the user about the effects of the config; only the first
      host has lines.
  """

  config: Any
  tokenizer: tokenizer_lib.Tokenizer
  learner: learner_lib.Learner
  placement: publish_lib.Placement | None
  services: steps_lib.Services
  collecting: collecting.Collecting
  pack: Callable[..., tuple[batch_lib.TokenBatch, dict[str, float]]]
  notes: Sequence[str]


def build(config, folder: claim.Folder) -> Parts:
  """Builds the objects that the training loop works with.

  Args:
    config: the config of the run; its section `model` has the shape and the
      tokenizer of the weights that the run starts from.
    folder: the run's folder. Services and threads are closed when the folder
      is left.

  Raises:
    Exceptions with an `exit_code`, see `loop.train`.
  """
  hosts = folder.hosts
  with folder.interruptible():
    found = components_lib.build(span.resolved(config, hosts), hosts=hosts)
    if found.tokenizer.prompts.begun_by_tokenizer:
      folder.check_prompts()
    config = found.config
    checks.check_memory(
      config,
      found.learner,
      found.placement,
      memory.device_limit(),
      learns=hosts.learns,
    )
  with folder.interruptible():
    services = folder.enter(
      components_lib.build_services(config, found.questions)
    )
    with exits.as_misconfigured():
      sentences = steps_lib.build_sentences(config, found.tokenizer)
    if hosts.collectors and hosts.learns:
      side = collecting.build_collectors(config, found, services, folder)
    else:
      side = collecting.build(config, found, services, folder)
    # The prefetcher is entered after the services, so it is closed before them:
    # its thread must have ended when the services close their event loop and
    # their connections.
    folder.enter(contextlib.closing(side.prefetcher))
    pack = functools.partial(
      pack_step,
      config=config,
      tokenizer=found.tokenizer,
      learner=found.learner,
      sentences=sentences,
      hosts=hosts,
    )
  return Parts(
    config,
    found.tokenizer,
    found.learner,
    found.placement,
    services,
    side,
    pack,
    [*_notes(config, found, hosts)] * hosts.is_first,
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
  """Returns the batch of a step's trajectories, and metrics.

  With `env.rewards.information_gain`, information gains are computed with the
  policy and added to the rewards of turns. In array names, B stands for
  trajectories and T for turns.

  Args:
    trajectories: this host's trajectories.
    state: the state whose policy computes the information gains.
    step: the training step.
    config: the config of the run.
    tokenizer: the policy's tokenizer.
    learner: computes log-probabilities.
    sentences: see `pack.pack`.
    hosts: the hosts whose rows make a batch; all of them call this function.

  Returns:
    The batch, see `pack.pack`, and metrics of the information gains.

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
  # The shapes are checked before the first compiled program of the step: hosts
  # with different shapes would wait for each other in that program for ever.
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
  # If any host has an answer probe, all hosts run the program that computes the
  # gains, because the program needs every host.
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
  config, found: components_lib.Components, hosts: hosts_lib.Hosts
) -> Iterator[str]:
  """Yields lines for the user about questions, devices, slots, end tokens."""
  yield from (f'note: {line}' for line in found.notes)
  ahead, learning = config.rollout.steps_ahead, found.learner.mesh.size
  num_hosts = hosts.count
  if hosts.collectors:
    yield (
      f'note: mesh.collectors={hosts.collectors}: {num_hosts} of '
      f'{hosts.whole.count} hosts learn'
    )
    num_hosts = hosts.collectors  # only hosts that collect have slots
  elif placement := collecting.apart(found):
    others = len(placement.collecting)
    yield (
      f'note: mesh.collect_fraction={config.mesh.collect_fraction}: devices of '
      f'each host: {learning // num_hosts} learn, {others} collect'
    )
  elif ahead and learning > 1:
    yield (
      f'note: rollout.steps_ahead={ahead}: the next step is collected between '
      'updates, which saves no time; with mesh.collect_fraction some devices '
      'collect while the others update'
    )
  slots = config.rollout.slots
  if 0 < slots < config.rollout.trajectories_per_step // num_hosts:
    yield f'note: each host decodes {slots} trajectories at a time'
  ends = model_files.end_token_ids(config, found.tokenizer)
  names = ', '.join(f'{i} {found.tokenizer.decode([i])!r}' for i in ends)
  yield f'a turn ends at a stop string or at token {names}'
