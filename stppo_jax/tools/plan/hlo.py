"""Parses the HLO text of a compiled program into records.

The text is the program of one device, written by the compiler for CPU, GPU or
TPU. Only this module depends on the syntax of such a text.
"""

from collections import defaultdict
from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any, NamedTuple

import numpy as np

# An instruction, such as `ROOT %name = f32[8,4]{1,0} opcode(...`. A tuple of
# shapes may stand in place of the shape.
_INSTRUCTION = re.compile(
  r'^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.+?) '
  r'(?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$'
)
_COMPUTATION = re.compile(r'^(?:ENTRY )?%?(?P<name>[\w.-]+) .*\{$')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?')
# In the layout of an array, this marks a memory that is faster than the memory
# of arguments and results.
_FAST = re.compile(r'S\([1-9]')
_CALLED = re.compile(
  r'\b(condition|body|calls|to_apply|true_computation|false_computation'
  r'|branch_computations)=(?:%?([\w.-]+)|\{([^}]*)\})'
)
# The compiler for TPU writes this number, the largest integer, for some kernels
# whose cycles it cannot estimate. Its estimates leave out waits for other
# devices, and kernels that the compiler did not make itself have no estimate.
_NO_ESTIMATE = 2**63 - 1


class Array(NamedTuple):
  """An array on a device.

  Attributes:
    kind: the element type, such as f32.
    dims: the dimensions.
    is_fast: whether the array is in a faster memory than the memory of
      arguments and results.
  """

  kind: str
  dims: tuple[int, ...]
  is_fast: bool

  @property
  def size(self) -> int:
    """Returns the number of bytes of the array."""
    digits = re.search(r'\d+', self.kind)
    bits = int(digits[0]) if digits else 8 * (self.kind == 'pred')
    return math.prod(self.dims) * bits // 8


@dataclasses.dataclass
class Instruction:
  """An instruction of a program.

  Attributes:
    name: the name, which is unique within the computation.
    opcode: the operation's name in HLO.
    arrays: the arrays of the result on each device.
    rest: the rest of the line, from the arguments on.
    times: how often the instruction runs. In the body of a loop, each iteration
      counts. A loop that may end early counts with its largest possible number
      of iterations, and a loop whose trip count is unknown counts as one
      iteration.
    kernel: the name of the fused computation that has the instruction; '' if no
      fused computation has it.
    operands: the arrays of each argument; () for an argument that is not known.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  rest: str
  times: int = 0
  kernel: str = ''
  operands: tuple[tuple[Array, ...], ...] = ()

  @property
  def size(self) -> int:
    """Returns the number of bytes of the result."""
    return sum(array.size for array in self.arrays)

  @property
  def arguments(self) -> list[str]:
    """Returns the names of the instructions that produce the arguments."""
    return re.findall(r'%([\w.-]+)', self.rest.partition(')')[0])

  @property
  def called(self) -> list[tuple[str, str]]:
    """Returns (kind of call, name) of each computation that is called."""
    return [
      (kind, name.strip().removeprefix('%'))
      for kind, one, several in _CALLED.findall(self.rest)
      for name in ([one] if one else several.split(','))
    ]

  @property
  def number(self) -> int | None:
    """Returns an integer constant's value or a parameter's index, else None."""
    text = self.rest.partition(')')[0]
    return int(text) if text.isdigit() else None

  @property
  def contracted(self) -> list[int]:
    """Returns the axes of the left factor that a dot sums over."""
    axes = self._found(r'lhs_contracting_dims=\{([\d,]*)\}')
    return [int(axis) for axis in axes.split(',') if axis]

  @property
  def labels(self) -> list[str]:
    """Returns the axis letters of a convolution's two factors and result."""
    return re.split('_|->', self._found(r'dim_labels=([\w>-]+)'))

  def window(self, axis: int) -> dict[str, int]:
    """Returns the stride, padding and dilations of a convolution on an axis.

    Of the padding, only the part at the beginning of the axis is returned.
    """
    moves = re.findall(
      r'(stride|pad|lhs_dilate|rhs_dilate)=([-\dx_]+)',
      self._found(r'window=\{([^}]*)\}'),
    )
    return {
      key: int(values.split('x')[axis].split('_')[0]) for key, values in moves
    }

  @property
  def target(self) -> str:
    """The name of the function that a custom call calls."""
    return self._found(r'custom_call_target="([^"]*)"')

  @property
  def cost(self) -> int:
    """Returns the operations that a custom kernel declares; 0 if unknown."""
    return int(self._found(r'"cost_estimate":\{"flops":"(\d+)"') or 0)

  @property
  def said_bytes(self) -> int:
    """The bytes of reads and writes that a kernel declares; 0 if unknown."""
    return int(self._found(r'"bytes_accessed":"(\d+)"') or 0)

  @property
  def cycles(self) -> int:
    """The cycles of a kernel, by the TPU compiler's estimate; 0 if unknown."""
    cycles = int(self._found(r'"estimated_cycles":"(\d+)"') or 0)
    return 0 if cycles == _NO_ESTIMATE else cycles

  @property
  def channel(self) -> str:
    """Returns the number of the channel of a collective; '' if it has none."""
    return self._found(r'\bchannel_id=(\d+)')

  @property
  def group(self) -> tuple[int, ...]:
    """Returns the device numbers of a collective's first group.

    The result is () if one group has all devices.
    """
    # XLA writes groups in three ways: as a list of all devices with the size of
    # a group, as a list of groups, or as axes of a mesh.
    match = re.search(
      r'replica_groups=\[\d+,(\d+)\]<=(\S+?)(?:, |$)', self.rest
    )
    if match:
      return tuple(map(int, _numbers(match[2])[: int(match[1])]))
    if match := re.search(r'replica_groups=\{\{([\d,]+)\}', self.rest):
      return tuple(map(int, match[1].split(',')))
    match = re.search(
      r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\S+)\))?[^{]*'
      r'\{([^}]*)\}',
      self.rest,
    )
    if not match:
      return ()
    sizes = {a: int(n) for a, n in re.findall(r"'(\w+)'=(\d+)", match[1])}
    devices = np.arange(math.prod(sizes.values()))
    if match[2]:
      devices = _numbers(match[2])
    # The devices of a group differ along some axes, or along a part of an axis:
    # `(2)4` is the middle part of an axis that is split into 2 x 4 x the rest.
    devices = devices.reshape(tuple(sizes.values()))
    chosen: list[Any] = [0] * len(sizes)
    for axis, before, size in re.findall(
      r"'(\w+)'(?::\((\d+)\)(\d+))?", match[3]
    ):
      places = slice(None)
      if size:
        stride = sizes[axis] // (int(before) * int(size))
        places = slice(0, stride * int(size), stride)
      chosen[list(sizes).index(axis)] = places
    return tuple(int(n) for n in np.ravel(devices[tuple(chosen)]))

  def _found(self, pattern: str) -> str:
    """Returns the text that a pattern's group matches; '' for no match."""
    match = re.search(pattern, self.rest)
    return match[1] if match else ''


