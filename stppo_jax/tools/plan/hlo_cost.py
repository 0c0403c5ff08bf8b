"""Counts what each device sends and multiplies in a compiled program.

An instruction counts as often as it runs. XLA's own `cost_analysis` counts the
body of a loop once, so it cannot be used for layers that are scanned.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math

import numpy as np

from stppo_jax.tools.plan import hlo

# For each kind of collective, the bytes that one of n devices in a ring sends.
# `size` is the larger of the bytes of its operands and of its results.
_SENT = {
  'all-gather': lambda size, n: size * (n - 1) / n,
  'reduce-scatter': lambda size, n: size * (n - 1) / n,
  'all-reduce': lambda size, n: 2 * size * (n - 1) / n,
  'all-to-all': lambda size, n: size * (n - 1) / n,
  'ragged-all-to-all': lambda size, n: size * (n - 1) / n,
  'collective-permute': lambda size, n: size,
  'collective-broadcast': lambda size, n: size,
}
# How the compiler for TPU names a kernel that is a reduce-scatter; inside, the
# text has an all-reduce, of whose result a part is kept.
_REDUCE_SCATTER_KERNEL = 'all-reduce-scatter'


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective operation: communication between devices.

  Attributes:
    kind: 'all-gather', 'all-reduce', ...
    arrays: its results.
    size: bytes of its operands or of its results, whichever is larger.
    group: the numbers of the devices in the group of the first device, in the
      order of the mesh.
    times: how often it runs.
  """

  kind: str
  arrays: tuple[hlo.Array, ...]
  size: int
  group: tuple[int, ...]
  times: int

  @property
  def devices(self) -> int:
    """Returns the number of devices in one group."""
    return len(self.group)

  def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of a mesh along which the devices of a group differ.

    Args:
      mesh: the sizes of the axes, in their order.
    """
    places = np.unravel_index(self.group, tuple(mesh.values()))
    return tuple(
      axis for axis, places in zip(mesh, places) if len(set(places)) > 1
    )

  @property
  def sent(self) -> float:
    """Bytes that a device sends in a ring, over all times that it runs."""
    return self.times * _SENT[self.kind](self.size, self.devices)


def collectives(program: hlo.Program) -> list[Collective]:
  """Returns the collective operations of a program."""
  found, begun = [], set()
  for line in program.instructions:
    kind = line.opcode.removesuffix('-start')
    if kind not in _SENT:
      continue
    scatters = line.kernel.startswith(_REDUCE_SCATTER_KERNEL)
    if line.kernel and line.channel and not scatters:
      # A collective that runs beside others is in the kernel that begins it,
      # in those that it runs beside, and in the one that ends it. A kernel
      # that is a reduce-scatter is one, though others may have its channel.
      if (kind, line.channel) in begun:
        continue
      begun.add((kind, line.channel))
    # The result of an asynchronous start, except all-reduce-start, is a tuple
    # (operand, result): its largest array counts, not the sum.
    is_pair = line.opcode.endswith('-start') and kind != 'all-reduce'
    size = max(
      (max if is_pair else sum)(array.size for array in line.arrays),
      sum(array.size for operand in line.operands for array in operand),
    )
    group = line.group or tuple(range(program.num_devices))
    if scatters:
      kind = 'reduce-scatter'
    found.append(Collective(kind, line.arrays, size, group, line.times))
  return found


def operations(program: hlo.Program) -> int:
  """Returns the multiplications and additions of all matrix products.

  Of kernels that the compiler did not make, it is what they say that they
  compute. Products of rows and experts say it; attention does not.
  """
  return sum(line.times * _operations(line) for line in program.instructions)


def _operations(line: hlo.Instruction) -> int:
  """Returns the multiplications and additions of an instruction."""
  if line.opcode == 'dot':
    (left,), *_ = line.operands
    inner = math.prod(left.dims[axis] for axis in line.contracted)
    return 2 * inner * math.prod(line.arrays[0].dims)
  if line.opcode == 'convolution':  # a matrix product, on TPU
    (left,), (right,) = line.operands
    left, right, result = (
      dict(zip(letters, array.dims))
      for letters, array in zip(line.labels, (left, right, line.arrays[0]))
    )
    pairs = result['b'] * result['f'] * right['i']
    for axis in result.keys() - {'b', 'f'}:
      pairs *= _met(
        left[axis], right[axis], result[axis], **line.window(int(axis))
      )
    return 2 * pairs
  return line.cost


@functools.cache
def _met(
  size: int,
  window: int,
  results: int,
  *,
  stride: int = 1,
  pad: int = 0,
  lhs_dilate: int = 1,
  rhs_dilate: int = 1,
) -> int:
  """Returns how often a moving window meets an entry of its argument.

  The compiler for TPU writes the batch of a product as an axis with holes, so
  wide that each place of the window meets one entry; padding and holes are not
  computed.
  """
  at = np.add.outer(np.arange(results) * stride, np.arange(window) * rhs_dilate)
  entry, hole = np.divmod(at - pad, lhs_dilate)
  return int(np.sum((hole == 0) & (0 <= entry) & (entry < size)))
