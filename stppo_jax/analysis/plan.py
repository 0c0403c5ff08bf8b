"""Plans the memory and communication of a run on devices of another place.

Models are shapes and devices are virtual; the programs are those that a run
would use, laid out and compiled for the devices: for a TPU slice that is not
there (`parallel/topology.py`), or for CPUs. The sizes of parameters and
optimiser states, and the collectives, are the same on any device; temporaries
that the CPU compiler plans differ on accelerators.

The engine of this host keeps its weights, keys and values all the time, so they
are counted. Batches and the policies of steps that are collected ahead are not.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import cache as cache_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import program
from stppo_jax.parallel import publish
from stppo_jax.parallel import sharding
from stppo_jax.parallel import topology as topology_lib
from stppo_jax.training import assembly

Tree = Any


# The programs that a plan may compile, by name: functions of a learner and the
# shapes of a packed batch that lower them.
PROGRAMS: Mapping[str, Callable[[learner_lib.Learner, Any], Any]] = {
  'annotate': learner_lib.Learner.lower_annotate,
  'update': learner_lib.Learner.lower_update,
}


class Cost(NamedTuple):
  """The memory, traffic and work of a compiled program on one device.

  Attributes:
    temporaries: the bytes that it needs beside its arguments.
    collectives: its collectives.
    operations: the multiplications and additions of its matrix products.
    seconds: the time that the compiler for TPU estimates for its kernels, which
      is good for comparing programs; 0 on other platforms.
    problem: why it does not fit; '' if it does. The other numbers are then 0.
  """

  temporaries: int = 0
  collectives: tuple[program.Collective, ...] = ()
  operations: int = 0
  seconds: float = 0.0
  problem: str = ''


@dataclasses.dataclass(frozen=True)
class Plan:
  """The plan of a run's programs; sizes are bytes on one device.

  Attributes:
    axes: the sizes of the mesh axes.
    platform: the platform of the devices.
    sizes: name to bytes of everything in memory during an update, the engine
      included. A reference in host memory is left out: it is on the devices
      only before an update.
    gradients: the bytes of the float32 gradients during an update.
    programs: the programs that were compiled, by name.
  """

  axes: Mapping[str, int]
  platform: str
  sizes: Mapping[str, int]
  gradients: int
  programs: Mapping[str, Cost]

  @property
  def total(self) -> int:
    """Returns the bytes at the peak of a program."""
    beside = [cost.temporaries for cost in self.programs.values()]
    return sum(self.sizes.values()) + max(beside, default=self.gradients)

  @property
  def problems(self) -> list[str]:
    """Returns a line for each program that does not fit by itself."""
    return [
      f'{name}: {cost.problem}'
      for name, cost in self.programs.items()
      if cost.problem
    ]


def make(
  config,
  *,
  length: int,
  loss_fraction: float,
  programs: Sequence[str] = (),
  topology: str = '',
) -> Plan:
  """Returns the plan of a configuration on all devices.

  Args:
    config: the config of a run; of its model, `config.json` suffices.
    length: the number of tokens of a row.
    loss_fraction: the largest share of a row's tokens that carries loss.
    programs: the keys of `PROGRAMS` to compile.
    topology: the name of a TPU slice, see `topology.devices`; '': the devices
      of this process.

  Raises:
    Misconfigured: there is no such slice, or the mesh does not divide the model
      or the rows.
  """
  with assembly.config_errors():
    devices = topology_lib.devices(topology) if topology else None
    mesh = assembly.build_mesh(config, devices)
    tokenizer = None
    if not config.model.path:
      questions = assembly.build_questions(config)
      tokenizer = assembly.build_tokenizer(config, questions)
    shape = assembly.build_model_config(config, tokenizer, mesh)
    learner = learner_lib.Learner(config, shape, mesh)
    placement = assembly.build_placement(config, shape, mesh)
    assembly.check_batch_sizes(config, shape, mesh, placement)
    packed = packed_shapes(config, shape, length, loss_fraction)
    state, reference = learner.abstract_start()
  models = {'policy': state.policy, 'value': state.value}
  sizes = {
    f'{name} {label}': _bytes_per_device(getattr(model, attribute))
    for name, model in models.items()
    if model is not None
    for label, attribute in (
      ('parameters', 'params'),
      ('optimizer', 'optimizer'),
    )
  }
  sizes['frozen base'] = _bytes_per_device(state.frozen)
  if config.model.reference_memory == 'device':
    sizes['reference'] = _bytes_per_device(reference)
  if placement is not None:
    sizes |= engine_sizes(config, learner.policy, placement)
  gradients = sum(
    sizes[f'{name} parameters'] for name, m in models.items() if m is not None
  )
  clock = topology_lib.CLOCK[topology_lib.chip(topology)] if topology else 1.0
  return Plan(
    axes=dict(mesh.shape),
    platform=mesh_lib.platform(mesh),
    sizes={name: size for name, size in sizes.items() if size},
    gradients=gradients,
    programs={
      name: _cost(PROGRAMS[name](learner, packed), clock) for name in programs
    },
  )


def _cost(lowered, clock: float) -> Cost:
  """Returns the cost of a lowered program.

  Args:
    lowered: the program.
    clock: cycles of a device per second.
  """
  try:
    compiled = topology_lib.compiled(lowered)
  except topology_lib.DoesNotFit as error:
    return Cost(problem=str(error))
  memory = compiled.memory_analysis()
  text = compiled.as_text()
  return Cost(
    memory.temp_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes,
    tuple(program.collectives(text)),
    program.operations(text),
    program.estimated_cycles(text) / clock,
  )


def engine_sizes(
  config, policy: functional.Model, placement: publish.Placement
) -> dict[str, int]:
  """Returns the bytes of the engine on one device, by name.

  These are its part of the weights, in the dtype of the computation, and its
  part of the keys and values of all slots.
  """
  rollout = config.rollout
  weights = jax.eval_shape(
    lambda key: precision.cast(policy.init(key), policy.config.dtype),
    jax.random.key(0),
  )
  blocks = rollout.cache_blocks
  cache = jax.eval_shape(
    lambda: cache_lib.empty(
      policy.config,
      rollout.slots or rollout.trajectories_per_step,
      (-(-config.env.max_length // blocks),) * blocks,
    )
  )
  layouts = {
    'weights of the engine': (
      weights,
      sharding.param_shardings(weights, placement.mesh),
    ),
    'keys and values of the engine': (
      cache,
      cache_lib.shardings(policy.config, placement.mesh, blocks),
    ),
  }
  return {
    name: _bytes_per_device(jax.tree.map(_with_layout, *tree_and_layout))
    for name, tree_and_layout in layouts.items()
  }


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


def _with_layout(leaf: Any, layout: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)


def _bytes_per_device(tree: Tree) -> int:
  """Returns the bytes on one device of a tree of shapes with layouts."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )
