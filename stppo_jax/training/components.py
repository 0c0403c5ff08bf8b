"""Builds the components and services of a run from its config.

`Components` need no weights and no server. They are built before the run is
recorded and before the run waits for a server, so that every error in a config,
its files or the devices is reported at once. `Services` are the questions, the
environment, an event loop and, if one is needed, the client of a retriever.

Builders read the keys of the config, and pass the values of the keys on. So
packages such as `models`, `sampling` and `retrieval` do not read the config.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import math
from typing import Any

import jax

from stppo_jax import exits
from stppo_jax.data import kinds
from stppo_jax.data import questions as questions_lib
from stppo_jax.envs import environments
from stppo_jax.envs import reward_function
from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import cache as cache_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.parallel import distributed
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import memory
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.retrieval import client
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import server
from stppo_jax.rollout import event_loop
from stppo_jax.rollout import pack
from stppo_jax.rollout import steps
from stppo_jax.sampling import engine_rules
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import checks
from stppo_jax.training import model_files
from stppo_jax.workdir import run_record


@dataclasses.dataclass(frozen=True)
class Components:
  """The components of a config that fits its files and the devices.

  Attributes:
    config: the config, with a number of slots that fits in memory, see
      `checks.sized`.
    questions: the data set.
    tokenizer: the policy's tokenizer.
    learner: the models and their programs; no weight is read yet.
    placement: the devices that decode; None if this host does not decode.
    notes: lines about questions that the run cannot fully use.
  """

  config: Any
  questions: questions_lib.Questions
  tokenizer: tokenizer_lib.Tokenizer
  learner: learner_lib.Learner
  placement: publish_lib.Placement | None
  notes: Sequence[str]


def build(
  config,
  *,
  imitates: bool = False,
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> Components:
  """Builds and checks the components, without weights and without a retriever.

  Args:
    config: the config of a run.
    imitates: whether the run belongs to the command `sft`.
    hosts: the hosts of the run; some may only collect.

  Raises:
    Misconfigured: the config does not fit its files or the devices.
  """
  with exits.as_misconfigured():
    questions = build_questions(config)
    tokenizer = model_files.build_tokenizer(config, questions)
    model_files.check(config, tokenizer)
    if hosts.learns:
      mesh = build_mesh(config)
    else:
      # This host only collects. Its learner never gets weights and only
      # describes the model that is decoded, so a mesh of one device is enough.
      mesh = mesh_lib.make_mesh(
        data=1, fsdp=1, tensor=1, devices=jax.local_devices()[:1]
      )
    shape = model_files.build_model_config(config, tokenizer, mesh)
    learner, placement = build_learner(
      config, shape, mesh, imitates=imitates, hosts=hosts
    )
    notes = checks.check_data(config, questions, tokenizer)
  config = checks.sized(config, learner, placement, memory.device_limit())
  return Components(config, questions, tokenizer, learner, placement, notes)


def build_questions(config) -> questions_lib.Questions:
  """Returns the data set of a config."""
  return kinds.KINDS[config.data.name].load(config.data, seed=config.seed)


@contextlib.contextmanager
def build_services(
  config, questions: questions_lib.Questions
) -> Iterator[steps.Services]:
  """Yields a run's services, with a retriever if the environment needs one.

  Raises:
    Misconfigured: passages cannot be read, or an option of the environment has
      a bad value.
    RetrieverUnreachable: no server answers within retrieval.ready_timeout.
    RewardFunctionFailed: the user's reward function fails.
  """
  with contextlib.ExitStack() as stack:
    with exits.as_misconfigured():
      kind = environments.find(config.env.name)
      loop = stack.enter_context(event_loop.EventLoop())
      retriever = None
      if kind.needs_retriever:
        connected = _connected(config, questions, loop)
        retriever = stack.enter_context(connected)
      environment = kind.from_options(config.env.to_dict(), retriever)
      name = config.env.reward_function
      if name:
        # The function is tried once here, so that its failure is reported now,
        # and not after the first collection.
        question = questions.train(0, 1, resample_round=0)[0]
        reward_function.try_once(name, environment, question)
    yield steps.Services(questions, environment, retriever, loop)


def build_mesh(config, devices: Sequence | None = None) -> jax.sharding.Mesh:
  """Returns the mesh of training.

  Args:
    config: the config of a run.
    devices: the devices of the run, some of which may only collect; None stands
      for all devices of jax.

  Raises:
    ValueError: the axes do not fit the devices.
  """
  mesh = mesh_lib.make_learning_mesh(**config.mesh, devices=devices)
  return distributed.by_host(mesh)


def build_placement(
  config,
  shape: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  devices: Sequence | None = None,
  host: int | None = None,
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> publish_lib.Placement | None:
  """Returns the placement of the engine: the devices that decode.

  The result is None with rollout.engine=remote, and on a host that learns while
  other hosts only collect.

  Args:
    config: the config of a run.
    shape: the config of the policy's model.
    mesh: the mesh of training.
    devices: see `build_mesh`. A plan passes the devices for which it compiles
      programs; this machine need not have them.
    host: the number of the host that decodes. None stands for this process, or
      for the host of the last device if `devices` is given.
    hosts: see `build`. In a plan with hosts that only collect, `devices` has
      only the devices that learn. The devices of the last host then also stand
      for the devices of a host that collects.

  Raises:
    ValueError: rollout.tensor does not divide the devices or the model.
  """
  if config.rollout.engine != 'local' or (hosts.collectors and hosts.learns):
    return None
  default = mesh.shape['tensor'] if hosts.learns else config.mesh.tensor
  tensor = config.rollout.tensor or max(default, 1)
  collectors = config.mesh.collectors if devices else hosts.collectors
  collecting = devices or jax.devices()
  if not collectors:
    fraction = config.mesh.collect_fraction
    _, collecting = mesh_lib.divide(collecting, fraction)
  # For a plan, programs are compiled for the last host: on a v5e or v6e slice
  # of several hosts, libtpu 0.0.42 fails with an internal error for the first
  # host, but not for the other hosts.
  if host is None:
    host = devices[-1].process_index if devices else jax.process_index()
  here = tuple(d for d in collecting if d.process_index == host)
  spans = config.rollout.span == 'slice' and mesh_lib.num_hosts(mesh) > 1
  try:
    placement = publish_lib.Placement(
      mesh, tensor, here, host, spans, collectors
    )
    functional.Model(shape, 'vocabulary', mesh=placement.mesh)
  except ValueError as error:
    raise ValueError(f'rollout.tensor={tensor}: {error}') from error
  return placement


def build_learner(
  config,
  shape: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  devices: Sequence | None = None,
  *,
  imitates: bool = False,
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> tuple[learner_lib.Learner, publish_lib.Placement | None]:
  """Returns a run's learner, and the placement of the engine.

  With adapters, the devices must gather the frozen base. If the gathered base
  fits in memory beside the other arrays of learning and the activations, each
  program of the learner gathers the base once. Otherwise each pass gathers the
  base layer by layer.

  Args:
    config, shape, mesh, devices: see `build_placement`.
    imitates: see `check_sizes`.
    hosts: see `build_placement`.

  Raises:
    ValueError: see `Learner`, `build_placement` and `check_sizes`.
  """
  learner = learner_lib.Learner(config, shape, mesh)
  placement = build_placement(config, shape, mesh, devices, hosts=hosts)
  check_sizes(config, shape, mesh, placement, imitates=imitates)
  if config.model.lora.rank:
    # A learner holds only the shapes of arrays, so a second learner that
    # gathers the base costs nothing. The second learner is used if its arrays
    # leave enough memory free, see `memory.leaves_room`.
    gathers = learner_lib.Learner(config, shape, mesh, gathers_base=True)
    held = checks.held_memory(config, gathers, placement)
    if memory.leaves_room(mesh, held.learns + held.gradients + held.gathered):
      learner = gathers
  return learner, placement


def length_unit(config) -> int:
  """Returns a number of tokens that divides the row length of every batch."""
  return pack.unit(
    config.rollout.length_bucket, max_length=config.env.max_length
  )


def row_length(config) -> int:
  """Returns the number of tokens of a row of the learner's forward pass."""
  return config.updates.row_length or config.env.max_length


