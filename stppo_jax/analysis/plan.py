"""Plans the memory and communication of an update on devices of another place.

Models are shapes and devices are virtual; the program of the update is the one
that a run would use, laid out and compiled by the compiler for CPUs. The sizes
of parameters and optimiser states, and the collectives, are the same on any
device; temporaries are planned by the CPU compiler and differ on accelerators.

The engine of this host keeps its weights, keys and values all the time, so they
are counted. Batches and the policies of steps that are collected ahead are not.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import cache as cache_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.parallel import program
from stppo_jax.parallel import publish
from stppo_jax.parallel import sharding
from stppo_jax.training import assembly

Tree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
  """The plan of one update; sizes are bytes on one device.

  Attributes:
    axes: the sizes of the mesh axes.
    sizes: name to bytes of everything in memory during an update, the engine
      included. A reference in host memory is left out: it is on the devices
      only before an update.
    gradients: the bytes of the float32 gradients during an update.
    temporaries: the bytes that the compiled update needs beside its arguments,
      gradients included; None if it was lowered only.
    collectives: the collectives of the compiled update; empty if it was lowered
      only.
    operations: the multiplications and additions of its matrix products.
  """

  axes: Mapping[str, int]
  sizes: Mapping[str, int]
  gradients: int
  temporaries: int | None
  collectives: tuple[program.Collective, ...]
  operations: int

  @property
  def total(self) -> int:
    """Returns the bytes at the peak of an update."""
    beside = self.gradients if self.temporaries is None else self.temporaries
    return sum(self.sizes.values()) + beside


def make(
  config,
  *,
  length: int,
  loss_fraction: float,
  compiles: bool,
) -> Plan:
  """Returns the plan of a configuration on all devices.

  Attention is that of the platform: on CPU it needs logits of length x length,
  which the kernels of accelerators do not need.

  Args:
    config: the config of a run; of its model, `config.json` suffices.
    length: the number of tokens of a row.
    loss_fraction: the largest share of a row's tokens that carries loss.
    compiles: whether the update is compiled; False = it is lowered only.

  Raises:
    Misconfigured: the mesh does not divide the model or the rows.
  """
  with assembly.config_errors():
    mesh = assembly.build_mesh(config)
    tokenizer = None
    if not config.model.path:
      questions = assembly.build_questions(config)
      tokenizer = assembly.build_tokenizer(config, questions)
    shape = assembly.build_model_config(config, tokenizer)
    learner = learner_lib.Learner(config, shape, mesh)
    placement = assembly.build_placement(config, shape, mesh)
    assembly.check_batch_sizes(config, shape, mesh, placement)
    packed = _packed(config, shape, length, math.ceil(loss_fraction * length))
    state, reference, lowered = learner.lower_update(packed)
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
  temporaries, collectives, operations = None, (), 0
  if compiles:
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    temporaries = (
      memory.temp_size_in_bytes
      + memory.output_size_in_bytes
      - memory.alias_size_in_bytes
    )
    text = compiled.as_text()
    collectives = tuple(program.collectives(text))
    operations = program.operations(text)
  return Plan(
    axes=dict(mesh.shape),
    sizes={name: size for name, size in sizes.items() if size},
    gradients=gradients,
    temporaries=temporaries,
    collectives=collectives,
    operations=operations,
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


def _packed(
  config, shape: model_config.ModelConfig, length: int, num_losses: int
) -> batch_lib.TokenBatch:
  """Returns the shapes of a batch that `pack` would make."""
  rows = config.rollout.trajectories_per_step

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
