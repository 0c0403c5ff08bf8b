"""Plans the memory, the communication and the time of a run on other devices.

Models have shapes but no arrays, and devices are virtual. A plan may compile
the programs of a run (`tools/plan/programs.py`), for a TPU slice that need not
exist (`parallel/topology.py`) or for CPUs. The sizes of parameters and
optimizer states, and the collectives, are the same on all platforms, but the
temporaries of a program depend on the compiler. If no program is compiled, a
formula estimates the temporaries.

A device collects and learns in turn, and the phase that needs more memory
counts: the engine holds its weights and KV cache only while it collects, and
temporaries exist only while a program runs. With `rollout.steps_ahead` the two
phases overlap, and the engine is counted in both, but the programs of a device
still run one by one. Batches are counted only if programs are compiled.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax.data import kinds
from stppo_jax.models import config as model_config
from stppo_jax.models import flops
from stppo_jax.models import roofline
from stppo_jax.parallel import memory
from stppo_jax.parallel import topology as topology_lib
from stppo_jax.tools.plan import programs as programs_lib
from stppo_jax.training import checks
from stppo_jax.training import components
from stppo_jax.training import metrics
from stppo_jax.training import model_files

Tree = Any


@dataclasses.dataclass(frozen=True)
class Plan:
  """The planned memory and time of a run; sizes are bytes on one device.

  Attributes:
    topology: the devices.
    axes: the size of each mesh axis.
    slots: the number of trajectories that each host decodes at a time; 0 with
      rollout.engine=remote.
    collectors: the number of hosts that only collect. Each of them has as many
      devices as a host that learns.
    held: the bytes that the run holds, without the temporaries of programs.
    estimated: the bytes of each part of an update's temporaries, by the name of
      the part, as a formula estimates them.
    programs: the costs of the compiled programs, by name.
    work: the sizes that the phases of a step depend on, see `roofline.Work`.
    phases: the phases of a step by name, see `roofline.phases`.
    num_steps: the number of steps of the run.
    asks_for_gains: whether turns are rewarded for information gains.
    limit: the bytes of a device's memory.
  """

  topology: topology_lib.Topology
  axes: Mapping[str, int]
  slots: int
  collectors: int
  held: memory.Held
  estimated: Mapping[str, int]
  programs: Mapping[str, programs_lib.Cost]
  work: roofline.Work
  phases: Mapping[str, roofline.Phase]
  num_steps: int
  asks_for_gains: bool
  limit: float

  @property
  def num_chips(self) -> int:
    """The number of chips, with the chips of hosts that only collect."""
    beside = self.collectors * self.topology.per_host
    return self.topology.num_chips + beside // self.topology.limits.per_chip

  @property
  def temporaries(self) -> dict[str, int]:
    """Returns the bytes that each program needs beside the bytes in `held`.

    For a compiled program, these are its temporaries, its batch and the padding
    of the compiler. If no program is compiled, there is only the estimate for
    an update.
    """
    if self.programs:
      return {
        name: cost.beside(
          self.held.collecting
          if name in roofline.COLLECTING
          else self.held.sizes
        )
        for name, cost in self.programs.items()
      }
    return {'update': sum(self.estimated.values())}

  @property
  def total(self) -> int:
    """Returns the bytes at the peak, on the device that holds most."""
    # Programs run one after the other. So the peak is the largest sum of a
    # program's temporaries and the bytes that the run holds at that time. Only
    # decode copies pages of the KV cache.
    peaks = [self.held.decodes]
    for name, needed in self.temporaries.items():
      base = self.held.learns
      if name in roofline.COLLECTING:
        base = self.held.decodes
        base -= 0 if name == 'decode' else self.held.copied
      peaks.append(base + needed)
    return max(peaks)

  @property
  def problems(self) -> list[str]:
    """Returns a line for each program that exceeds the memory by itself."""
    return [
      f'{name}: {cost.problem}'
      for name, cost in self.programs.items()
      if cost.problem
    ]

  @property
  def fits(self) -> bool:
    """Returns whether the run fits in the memory of a device."""
    return self.total <= self.limit and not self.problems

  @property
  def seconds(self) -> tuple[float, float]:
    """Returns the lower bound and the expected number of seconds of a step."""
    # The key True is for phases that collect, and False for all other phases.
    # The values are the least and the expected seconds.
    sides = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for name, phase in self.phases.items():
      side = sides[name in roofline.COLLECTING]
      side[0] += phase.bound
      side[1] += phase.expected
    # Devices that only collect work at the same time as the devices that learn.
    # Without such devices, the same devices collect and learn in turn.
    joined = max if self.work.collectors else lambda *both: sum(both)
    bound, expected = zip(*sides.values())
    return joined(*bound), joined(*expected)


def make(
  config,
  *,
  length: int,
  loss_fraction: float,
  programs: Sequence[str] = (),
  topology: topology_lib.Topology | None = None,
  gib: float = 0.0,
) -> Plan:
  """Returns the plan of a run on some devices.

  Args:
    config: the config of the run. Of the files of its model, only `config.json`
      is needed.
    length: the number of tokens of a row.
    loss_fraction: the largest share of a row's tokens that carries loss.
    programs: the keys of `programs.PROGRAMS` to compile. Programs of the engine
      are left out if the engine is not on these devices.
    topology: the devices; None for the devices of this process.
    gib: the GiB of a device's memory; 0 for the memory that the topology has.

  Raises:
    Misconfigured: there is no such TPU slice, the mesh does not divide the
      model or the rows, or a program does not compile.
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
    mesh = components.build_mesh(config, devices)
    # A new model takes the size of its vocabulary from the tokenizer. For a
    # model in a directory, config.json has this size and no tokenizer is
    # needed.
    tokenizer = None
    is_known = config.model.tokenizer_path or (
      kinds.KINDS[config.data.name].vocabulary is not None
    )
    if is_known and not config.model.path:
      tokenizer = model_files.build_tokenizer(config, None)
    shape = model_files.build_model_config(config, tokenizer, mesh)
    learner, placement = components.build_learner(
      config, shape, mesh, devices or jax.devices()
    )
    packed = packed_shapes(config, shape, length, loss_fraction)
  limit = (gib or topology.limits.memory) * memory.GIB
  config = checks.sized(config, learner, placement, limit)
  held = checks.held_memory(config, learner, placement)
  if placement is not None and 'decode' in programs:
    # The cost of decode includes the copied pages of the KV cache.
    held = held._replace(copied=0)
  axes = dict(mesh.shape)
  assert packed.loss_positions_BM is not None  # `packed_shapes` sets this field
  work = metrics.work(
    config,
    learner,
    placement,
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
    slots=0
    if placement is None
    else components.num_slots(config, placement.hosts),
    collectors=config.mesh.collectors,
    held=held,
    estimated=estimated_temporaries(
      work, held, head_chunk=config.updates.head_chunk
    ),
    programs=costs,
    work=work,
    phases=roofline.phases(work, topology),
    num_steps=config.num_steps,
    asks_for_gains=bool(config.env.rewards.information_gain),
    limit=limit,
  )