# The number of characters to which a passage is cut, for each token that an
# observation may have.
_CHARS_PER_TOKEN = 32


@contextlib.contextmanager
def _connected(
  config, questions: questions_lib.Questions, loop: event_loop.EventLoop
) -> Iterator[client.HttpRetriever]:
  """Yields a client of a retriever that is ready for queries.

  If the config has no URL of a retriever, the retriever runs in this process.

  Raises:
    ValueError, OSError: passages cannot be read.
    RetrieverUnreachable: no server answers within retrieval.ready_timeout.
  """
  c = config.retrieval
  with contextlib.ExitStack() as stack:
    url = c.url
    if not url:
      embedded = server.embedded(
        questions.passages(), world_passages=questions.world_passages
      )
      url = stack.enter_context(embedded).url
    retriever = client.HttpRetriever(
      url,
      dialect=dialects.DIALECTS[c.dialect],
      topk=c.topk,
      timeout=c.timeout,
      retries=c.retries,
      ready_timeout=c.ready_timeout,
      max_failure_rate=c.max_failure_rate,
      max_queries_per_request=c.max_queries_per_request,
      # A token has about four characters, so an observation has no room for
      # the characters that are cut off here.
      max_passage_chars=_CHARS_PER_TOKEN * config.env.max_observation_tokens,
    )
    # Only the event loop that opened the connections may close them.
    stack.callback(lambda: loop.run(retriever.close()))
    loop.run(retriever.wait_until_ready())
    yield retriever