class Program(NamedTuple):
  """A compiled program for one device.

  Attributes:
    computations: maps the name of a computation to its instructions. A called
      computation comes before its callers. The last instruction of a
      computation is its result.
    num_devices: the number of devices that the program runs on.
  """

  computations: Mapping[str, list[Instruction]]
  num_devices: int

  @property
  def instructions(self) -> list[Instruction]:
    """Returns the instructions of all computations."""
    return [x for lines in self.computations.values() for x in lines]


def read(text: str) -> Program:
  """Returns the program that an HLO text describes."""
  partitions = re.search(r'num_partitions=(\d+)', text)
  computations, name, lines = {}, None, []
  for line in text.splitlines():
    if match := _INSTRUCTION.match(line):
      arrays = _arrays(match['shape'])
      lines.append(
        Instruction(match['name'], match['opcode'], arrays, match['rest'])
      )
    elif line.startswith('}') and name is not None:
      computations[name], name = lines, None
    elif match := _COMPUTATION.match(line):
      name, lines = match['name'], []
  _complete(computations)
  return Program(computations, int(partitions[1]) if partitions else 1)


def _complete(computations: dict[str, list[Instruction]]) -> None:
  """Sets `times`, `kernel` and `operands` of all instructions.

  These fields depend on the lines of other instructions.
  """
  times, kernels = defaultdict(int), set()
  times[next(reversed(computations))] = 1  # the entry computation is last
  # Callees stand before their callers, so in reverse order a caller's count is
  # complete before it is added to the counts of its callees.
  for name, lines in reversed(computations.items()):
    arrays = {line.name: line.arrays for line in lines}
    for line in lines:
      line.times = times[name]
      line.kernel = name if name in kernels else ''
      line.operands = tuple(arrays.get(x, ()) for x in line.arguments)
      for kind, callee in line.called:
        trips = _trips(line, computations) if kind == 'body' else 1
        times[callee] += times[name] * trips
        if line.opcode == 'fusion':
          kernels.add(callee)


def _trips(
  loop: Instruction, computations: Mapping[str, list[Instruction]]
) -> int:
  """Returns the number of iterations of a loop; 1 if it is unknown."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
    return int(known[1])
  # The compiler for TPU does not write the trip count. A loop of JAX counts
  # from 0 up to a constant, which is found in the comparison of its condition.
  condition = computations.get(dict(loop.called)['condition'], [])
  numbers = {x.name: x.number for x in condition if x.opcode == 'constant'}
  limits = [
    numbers.get(x.arguments[1]) for x in condition if 'direction=LT' in x.rest
  ]
  whole = [limit for limit in limits if limit is not None]
  return whole[0] if len(whole) == 1 else 1


def _arrays(shape: str) -> tuple[Array, ...]:
  """Returns the arrays that the text of an HLO shape describes."""
  return tuple(
    Array(
      kind,
      tuple(int(d.removeprefix('<=')) for d in dims.split(',') if d),
      bool(_FAST.search(layout)),
    )
    for kind, dims, layout in _ARRAY.findall(shape)
  )


def _numbers(text) -> np.ndarray:
  """Returns the device numbers that a text such as `[2,4]T(1,0)` stands for.

  This example stands for the numbers 0 to 7 as a 2 x 4 array, which is then
  transposed and flattened.
  """
  sizes, _, order = text.partition('T')
  shape = [int(n) for n in re.findall(r'\d+', sizes)]
  numbers = np.arange(math.prod(shape)).reshape(shape)
  if order:
    numbers = numbers.transpose([int(n) for n in re.findall(r'\d+', order)])
  return numbers.ravel()