def packed_shapes(
  config, shape: model_config.ModelConfig, length: int, loss_fraction: float
) -> batch_lib.TokenBatch:
  """Returns the shapes of a batch that `pack` would make.

  B trajectories, L tokens, M positions of the loss mask.

  Args:
    config: the config of a run.
    shape: the shape of the run's models.
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
    _, layers = shape.stacks['layers']
    expert_ids = per_row(jnp.int16, length, layers, shape.num_experts_per_tok)
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


def estimated_temporaries(
  work: roofline.Work, held: memory.Held, *, head_chunk: int
) -> dict[str, int]:
  """Returns the bytes of an update's temporaries on one device, by formula.

  For dense models, the training state and these temporaries together are within
  5 % of the peak that the compiler for TPU plans.

  Args:
    work: the sizes that a step depends on, see `roofline.Work`.
    held: the bytes that one device holds, see `memory.Held`.
    head_chunk: the number of tokens whose logits are in memory at the same
      time; 0 for all tokens.
  """
  trained, shape, tensor = held.gradients, work.shape, work.axes['tensor']
  size, rows = work.itemsize, work.rows_per_device
  tokens = rows * work.length
  queries = shape.num_heads * shape.head_dim
  keys = 2 * shape.num_kv_heads * shape.head_dim
  mlp = max(flops.mlp_width(layer) for layer, _ in shape.stacks.values())
  # For each value of `remat`, how many numbers per token a layer keeps for the
  # backward pass: with `full` its input, with `dots` also the results of matrix
  # products, and with `none` all results.
  width = shape.hidden_size
  kept: dict[str, float] = {'full': width}
  kept['dots'] = width + (2 * queries + keys + width + 3 * mlp) / tensor
  kept['all_dots'] = kept['dots']
  kept['none'] = kept['dots'] + 4 * width + (queries + keys + 2 * mlp) / tensor
  if shape.attention == 'xla' and shape.remat in ('all_dots', 'none'):
    kept[shape.remat] += shape.num_heads * work.length / tensor
  # The bytes of one layer in the backward pass: its activations and their
  # gradients, and the weights of two layers, because the weights of the next
  # layer are gathered meanwhile. Attention has queries, keys, values and
  # results, and their gradients. The norms of queries and keys are in float32.
  layer = tokens * (6 * width + 6 * mlp / tensor) * size
  layer += tokens * 2 * (2 * queries + keys) / tensor * size
  if shape.qk_norm:
    layer += tokens * 2 * (queries + keys / 2) / tensor * 4
  layer += 2 * sum(flops.layer_weights(shape)) * size / tensor
  losses = rows * work.losses
  chunk = min(head_chunk, losses) if head_chunk else losses
  # The bytes of the logits in float32, whose gradient takes their place, and of
  # the gathered output matrix with its gradient.
  vocabulary = shape.vocab_size / tensor
  logits = 4 * chunk * vocabulary + vocabulary * width * (size + 4)
  # The logits are freed before the backward pass comes to a layer, so only the
  # larger of the two counts.
  largest = max(
    ('a layer', layer),
    ('logits and the output matrix', logits),
    key=lambda part: part[1],
  )
  # If there is a value model, the forward passes of both models come before any
  # backward pass. So both models keep their results.
  models = 2 if work.values == 'own' else 1
  estimated = {
    'gradients': trained,
    'the gathered base': held.gathered,
    f'weights in {shape.dtype}': trained * size // 4 if size < 4 else 0,
    # The kernel for experts makes the gradients of all layers in the dtype of
    # the computation.
    f'gradients of experts in {shape.dtype}': (
      trained * size // 4 if shape.num_experts and size < 4 else 0
    ),
    'kept for the backward pass': (
      models * shape.num_layers * tokens * kept[shape.remat] * size
    ),
    largest[0]: largest[1],
  }
  return {name: int(x) for name, x in estimated.items() if x}