def check_sizes(
  config,
  shape: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  placement: publish_lib.Placement | None,
  *,
  imitates: bool = False,
) -> None:
  """Checks that batch sizes, slots, pages and lanes fit hosts and devices.

  Args:
    config: the config of a run.
    shape: the config of the policy's model.
    mesh: the mesh of training.
    placement: the devices that decode; None if this host does not decode.
    imitates: whether the run belongs to the command `sft`. If a run of `train`
      begins with a supervised start, `sft.batch_size` is checked anyway.

  Raises:
    ValueError: a value does not fit; the message has a line for each such
      value.
  """
  rollout, updates = config.rollout, config.updates
  trained = {
    'rollout.trajectories_per_step': rollout.trajectories_per_step,
    'updates.minibatch_size': updates.minibatch_size,
    'updates.microbatch_size': updates.microbatch_size,
  }
  if imitates or run_record.imitates(config):
    trained['sft.batch_size'] = config.sft.batch_size
  # All errors are collected and reported together, so that a user need not
  # start the run once for each of them.
  lines = indivisible(trained, mesh)
  hosts, which = mesh_lib.num_hosts(mesh), 'hosts'
  if placement is not None and placement.collectors:
    hosts, which = placement.collectors, 'hosts that collect'
  if rollout.trajectories_per_step % (hosts * rollout.group_size):
    lines['hosts'] = (
      f'rollout.trajectories_per_step={rollout.trajectories_per_step}: must be '
      f'a multiple of {hosts * rollout.group_size}, which is a group of '
      f'rollout.group_size={rollout.group_size} for each of {hosts} {which}'
    )
  if hosts > 1 and rollout.engine == 'remote':
    lines['engine'] = f"rollout.engine=remote: must be 'local' on {hosts} hosts"
  if placement is not None:
    slots = 'slots' if rollout.slots else 'trajectories_per_step'
    shards = cache_lib.row_shards_of_host(shape, placement.mesh)
    if num_slots(config, hosts) % shards:
      lines[f'rollout.{slots}'] = (
        f'rollout.{slots}={rollout[slots]}: must be a multiple of {shards}, '
        'the number of devices of this host that share the slots'
      )
    size = engine_rules.tokens_per_page(
      rollout.page_size, config.env.max_length
    )
    problem = engine_rules.pages_problem(
      rollout.pages,
      parts=shards * rollout.lanes,
      pages_per_row=-(-config.env.max_length // size),
    )
    if problem:
      lines['rollout.pages'] = f'rollout.pages={rollout.pages}: {problem}'
    problem = engine_rules.devices_problem(rollout.lanes, placement.mesh.size)
    if problem:
      lines['rollout.lanes'] = f'rollout.lanes={rollout.lanes}: {problem}'
  if lines:
    raise ValueError('\n'.join(lines.values()))


def indivisible(
  sizes: Mapping[str, int], mesh: jax.sharding.Mesh
) -> dict[str, str]:
  """Returns a line for each batch size that the mesh cannot divide equally.

  Args:
    sizes: batch sizes in rows, by their config keys.
    mesh: the mesh of training.

  Returns:
    The lines, by config key.
  """
  shards = math.prod(mesh.shape[axis] for axis in mesh_lib.BATCH_AXES)
  return {
    key: f'{key}={size}: must be a multiple of the {shards} devices of the '
    'axes data, fsdp and expert'
    for key, size in sizes.items()
    if size % shards
  }


def num_slots(config, hosts: int) -> int:
  """Returns the number of slots of each of `hosts` hosts.

  If rollout.slots is 0, a host has a slot for each trajectory that it collects.
  """
  rollout = config.rollout
  return rollout.slots or rollout.trajectories_per_step // hosts
