"""Reads the HLO text of a compiled program into records.

The text may be that of the compiler for CPU, GPU or TPU, for one device. No
other module knows how such a text is written.
"""

from collections import defaultdict
from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any, NamedTuple

import numpy as np

# An instruction: `ROOT %name = f32[8,4]{1,0} opcode(...`, or a tuple of shapes.
_INSTRUCTION = re.compile(
  r'^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.+?) '
  r'(?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$'
)
_COMPUTATION = re.compile(r'^(?:ENTRY )?%?(?P<name>[\w.-]+) .*\{$')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?')
# In a layout, this marks a faster memory than that of arguments and results.
_FAST = re.compile(r'S\([1-9]')
_CALLED = re.compile(
  r'\b(condition|body|calls|to_apply|true_computation|false_computation'
  r'|branch_computations)=(?:%?([\w.-]+)|\{([^}]*)\})'
)
# The compiler for TPU estimates how long a kernel computes; it does not count
# waits for other devices, nor kernels that it did not make itself. Of some that
# it cannot estimate it writes the largest integer.
_NO_ESTIMATE = 2**63 - 1


class Array(NamedTuple):
  """An array on a device.

  Attributes:
    kind: the element type.
    dims: the dimensions.
    is_fast: whether it is in a faster memory than arguments and results are.
  """

  kind: str
  dims: tuple[int, ...]
  is_fast: bool

  @property
  def size(self) -> int:
    """Returns its bytes."""
    digits = re.search(r'\d+', self.kind)
    bits = int(digits[0]) if digits else 8 * (self.kind == 'pred')
    return math.prod(self.dims) * bits // 8


@dataclasses.dataclass
class Instruction:
  """An instruction of a program.

  Attributes:
    name: its name, which no other one of its computation has.
    opcode: the operation's name in HLO.
    arrays: its results on each device.
    rest: the text from the arguments on.
    times: how often it runs. One in the body of a loop runs as often as the
      loop iterates, or can iterate if it may end early; a loop without a known
      trip count counts once.
    kernel: the name of the fused computation that it is in; '' if it is in
      none.
    operands: the arrays of each of its arguments; () of one that is not known.
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
    """Returns the bytes of its results."""
    return sum(array.size for array in self.arrays)

  @property
  def arguments(self) -> list[str]:
    """Returns the names of the instructions that it reads."""
    return re.findall(r'%([\w.-]+)', self.rest.partition(')')[0])

  @property
  def called(self) -> list[tuple[str, str]]:
    """Returns how it calls other computations, and their names."""
    return [
      (kind, name.strip().removeprefix('%'))
      for kind, one, several in _CALLED.findall(self.rest)
      for name in ([one] if one else several.split(','))
    ]

  @property
  def number(self) -> int | None:
    """Returns the value of an integer constant, or a parameter's index."""
    text = self.rest.partition(')')[0]
    return int(text) if text.isdigit() else None

  @property
  def contracted(self) -> list[int]:
    """Returns the axes of the left factor that a dot sums over."""
    axes = self._found(r'lhs_contracting_dims=\{([\d,]*)\}')
    return [int(axis) for axis in axes.split(',') if axis]

  @property
  def labels(self) -> list[str]:
    """Returns the letters of the axes of a convolution's factors and result."""
    return re.split('_|->', self._found(r'dim_labels=([\w>-]+)'))

  def window(self, axis: int) -> dict[str, int]:
    """Returns how a convolution's window moves along an axis.

    Of the padding only that at the beginning counts.
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
    """Returns the operations that a custom kernel says it makes; 0: unknown."""
    return int(self._found(r'"cost_estimate":\{"flops":"(\d+)"') or 0)

  @property
  def said_bytes(self) -> int:
    """The bytes that such a kernel reads and writes; 0: unknown."""
    return int(self._found(r'"bytes_accessed":"(\d+)"') or 0)

  @property
  def cycles(self) -> int:
    """The cycles that the compiler for TPU expects; 0: unknown."""
    cycles = int(self._found(r'"estimated_cycles":"(\d+)"') or 0)
    return 0 if cycles == _NO_ESTIMATE else cycles

  @property
  def channel(self) -> str:
    """Returns the number of the channel of a collective."""
    return self._found(r'\bchannel_id=(\d+)')

  @property
  def group(self) -> tuple[int, ...]:
    """Returns the devices in the first one's group; () if all are in one."""
    # XLA writes groups in three ways: as a list of all devices that is cut into
    # groups of a size, as the groups themselves, or as axes of a mesh.
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
    # `(2)4` is the middle of the axis cut into 2 x 4 x the rest.
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
    """Returns the text of the group of a pattern; '' if it does not match."""
    match = re.search(pattern, self.rest)
    return match[1] if match else ''


class Program(NamedTuple):
  """A compiled program for one device.

  Attributes:
    computations: the instructions of each computation by its name, callees
      before callers; the last instruction is the result.
    num_devices: the number of devices that it runs on.
  """

  computations: Mapping[str, list[Instruction]]
  num_devices: int

  @property
  def instructions(self) -> list[Instruction]:
    """Returns the instructions of all computations."""
    return [x for lines in self.computations.values() for x in lines]


def read(text: str) -> Program:
  """Returns the program of a text."""
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
  """Sets the counts, kernels and operands, which other lines decide."""
  times, kernels = defaultdict(int), set()
  times[next(reversed(computations))] = 1  # the entry computation is last
  # Callees stand before their callers, so in reverse order a caller's count is
  # complete before it is added to those of its callees.
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
  """Returns how often a loop iterates; 1 if unknown."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
    return int(known[1])
  # The compiler for TPU does not tell. Loops of JAX count from 0 up to a
  # constant, with which their condition compares.
  condition = computations.get(dict(loop.called)['condition'], [])
  numbers = {x.name: x.number for x in condition if x.opcode == 'constant'}
  limits = [
    numbers.get(x.arguments[1]) for x in condition if 'direction=LT' in x.rest
  ]
  whole = [limit for limit in limits if limit is not None]
  return whole[0] if len(whole) == 1 else 1


def _arrays(shape: str) -> tuple[Array, ...]:
  """Returns the arrays of an HLO shape."""
  return tuple(
    Array(
      kind,
      tuple(int(d.removeprefix('<=')) for d in dims.split(',') if d),
      bool(_FAST.search(layout)),
    )
    for kind, dims, layout in _ARRAY.findall(shape)
  )


def _numbers(text) -> np.ndarray:
  """Returns the numbers that `[2,4]T(1,0)` stands for, in their order."""
  sizes, _, order = text.partition('T')
  shape = [int(n) for n in re.findall(r'\d+', sizes)]
  numbers = np.arange(math.prod(shape)).reshape(shape)
  if order:
    numbers = numbers.transpose([int(n) for n in re.findall(r'\d+', order)])
  return numbers.ravel()
