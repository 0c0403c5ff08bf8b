"""Counts the operations, bytes and collectives of a compiled program.

All counts are for one device, and an instruction counts as often as it runs.
The bytes that a program moves to and from the device memory are the arguments
and results of its kernels, because a kernel keeps its intermediate results
inside. The compiler for TPU also moves arrays into a faster memory before they
are used, and marks them. Such an array counts when it is moved, and not when it
is used. If an instruction reads or overwrites a part of an array, only this
part counts.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math

import numpy as np

from stppo_jax.tools.plan import hlo

# For each kind of collective, the bytes that each of n devices in a ring sends.
# `size` is the bytes of the operands or of the results, whichever is larger.
_SENT = {
  'all-gather': lambda size, n: size * (n - 1) / n,
  'reduce-scatter': lambda size, n: size * (n - 1) / n,
  'all-reduce': lambda size, n: 2 * size * (n - 1) / n,
  'all-to-all': lambda size, n: size * (n - 1) / n,
  'ragged-all-to-all': lambda size, n: size * (n - 1) / n,
  'collective-permute': lambda size, n: size,
  'collective-broadcast': lambda size, n: size,
}
# The compiler for TPU gives this name to a kernel that is a reduce-scatter. In
# the HLO text, the kernel has an all-reduce and keeps a part of its result.
_REDUCE_SCATTER_KERNEL = 'all-reduce-scatter'
# Instructions that move nothing, or whose bytes are counted at the instructions
# of a computation that they call.
_FREE = frozenset(
  {
    *('parameter', 'constant', 'bitcast', 'get-tuple-element', 'tuple'),
    *('while', 'conditional', 'call', 'async-start', 'async-update'),
    *('after-all', 'optimization-barrier', 'partition-id', 'replica-id'),
  }
)
# The target of a custom call with which the compiler for TPU joins pieces of an
# array that were moved one by one. The bytes are counted where the pieces are
# moved.
_JOINED = 'ConcatBitcast'
_READS_PART = frozenset({'slice', 'dynamic-slice', 'gather', 'slice-start'})
_WRITES_PART = 'dynamic-update-slice'


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective operation: communication between devices.

  Attributes:
    kind: the name of the operation, such as 'all-gather'.
    arrays: the arrays of the operation's result.
    size: the bytes of the operands or of the results, whichever is larger.
    group: the numbers of the devices in the group of the first device, in the
      order of the mesh.
    times: how often the operation runs.
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
      mesh: the size of each mesh axis, in the order of the axes.
    """
    places = np.unravel_index(self.group, tuple(mesh.values()))
    return tuple(
      axis for axis, places in zip(mesh, places) if len(set(places)) > 1
    )

  @property
  def sent(self) -> float:
    """The bytes that a device sends in a ring, in all runs of the operation."""
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
      # An asynchronous collective is in the kernel that begins it, in kernels
      # that run at the same time, and in the kernel that ends it. So this code
      # counts it once, by its channel. A kernel that is a reduce-scatter always
      # counts, even if another collective has the same channel.
      if (kind, line.channel) in begun:
        continue
      begun.add((kind, line.channel))
    # The result of an asynchronous start, except all-reduce-start, is a tuple
    # (operand, result). So its largest array counts, and not the sum.
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

  A kernel that the compiler did not make counts with the operations that it
  declares, or as 0 if it declares none. The kernels for the matrix products of
  experts declare operations, and so does the kernel with which a TPU reads a KV
  cache. Other attention kernels declare none.
  """
  return sum(line.times * _operations(line) for line in program.instructions)


def _operations(line: hlo.Instruction) -> int:
  """Returns the multiplications and additions in one run of an instruction."""
  if line.opcode == 'dot':
    (left,), *_ = line.operands
    inner = math.prod(left.dims[axis] for axis in line.contracted)
    return 2 * inner * math.prod(line.arrays[0].dims)
  # The compiler for TPU writes a matrix product as a convolution.
  if line.opcode == 'convolution':
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
  """Returns how many elements a convolution's window meets along one axis.

  The number is summed over all positions of the window. Padding and the holes
  of a dilation are not multiplied, so they do not count. The compiler for TPU
  writes the batch axis of a matrix product as an axis with such wide holes that
  the window meets one element at each position.
  """
  at = np.add.outer(np.arange(results) * stride, np.arange(window) * rhs_dilate)
  entry, hole = np.divmod(at - pad, lhs_dilate)
  return int(np.sum((hole == 0) & (0 <= entry) & (entry < size)))


def estimated_cycles(program: hlo.Program) -> int:
  """Returns the cycles that the compiler for TPU expects the kernels to take.

  The number is good for comparing programs, but is not a time: it leaves out
  kernels that the compiler does not make itself, and waits for other devices.
  For a program of another platform, the number is 0.
  """
  return sum(
    line.times * line.cycles for line in program.instructions if not line.kernel
  )


def accessed(program: hlo.Program) -> int:
  """Returns the bytes that a device reads from its memory and writes to it."""
  return sum(
    line.times * _moved(line, program)
    for line in program.instructions
    if line.times and not line.kernel
  )


def _moved(line: hlo.Instruction, program: hlo.Program) -> int:
  """Returns the bytes that an instruction reads and writes in one run."""
  opcode = line.opcode
  if opcode in _FREE or opcode.endswith('-done') or line.target == _JOINED:
    return 0
  if line.said_bytes:
    return line.said_bytes
  operands = [sum(map(_in_memory, arrays)) for arrays in line.operands]
  results = list(map(_in_memory, line.arrays))
  if opcode == 'copy-start':  # result: (destination, source, context)
    return operands[0] + results[0]
  if opcode == 'slice-start':  # result: ((source), destination, context)
    return results[1] + (line.arrays[1].size if operands[0] else 0)
  if opcode.endswith('-start') and opcode != 'all-reduce-start':
    # The result of a collective's start: (operands, as many results, contexts).
    return sum(operands) + sum(results[len(operands) : 2 * len(operands)])
  if opcode in _READS_PART:
    return min(operands[0], line.size) + sum(results)
  if opcode == _WRITES_PART:
    return 2 * operands[1] if operands[0] else operands[1]
  if opcode != 'fusion':
    return sum(operands) + sum(results)
  kernel = _kernel(line, program)
  read = sum(
    min(size, _read_inside(kernel, number, program))
    for number, size in enumerate(operands)
    if size
  )
  return read + _written(results, kernel)


def _in_memory(array: hlo.Array) -> int:
  """Returns the bytes of an array; 0 if it is in the faster memory."""
  return 0 if array.is_fast else array.size


def _kernel(
  line: hlo.Instruction, program: hlo.Program
) -> list[hlo.Instruction]:
  """Returns the instructions inside a fusion."""
  (_, name), *_ = line.called
  return program.computations[name]


def _read_inside(
  kernel: Sequence[hlo.Instruction], number: int, program: hlo.Program
) -> int:
  """Returns the most bytes that a kernel reads of its argument `number`."""
  (argument,) = (
    x for x in kernel if x.opcode == 'parameter' and x.number == number
  )
  names = [argument.name]
  total = 0
  for line in kernel:
    given = line.arguments
    for name in set(names).intersection(given):
      place = given.index(name)
      if line.opcode == 'bitcast':
        names.append(line.name)
      elif line.opcode in _READS_PART and not place:
        total += line.size
      elif line.opcode == 'fusion':
        total += _read_inside(_kernel(line, program), place, program)
      elif line.opcode != _WRITES_PART or place:
        return argument.size
  # If the kernel overwrites a part of the argument, the rest of the argument is
  # not read. But if the kernel returns the argument itself, all of it is read.
  return argument.size if kernel[-1].name in names else total


def _written(results: Sequence[int], kernel: Sequence[hlo.Instruction]) -> int:
  """Returns the number of bytes that a kernel writes to its results."""
  by_name = {line.name: line for line in kernel}
  root = kernel[-1]
  roots = [root]
  if root.opcode == 'tuple':
    roots = [by_name[name] for name in root.arguments]
  total = 0
  for size, result in zip(results, roots, strict=False):
    while result.opcode == 'bitcast':
      result = by_name[result.arguments[0]]
    if result.opcode == _WRITES_PART:
      size = min(size, by_name[result.arguments[1]].size)
    total += size
  return total
