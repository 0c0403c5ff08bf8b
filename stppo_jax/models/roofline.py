"""Estimates the seconds of a training step from the limits of devices.

Formulas give the operations, the bytes that are read from memory and the bytes
that devices send. `bound` is the time at the limits that the maker of a device
publishes. No program can be faster. `expected` is the time at the shares of
these limits that one device has reached, see `SHARES`. Both times assume that a
phase computes, reads and sends at the same time, so a phase takes as long as
the slowest of the three. Phases follow one another. But devices that only
collect trajectories work while the other devices learn. Waiting for the
retriever, evaluations and checkpoints are left out.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import NamedTuple

from stppo_jax.models import config as model_config
from stppo_jax.models import flops
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import topology as topology_lib

# (kind of collective, mesh axis) -> bytes that one device sends.
Traffic = Mapping[tuple[str, str], float]

# For each phase, the share of the published rate that one H200 has reached with
# Qwen2.5-1.5B in bfloat16, see docs/benchmarks.md. A large matrix product
# reached 716 of the 989 published TFLOP/s. Annotating full rows reached 73 % of
# these 716. An update with updates.remat=full reached 51 %, or 73 % if repeated
# operations count too. Decoding 128 rows of 1k tokens read 2.18 of 4.8 TB/s.
# Prefill with a prefill_chunk of 256 reached 507 TFLOP/s.
SHARES: Mapping[str, float] = {
  'decode': 2.18 / 4.8,
  'extend': 507 / 989,
  'publish': 1.0,
  'annotate': 0.73 * 716 / 989,
  'update': 0.73 * 716 / 989,
}
# The phases of a step in which devices collect trajectories.
COLLECTING = ('extend', 'decode')
BESIDE = (
  'the devices that only collect trajectories work while the other devices '
  'annotate, update and publish, and a step lasts as long as the slower of the '
  'two kinds'
)
ASSUMPTIONS = (
  'every row has all its tokens; the shares of published rates were measured '
  'with Qwen2.5-1.5B on one H200 (python -m benchmarks.accelerator --all): '
  f'annotate and update reach {SHARES["update"]:.0%} of the peak rate, '
  f'recomputed operations included, extend reaches {SHARES["extend"]:.0%}, and '
  f"decode reaches {SHARES['decode']:.0%} of the memory's bandwidth",
  'products, reads and exchanges between devices of a phase overlap, and '
  'phases follow one another; waiting for the retriever, evaluations, '
  'checkpoints and compiling are left out',
)


class Phase(NamedTuple):
  """Says what one device does in a phase of a step, and how long it takes.

  Attributes:
    operations: multiplications and additions that the result needs.
    computed: multiplications and additions that the program computes, some of
      them twice; see `flops.recomputed_layer_operations`.
    read: bytes read from the device's memory; 0 in phases in which matrix
      products take longer than reading.
    traffic: bytes that the device sends.
    bound: seconds at the published limits.
    expected: seconds at the shares of these limits in `SHARES`. Sending counts
      at the published limit.
  """

  operations: float
  computed: float
  read: float
  traffic: Traffic
  bound: float
  expected: float


@dataclasses.dataclass(frozen=True)
class Work:
  """Holds the sizes of a step that its phases depend on.

  Attributes:
    shape: the config of policy and value model.
    axes: the number of devices along each axis of the mesh.
    trajectories, group_size: rows of a step, and rows of one question.
    minibatch, microbatch: rows of an update, and rows of a forward pass.
    updates: number of updates of a step.
    length: number of tokens of a row.
    losses: number of tokens of a row that are trained on.
    values: where values come from: 'own' for a value model, 'shared' for a
      value head on the policy, or 'none'.
    adapters: whether only adapters are trained.
    gathers_base: whether a program all-gathers the frozen base of the adapters
      once, and not in every pass.
    statistics: whether an update with several microbatches first computes
      statistics of the minibatch, which takes a further forward pass.
    weights: number of weights in all layers of one model.
    trained: number of weights that are trained, without the embedding and the
      output matrix.
    itemsize: bytes of a number in the computations.
    decode_steps: number of model calls in which a device decodes its rows.
    decode_rows: rows of a device in such a call.
    engine_weights: bytes of the engine's weights on a device.
    engine_cache: bytes of the engine's KV cache on a device.
    engine_length: tokens of a row that the KV cache has room for.
    engine_tensor: number of devices that one copy of the engine is sharded
      over; 0 with a remote engine.
    collectors: number of devices that only collect; 0: all devices both collect
      and learn.
    fetches: whether the devices that only collect get weights over the network,
      while they decode.
    experts: number of weights of experts among `weights`.
  """

  shape: model_config.ModelConfig
  axes: Mapping[str, int]
  trajectories: int
  group_size: int
  minibatch: int
  microbatch: int
  updates: int
  length: int
  losses: int
  values: str
  adapters: bool
  gathers_base: bool
  statistics: bool
  weights: int
  trained: int
  itemsize: int
  decode_steps: float
  decode_rows: float
  engine_weights: int
  engine_cache: int
  engine_length: int
  engine_tensor: int
  collectors: int = 0
  fetches: bool = False
  experts: int = 0

  @property
  def learners(self) -> int:
    """The number of devices that learn."""
    return math.prod(self.axes.values())

  @property
  def decode_bytes(self) -> float:
    """The bytes that a device reads from its memory in a decode call."""
    # While a row grows, its average length is half of its final length.
    seen = self.length / 2
    if self.shape.attention != 'xla':  # a kernel reads only the window's pages
      seen = flops.seen_keys(self.shape, self.length) / self.shape.num_layers
    filled = min(seen / self.engine_length, 0.5)
    return self.engine_weights + filled * self.engine_cache

  @property
  def output(self) -> int:
    """The number of weights of the output matrix."""
    return self.shape.hidden_size * self.shape.vocab_size

  @property
  def rows_per_device(self) -> float:
    """The number of rows that a device computes in one forward pass."""
    return self.microbatch / (self.axes['data'] * self.shards)

  @property
  def shards(self) -> int:
    """The number of devices along the axes `mesh.WEIGHT_AXES` together."""
    return math.prod(self.axes[axis] for axis in mesh_lib.WEIGHT_AXES)


def phases(work: Work, topology: topology_lib.Topology) -> dict[str, Phase]:
  """Returns name -> phase, in the order of the phases in a step.

  Args:
    work: the sizes of the step.
    topology: the devices.
  """
  found = {}
  if work.engine_tensor:
    found['extend'] = _extend(work)
    found['decode'] = _decode(work)
  if work.engine_tensor and not work.fetches:
    found['publish'] = _publish(work)
  found['annotate'] = _annotate(work)
  found['update'] = _update(work)
  timed = {}
  for name, (needed, computed, read, traffic) in found.items():
    collects = name in COLLECTING and work.collectors
    devices = work.collectors if collects else work.learners
    needed, computed = needed / devices, computed / devices
    traffic = {key: size for key, size in traffic.items() if size}
    sending = sum(
      size / _bandwidth(topology, work.axes, axis)
      for (_, axis), size in traffic.items()
    )
    limits = topology.limits
    times = [computed / limits.operations, read / limits.bandwidth]
    timed[name] = Phase(
      needed,
      computed,
      read,
      traffic,
      max(needed / limits.operations, times[1], sending),
      max(*(x / SHARES[name] for x in times), sending),
    )
  return timed


def update_sent(work: Work) -> float:
  """Returns the bytes that a device sends in the updates of a step."""
  *_, traffic = _update(work)
  return sum(traffic.values())


def decode_read(work: Work) -> float:
  """Returns the bytes that a device reads to decode its rows of a step."""
  return work.decode_steps * work.decode_bytes


# The first four fields of a `Phase`, with the operations of all devices.
_Counts = tuple[float, float, float, dict[tuple[str, str], float]]


def _extend(work: Work) -> _Counts:
  """Returns the `_Counts` of adding prompts and observations to the cache."""
  appended = work.trajectories * (work.length - work.losses)
  count = appended * flops.layer_operations(work.shape, work.length)
  return count, count, 0.0, {}


def _decode(work: Work) -> _Counts:
  shape, tensor = work.shape, work.engine_tensor
  tokens = work.trajectories * work.losses
  per_token = flops.layer_operations(
    shape, work.length
  ) + flops.logit_operations(shape)
  count = tokens * per_token
  hidden = work.decode_rows * shape.hidden_size * work.itemsize
  sums = 2 * shape.num_layers * work.decode_steps * hidden
  traffic = {('all-reduce', 'tensor'): _all_reduce(sums, tensor)}
  return count, count, decode_read(work), traffic


def _publish(work: Work) -> _Counts:
  """Returns the `_Counts` of publishing weights, see docs/sharding.md."""
  tables = 0 if work.adapters else 2 - work.shape.tie_embeddings
  trained = work.trained + tables * work.output
  parts = work.shards * work.axes['tensor']
  size, n = trained * work.itemsize, min(work.engine_tensor, parts)
  sent = size / parts * (n - 1) / n + size / n * (1 - n / parts)
  # A device that only collects gets its weights from a device that learns.
  copied = size / n * work.collectors / work.learners
  traffic = {('all-gather', 'fsdp'): sent, ('copy', 'tensor'): copied}
  return 0.0, 0.0, 0.0, traffic


def _annotate(work: Work) -> _Counts:
  rows = work.trajectories
  # The old policy, the reference, and the value model if it is a separate one.
  models = 3 if work.values == 'own' else 2
  count = models * _layers(work, rows) + 2 * _head(work, rows)
  times = -(-rows // work.microbatch)
  gathers, outputs = (1, 1) if work.gathers_base else (times * models, 2)
  traffic = {
    ('all-gather', 'fsdp'): _scatter(work, gathers, outputs),
    **_activations(work, times * models, sums=2),
  }
  return count, count, 0.0, traffic


def _update(work: Work) -> _Counts:
  shape, rows = work.shape, work.minibatch
  times = -(-rows // work.microbatch)
  models = 2 if work.values == 'own' else 1
  layers, head = _layers(work, rows), _head(work, rows)
  # Frozen weights get no gradient, so each matrix needs one product less.
  passes = 2 if work.adapters else 3
  needed = passes * (models * layers + head)
  # Logits are computed again in the backward pass.
  again = flops.recomputed_layer_operations(shape, work.length)
  computed = needed + models * (rows * work.length * again) + head
  extra = int(work.statistics and times > 1)
  computed += extra * (layers + head)
  remat = shape.remat == 'full'
  gathers = 1 if work.gathers_base else times * (2 * models + extra)
  # With adapters, only the adapters are trained. It is assumed that experts
  # have no adapters.
  of_trained = work
  if work.adapters:
    of_trained = dataclasses.replace(work, weights=work.trained, experts=0)
  outputs = times * (not work.adapters)
  summed = times * models * work.trained + outputs * work.output
  parts = work.axes['tensor'] * work.shards
  sums = _all_reduce(summed * work.itemsize / parts, work.axes['data'])
  traffic = {
    ('all-gather', 'fsdp'): _scatter(work, gathers, 1),
    ('reduce-scatter', 'fsdp'): _scatter(of_trained, times * models, outputs),
    ('all-reduce', 'data'): sums,
    # Each layer has two sums over `tensor` in the forward pass and two in the
    # backward pass. With remat=full, the backward pass repeats the first sum.
    **_activations(
      work,
      times * models,
      sums=4 + remat,
      look_ups=2,
      gathers=3 - (shape.remat == 'none'),
      scatters=2,
    ),
  }
  for key, size in _activations(work, times * extra, sums=2).items():
    traffic[key] += size
  count = work.updates
  return (
    count * needed,
    count * computed,
    0.0,
    {key: count * size for key, size in traffic.items()},
  )


def _layers(work: Work, rows: int) -> float:
  """Returns the forward operations of all layers of one model, for all rows."""
  return rows * work.length * flops.layer_operations(work.shape, work.length)


def _head(work: Work, rows: int) -> float:
  """Returns the forward operations of the logits at the loss positions."""
  return rows * work.losses * flops.logit_operations(work.shape)


def _scatter(work: Work, times: int, outputs: int) -> float:
  """Returns the bytes that a device sends to all-gather weights.

  A reduce-scatter of the gradients of these weights sends as many bytes.

  Args:
    work: the sizes of the step.
    times: how often the weights of all layers are sent.
    outputs: how often the output matrix is sent.
  """
  size = work.itemsize / work.axes['tensor']
  others = times * (work.weights - work.experts) + outputs * work.output
  experts = times * work.experts / work.axes['expert']
  kept = 1 / work.shards, 1 / work.axes['fsdp']
  return size * (others * (1 - kept[0]) + experts * (1 - kept[1]))


def _all_reduce(size: float, devices: int) -> float:
  return 2 * size * (devices - 1) / devices


def _activations(
  work: Work,
  passes: int,
  *,
  sums: int,
  look_ups: int = 1,
  gathers: int = 1,
  scatters: int = 1,
) -> dict[tuple[str, str], float]:
  """Returns the bytes of activations that a device sends in some passes.

  Args:
    work: the sizes of the step.
    passes: how often a microbatch passes through a model; a forward pass and
      its backward pass count as one.
    sums: the number of sums over `tensor` in each layer of a pass.
    look_ups: the number of exchanges of embedded tokens in each pass.
    gathers: how often a layer sends tokens to their experts in each pass.
    scatters: how often a layer sends results back from experts in each pass.
  """
  shape, shards = work.shape, work.shards
  hidden = work.rows_per_device * work.length * shape.hidden_size
  hidden *= passes * work.itemsize
  summed = sums * shape.num_layers * hidden
  _, with_experts = shape.stacks['layers']
  visited = with_experts * hidden * (work.axes['expert'] - 1)
  return {
    ('all-to-all', 'fsdp'): look_ups * hidden * (shards - 1) / shards,
    ('all-reduce', 'tensor'): _all_reduce(summed, work.axes['tensor']),
    ('all-gather', 'expert'): gathers * visited,
    ('reduce-scatter', 'expert'): scatters * visited,
  }


def _bandwidth(
  topology: topology_lib.Topology, axes: Mapping[str, int], axis: str
) -> float:
  """Returns the bytes per second that a device sends along a mesh axis."""
  inner = 1
  for name in reversed(mesh_lib.AXES):
    inner *= axes[name]
    if name == axis:
      break
  limits = topology.limits
  return limits.links if inner <= topology.per_host else limits.network
