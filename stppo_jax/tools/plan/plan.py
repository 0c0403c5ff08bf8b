"""Plans the memory, the communication and the time of a run on other devices.

Models are shapes and devices are virtual. With `programs`, those that a run
would use are compiled (`tools/plan/programs.py`): for a TPU slice that is not
there (`parallel/topology.py`), or for CPUs. The sizes of parameters and
optimiser states, and the collectives, are the same on any device; temporaries
that the CPU compiler plans differ on accelerators. Without `programs`,
temporaries are estimated by a formula.

Collecting and learning follow each other, and the larger of the two counts: the
engine has its weights, keys and values only while it collects, and temporaries
exist only while programs run. With `rollout.steps_ahead` the two overlap, and
the engine is counted in both; programs of a device still run one by one.
Batches are not counted without a compiled program.
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
  """The plan of a run's programs; sizes are bytes on one device.

  Attributes:
    topology: the devices.
    axes: the sizes of the mesh axes.
    slots: the trajectories that each host decodes at a time; 0 with
      rollout.engine=remote.
    collectors: the number of hosts that only collect, which have as many
      devices as the others.
    held: what the run holds, beside what programs need.
    estimated: the temporaries of an update by name; a formula gives their
      bytes.
    programs: the programs that were compiled, by name.
    work: the sizes of a step.
    phases: the phases of a step by name, see `roofline.phases`.
    num_steps: the steps of the run.
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
    """The number of chips, also of hosts that only collect beside others."""
    beside = self.collectors * self.topology.per_host
    return self.topology.num_chips + beside // self.topology.limits.per_chip

  @property
  def temporaries(self) -> dict[str, int]:
    """Returns the bytes that programs need beside `sizes`, by their names.

    Of compiled programs these are temporaries, a batch, and what the compiler
    pads; without them, the temporaries of an update are estimated.
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
    # Programs run one after the other, so only the largest of them counts, each
    # with what the run holds at that time. Only decode copies pages.
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
    """Returns a line for each program that does not fit by itself."""
    return [
      f'{name}: {cost.problem}'
      for name, cost in self.programs.items()
      if cost.problem
    ]

  @property
  def fits(self) -> bool:
    """Returns whether all of it fits in the memory of a device."""
    return self.total <= self.limit and not self.problems

  @property
  def seconds(self) -> tuple[float, float]:
    """Returns the seconds of a step: at the limits of devices, and expected."""
    sides = {True: [0.0, 0.0], False: [0.0, 0.0]}  # collecting, learning
    for name, phase in self.phases.items():
      side = sides[name in roofline.COLLECTING]
      side[0] += phase.bound
      side[1] += phase.expected
    # Devices that only collect work at the same time as those that learn;
    # without them the same devices do one after the other.
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
  """Returns the plan of a configuration on all devices.

  Args:
    config: the config of a run; of its model, `config.json` suffices.
    length: the number of tokens of a row.
    loss_fraction: the largest share of a row's tokens that carries loss.
    programs: the keys of `programs.PROGRAMS` to compile; those of the
      engine are left out where there is none on these devices.
    topology: the devices; None: those of this process.
    gib: GiB of a device's memory; 0: that of the topology.

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
    mesh = components.build_mesh(config, devices)
    # Only a model that is made anew takes the size of its vocabulary from a
    # tokenizer; a directory says it in config.json.
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
    held = held._replace(copied=0)  # the program has the copy
  axes = dict(mesh.shape)
  assert packed.loss_positions_BM is not None  # `packed_shapes` has them
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

  With the state they are within 5 % of the peak that the compiler for TPU
  plans for dense models.

  Args:
    work: the sizes of a step.
    held: the memory of one device.
    head_chunk: tokens whose logits are held at once; 0: all.
  """
  trained, shape, tensor = held.gradients, work.shape, work.axes['tensor']
  size, rows = work.itemsize, work.rows_per_device
  tokens = rows * work.length
  queries = shape.num_heads * shape.head_dim
  keys = 2 * shape.num_kv_heads * shape.head_dim
  mlp = max(flops.mlp_width(layer) for layer, _ in shape.stacks.values())
  # The numbers that are kept of a token in a layer: its input; with `dots` also
  # the results of matrix products; with `none` all of them.
  width = shape.hidden_size
  kept: dict[str, float] = {'full': width}
  kept['dots'] = width + (2 * queries + keys + width + 3 * mlp) / tensor
  kept['all_dots'] = kept['dots']
  kept['none'] = kept['dots'] + 4 * width + (queries + keys + 2 * mlp) / tensor
  if shape.attention == 'xla' and shape.remat in ('all_dots', 'none'):
    kept[shape.remat] += shape.num_heads * work.length / tensor
  # The gradients of a layer, and its weights, of which the next are gathered
  # while it is computed. Attention has queries, keys, values and results, and
  # their gradients; norms of queries and keys are in float32.
  layer = tokens * (6 * width + 6 * mlp / tensor) * size
  layer += tokens * 2 * (2 * queries + keys) / tensor * size
  if shape.qk_norm:
    layer += tokens * 2 * (queries + keys / 2) / tensor * 4
  layer += 2 * sum(flops.layer_weights(shape)) * size / tensor
  losses = rows * work.losses
  chunk = min(head_chunk, losses) if head_chunk else losses
  # Logits, whose gradient takes their place, in float32; the gathered matrix
  # and its gradient.
  vocabulary = shape.vocab_size / tensor
  logits = 4 * chunk * vocabulary + vocabulary * width * (size + 4)
  # The logits are gone before the backward pass comes to a layer.
  largest = max(
    ('a layer', layer),
    ('logits and the output matrix', logits),
    key=lambda part: part[1],
  )
  # The compiler computes both models forward before it goes back.
  models = 2 if work.values == 'own' else 1
  estimated = {
    'gradients': trained,
    'the gathered base': held.gathered,
    f'weights in {shape.dtype}': trained * size // 4 if size < 4 else 0,
    # The kernel's gradients of all layers are in the dtype of the computation.
    f'gradients of experts in {shape.dtype}': (
      trained * size // 4 if shape.num_experts and size < 4 else 0
    ),
    'kept for the backward pass': (
      models * shape.num_layers * tokens * kept[shape.remat] * size
    ),
    largest[0]: largest[1],
  }
  return {name: int(x) for name, x in estimated.items() if x}
