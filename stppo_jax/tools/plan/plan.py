"""Plans the memory, the communication and the time of a run on other devices.

Models are shapes and devices are virtual. With `programs`, those that a run
would use are compiled (`plan_programs.py`): for a TPU slice that is not there
(`parallel/topology.py`), or for CPUs. The sizes of parameters and optimiser
states, and the collectives, are the same on any device; temporaries that the
CPU compiler plans differ on accelerators. Without `programs`, temporaries are
estimated (`plan_memory.py`).

The engine of this host keeps its weights, keys and values all the time, so they
are counted: on all devices, or on those that only collect. The policies of
steps that are collected ahead are not counted where all devices learn, nor are
batches without a compiled program.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import roofline
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import topology as topology_lib
from stppo_jax.tools.plan import memory as memory_lib
from stppo_jax.tools.plan import programs as programs_lib
from stppo_jax.training import step_work
from stppo_jax.training.building import assembly
from stppo_jax.training.checks import batch_sizes

Tree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
  """The plan of a run's programs; sizes are bytes on one device.

  Attributes:
    topology: the devices.
    axes: the sizes of the mesh axes.
    num_hosts: the number of hosts.
    sizes: name to bytes of everything in memory during an update, the engine
      included. A reference in host memory is left out: it is on the devices
      only before an update.
    collecting: name to bytes of what a device holds that only collects.
    copied: bytes of keys and values that decode copies while few slots are
      active, on a device that collects, beside what the compiled program needs.
    estimated: name to bytes of the temporaries of an update, by formula.
    programs: the programs that were compiled, by name.
    work: the sizes of a step.
    phases: the phases of a step by name, see `roofline.phases`.
    num_steps: the steps of the run.
    limit: the bytes of a device's memory.
  """

  topology: topology_lib.Topology
  axes: Mapping[str, int]
  num_hosts: int
  sizes: Mapping[str, int]
  collecting: Mapping[str, int]
  copied: int
  estimated: Mapping[str, int]
  programs: Mapping[str, programs_lib.Cost]
  work: roofline.Work
  phases: Mapping[str, roofline.Phase]
  num_steps: int
  limit: float

  @property
  def temporaries(self) -> dict[str, int]:
    """The bytes that programs need beside `sizes`, by their names.

    Of compiled programs these are temporaries, a batch, and what the compiler
    pads; without them, the temporaries of an update are estimated.
    """
    if self.programs:
      held = {**self.sizes, **self.collecting}
      return {name: cost.beside(held) for name, cost in self.programs.items()}
    return {'update': sum(self.estimated.values())}

  @property
  def total(self) -> int:
    """The bytes at the peak of a program, on the device that holds most."""
    held = sum(self.sizes.values())
    collecting = sum((self.collecting or self.sizes).values())
    peaks = [collecting + self.copied]
    for name, temporaries in self.temporaries.items():
      if name in roofline.COLLECTING:
        copied = self.copied if name == 'decode' else 0
        peaks.append(collecting + temporaries + copied)
      else:
        peaks.append(held + temporaries)
    return max(peaks)

  @property
  def problems(self) -> list[str]:
    """A line for each program that does not fit by itself."""
    return [
      f'{name}: {cost.problem}'
      for name, cost in self.programs.items()
      if cost.problem
    ]

  @property
  def fits(self) -> bool:
    """Whether all of it fits in the memory of a device."""
    return self.total <= self.limit and not self.problems

  @property
  def seconds(self) -> tuple[float, float]:
    """The seconds of a step: at the limits of the devices, and expected."""
    sides = {True: [0.0, 0.0], False: [0.0, 0.0]}  # collecting, learning
    for name, phase in self.phases.items():
      side = sides[name in roofline.COLLECTING]
      side[0] += phase.bound
      side[1] += phase.expected
    joined = max if self.collecting else lambda *both: sum(both)
    bound, expected = zip(*sides.values())
    return joined(*bound), joined(*expected)


def make(
  config,
  *,
  length: int,
  loss_fraction: float,
  programs: Sequence[str] = (),
  topology: topology_lib.Topology | None = None,
  memory: float = 0.0,
) -> Plan:
  """Returns the plan of a configuration on all devices.

  Args:
    config: the config of a run; of its model, `config.json` suffices.
    length: the number of tokens of a row.
    loss_fraction: the largest share of a row's tokens that carries loss.
    programs: the keys of `plan_programs.PROGRAMS` to compile; those of the
      engine are left out where there is none on these devices.
    topology: the devices; None: those of this process.
    memory: GiB of a device's memory; 0: that of the topology.

  Raises:
    Misconfigured: there is no such slice, the mesh does not divide the model
      or the rows, or a program does not compile.
  """
  with exits.as_misconfigured():
    if topology is None:
      topology = topology_lib.find(f'cpu:{jax.device_count()}')
      devices = None
    elif not programs:
      devices = topology_lib.virtual(topology)
    elif topology.platform == 'tpu':
      devices = topology_lib.devices(topology)
    else:
      devices = None
    mesh = assembly.build_mesh(config, devices)
    tokenizer = None
    if not config.model.path:
      questions = assembly.build_questions(config)
      tokenizer = assembly.build_tokenizer(config, questions)
    shape = assembly.build_model_config(config, tokenizer, mesh)
    learner = learner_lib.Learner(config, shape, mesh)
    placement = assembly.build_placement(config, shape, mesh, devices)
    batch_sizes.check(config, shape, mesh, placement)
    packed = packed_shapes(config, shape, length, loss_fraction)
    state, reference = learner.abstract_start()
  models = {'policy': state.policy, 'value': state.value}
  sizes = {
    f'{name} {label}': memory_lib.bytes_per_device(getattr(model, attribute))
    for name, model in models.items()
    if model is not None
    for label, attribute in (
      ('parameters', 'params'),
      ('optimizer', 'optimizer'),
    )
  }
  sizes['frozen base'] = memory_lib.bytes_per_device(state.frozen)
  if config.model.reference_memory == 'device':
    sizes['reference'] = memory_lib.bytes_per_device(reference)
  engine, copied = {}, 0
  if placement is not None:
    engine = memory_lib.engine_sizes(config, learner.policy, placement)
    cache = engine[memory_lib.CACHE]
    copied = memory_lib.copied(
      config,
      learner.policy,
      placement,
      cache,
      is_compiled='decode' in programs,
    )
  is_apart = placement is not None and placement.collecting
  trained = sum(
    sizes[f'{name} parameters'] for name, m in models.items() if m is not None
  )
  axes = dict(mesh.shape)
  assert packed.loss_positions_BM is not None  # `packed_shapes` has them
  work = step_work.build(
    config,
    learner,
    placement,
    engine,
    length=packed.tokens_BL.shape[1],
    losses=packed.loss_positions_BM.shape[1],
  )
  with exits.as_misconfigured():
    costs = programs_lib.compile_all(
      programs,
      programs_lib.Subject(config, learner, placement, packed),
      clock=topology.limits.clock,
    )
  return Plan(
    topology=topology,
    axes=axes,
    num_hosts=mesh_lib.num_hosts(mesh),
    sizes={
      name: size
      for name, size in (sizes | ({} if is_apart else engine)).items()
      if size
    },
    collecting=memory_lib.collecting(config, engine) if is_apart else {},
    copied=copied,
    estimated=memory_lib.estimate_temporaries(
      work, trained, head_chunk=config.updates.head_chunk
    ),
    programs=costs,
    work=work,
    phases=roofline.phases(work, topology),
    num_steps=config.num_steps,
    limit=(memory or topology.limits.memory) * topology_lib.GIB,
  )


def packed_shapes(
  config, shape: model_config.ModelConfig, length: int, loss_fraction: float
) -> batch_lib.TokenBatch:
  """Returns the shapes of a batch that `pack` would make.

  Args:
    config: the config of a run.
    shape: the shape of its models.
    length: the number of tokens of a row.
    loss_fraction: the largest share of a row's tokens that carries loss.
  """
  rows = config.rollout.trajectories_per_step
  num_losses = math.ceil(loss_fraction * length)

  def per_row(dtype, *shape: int) -> Any:  # a shape in place of an array
    return jax.ShapeDtypeStruct((rows, *shape), dtype)

  ids_BL, numbers_BL = per_row(jnp.int32, length), per_row(jnp.float32, length)
  by_sentence = config.algorithm.ratio.level == 'sentence'
  expert_ids = None
  if config.updates.routing_replay == 'sampler':
    expert_ids = per_row(
      jnp.int16, length, shape.num_layers, shape.num_experts_per_tok
    )
  return batch_lib.TokenBatch(
    tokens_BL=ids_BL,
    lengths_B=per_row(jnp.int32),
    turn_ids_BL=ids_BL,
    loss_mask_BL=per_row(jnp.bool_, length),
    sampler_logprobs_BL=numbers_BL,
    rewards_BL=numbers_BL,
    group_ids_B=per_row(jnp.int32),
    sentence_ids_BL=ids_BL if by_sentence else None,
    state_ids_BL=ids_BL,
    loss_positions_BM=per_row(jnp.int32, num_losses),
    expert_ids=expert_ids,
  )
