"""Counts what a compiled program does on each device, from its HLO text.

An instruction counts as often as it runs, one in the body of a loop as often as
the loop iterates. Bytes and operations are those of one device. The text may be
that of the compiler for CPU, GPU or TPU.
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import re
from typing import Any

import numpy as np

# A parsed instruction, see `computations`.
Line = Mapping[str, str]

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
# An instruction: `ROOT %name = f32[8,4]{1,0} opcode(...`, or a tuple of shapes.
_INSTRUCTION = re.compile(
  r'^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.+?) '
  r'(?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$'
)
_COMPUTATION = re.compile(r'^(?:ENTRY )?%?(?P<name>[\w.-]+) .*\{$')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\]')
_CALLED = re.compile(
  r'\b(condition|body|calls|to_apply|true_computation|false_computation'
  r'|branch_computations)=(?:%?([\w.-]+)|\{([^}]*)\})'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CHANNEL = re.compile(r'\bchannel_id=(\d+)')
# The compiler for TPU estimates how long a kernel computes; it does not count
# waits for other devices, nor kernels that it did not make itself. Of some that
# it cannot estimate it writes the largest integer.
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**63 - 1
# A kernel that the compiler did not make may say how much it computes.
_KERNEL_COST = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
# How the compiler for TPU names a kernel that is a reduce-scatter; inside, the
# text has an all-reduce, of whose result a part is kept.
_REDUCE_SCATTER_KERNEL = 'all-reduce-scatter'


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction of a program.

  Attributes:
    opcode: the operation's name in HLO.
    arrays: (element type, dimensions) of its results on each device.
    operands: (element type, dimensions) of its arguments.
    rest: the text from the arguments on.
    times: how often it runs.
    kernel: the name of the fused computation that it is in; '' if it is in
      none.
  """

  opcode: str
  arrays: tuple[tuple[str, tuple[int, ...]], ...]
  operands: tuple[tuple[str, tuple[int, ...]], ...]
  rest: str
  times: int
  kernel: str

  @property
  def size(self) -> int:
    """Bytes of its results."""
    return sum(map(size_of, self.arrays))


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective operation: communication between devices.

  Attributes:
    kind: 'all-gather', 'all-reduce', ...
    arrays: (element type, dimensions) of its results.
    size: bytes of its operands or of its results, whichever is larger.
    group: the numbers of the devices in the group of the first device, in the
      order of the mesh.
    times: how often it runs.
  """

  kind: str
  arrays: tuple[tuple[str, tuple[int, ...]], ...]
  size: int
  group: tuple[int, ...]
  times: int

  @property
  def devices(self) -> int:
    """The number of devices in one group."""
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


def instructions(text: str) -> list[Instruction]:
  """Returns all instructions; a loop without a known trip count counts once."""
  parsed = computations(text)
  times, fused = run_counts(parsed)
  found = []
  for name, lines in parsed.items():
    arrays = {line['name']: _arrays(line['shape']) for line in lines}
    for line in lines:
      found.append(
        Instruction(
          line['opcode'],
          arrays[line['name']],
          tuple(x for a in arguments(line) for x in arrays.get(a, ())),
          line['rest'],
          times[name],
          name if name in fused else '',
        )
      )
  return found


def run_counts(
  parsed: dict[str, list[Line]],
) -> tuple[Mapping[str, int], set[str]]:
  """Returns how often each computation runs, and which are those of kernels.

  A loop that may end early counts as often as it can iterate.

  Args:
    parsed: the result of `computations`.
  """
  times, fused = defaultdict(int), set()
  times[next(reversed(parsed))] = 1  # the entry computation is last
  # Callees stand before their callers, so in reverse order a caller's count is
  # complete before it is added to those of its callees.
  for name, lines in reversed(parsed.items()):
    for line in lines:
      trips = _trips(line, parsed)
      for kind, callee in called(line):
        times[callee] += times[name] * (trips if kind == 'body' else 1)
        if line['opcode'] == 'fusion':
          fused.add(callee)
  return times, fused


def collectives(text: str) -> list[Collective]:
  """Returns the collective operations of a program."""
  partitions = re.search(r'num_partitions=(\d+)', text)
  num_devices = int(partitions[1]) if partitions else 1
  found, begun = [], set()
  for line in instructions(text):
    kind = line.opcode.removesuffix('-start')
    if kind in _SENT:
      channel = _CHANNEL.search(line.rest)
      scatters = line.kernel.startswith(_REDUCE_SCATTER_KERNEL)
      if line.kernel and channel and not scatters:
        # A collective that runs beside others is in the kernel that begins it,
        # in those that it runs beside, and in the one that ends it. A kernel
        # that is a reduce-scatter is one, though others may have its channel.
        if (kind, channel[1]) in begun:
          continue
        begun.add((kind, channel[1]))
      # The result of an asynchronous start, except all-reduce-start, is a tuple
      # (operand, result): its largest array counts, not the sum.
      size = max(*map(size_of, line.arrays)) if len(line.arrays) > 1 else 0
      if not (line.opcode.endswith('-start') and kind != 'all-reduce'):
        size = line.size
      size = max(size, sum(map(size_of, line.operands)))
      group = _group(line.rest) or tuple(range(num_devices))
      if scatters:
        kind = 'reduce-scatter'
      found.append(Collective(kind, line.arrays, size, group, line.times))
  return found


def operations(text: str) -> int:
  """Returns the multiplications and additions of all matrix products.

  Of kernels that the compiler did not make, it is what they say that they
  compute. Products of rows and experts say it; attention does not.
  """
  total = 0
  for line in instructions(text):
    if line.opcode == 'dot':
      contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', line.rest)
      assert contracted is not None  # every dot has the list; it may be empty
      dims = [int(d) for d in contracted[1].split(',') if d]
      _, left = line.operands[0]
      _, result = line.arrays[0]
      inner = math.prod(left[d] for d in dims)
      total += 2 * line.times * inner * math.prod(result)
    elif line.opcode == 'convolution':  # a matrix product, on TPU
      labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', line.rest)
      assert labels is not None  # every convolution has them
      (_, left), (_, right) = line.operands
      _, result = line.arrays[0]
      left, right, result = (
        dict(zip(names, sizes))
        for names, sizes in zip(labels.groups(), (left, right, result))
      )
      pairs = left.pop('f') * right.pop('o') * result.pop('b')
      for axis in result.keys() - {'f'}:
        # Products with padding are left out.
        pairs *= min(left[axis], result[axis]) * right[axis]
      total += 2 * line.times * pairs
    elif cost := _KERNEL_COST.search(line.rest):
      total += line.times * int(cost[1])
  return total


def estimated_cycles(text: str) -> int:
  """Returns the cycles that the compiler for TPU expects the kernels to take.

  It is a number to compare programs by, not a time: the compiler estimates the
  kernels that it makes itself, and no wait for another device. 0 in a program
  for another platform.
  """
  total = 0
  for line in instructions(text):
    cycles = None if line.kernel else _CYCLES.search(line.rest)
    if cycles and int(cycles[1]) != _NO_ESTIMATE:
      total += line.times * int(cycles[1])
  return total


def _trips(line: Line, parsed: Mapping[str, Sequence[Line]]) -> int:
  """Returns how often the loop of an instruction iterates; 1 if unknown."""
  if known := _TRIPS.search(line['rest']):
    return int(known[1])
  if line['opcode'] != 'while':
    return 1
  # The compiler for TPU does not tell. Loops of JAX count from 0 up to a
  # constant, with which their condition compares.
  condition = parsed.get(dict(called(line))['condition'], [])
  constants = {
    x['name']: int(x['rest'].partition(')')[0])
    for x in condition
    if x['opcode'] == 'constant' and x['rest'][0].isdigit()
  }
  limits = [
    constants[arguments(x)[1]]
    for x in condition
    if 'direction=LT' in x['rest'] and arguments(x)[1] in constants
  ]
  return limits[0] if len(limits) == 1 else 1


def computations(text: str) -> dict[str, list[Line]]:
  """Returns the instructions of each computation by its name.

  An instruction has a name, a shape, an opcode and the rest of its line from
  the arguments on.
  """
  found, name, lines = {}, None, []
  for line in text.splitlines():
    if match := _INSTRUCTION.match(line):
      lines.append(match.groupdict())
    elif line.startswith('}') and name is not None:
      found[name], name = lines, None
    elif match := _COMPUTATION.match(line):
      name, lines = match['name'], []
  return found


def called(line: Line) -> list[tuple[str, str]]:
  """Returns how an instruction calls other computations, and their names."""
  return [
    (kind, name.strip().removeprefix('%'))
    for kind, one, several in _CALLED.findall(line['rest'])
    for name in ([one] if one else several.split(','))
  ]


def arguments(line: Line) -> list[str]:
  """Returns the names of the instructions that an instruction reads."""
  return re.findall(r'%([\w.-]+)', line['rest'].partition(')')[0])


def _arrays(shape) -> tuple[tuple[str, tuple[int, ...]], ...]:
  """Returns (element type, dimensions) of the arrays of an HLO shape."""
  return tuple(
    (kind, tuple(int(d.removeprefix('<=')) for d in dims.split(',') if d))
    for kind, dims in _ARRAY.findall(shape)
  )


def size_of(array: tuple[str, Sequence[int]]) -> int:
  """Returns the bytes of an array, given its element type and dimensions."""
  kind, dims = array
  digits = re.search(r'\d+', kind)
  bits = int(digits[0]) if digits else 8 * (kind == 'pred')
  return math.prod(dims) * bits // 8


def _group(rest) -> tuple[int, ...]:
  """Returns the devices in the group of the first; () if all are in one."""
  match = re.search(r'replica_groups=\[\d+,(\d+)\]<=(\S+?)(?:, |$)', rest)
  if match:
    return tuple(map(int, _numbers(match[2])[: int(match[1])]))
  if match := re.search(r'replica_groups=\{\{([\d,]+)\}', rest):
    return tuple(map(int, match[1].split(',')))
  match = re.search(
    r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\S+)\))?[^{]*'
    r'\{([^}]*)\}',
    rest,
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


def _numbers(text) -> np.ndarray:
  """Returns the numbers that `[2,4]T(1,0)` stands for, in their order."""
  sizes, _, order = text.partition('T')
  shape = [int(n) for n in re.findall(r'\d+', sizes)]
  numbers = np.arange(math.prod(shape)).reshape(shape)
  if order:
    numbers = numbers.transpose([int(n) for n in re.findall(r'\d+', order)])
  return numbers.ravel()
