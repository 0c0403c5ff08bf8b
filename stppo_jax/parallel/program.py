"""Counts what a compiled program does on each device, from its HLO text.

An instruction counts as often as it runs, one in the body of a loop as often as
the loop iterates. Bytes and operations are those of one device.
"""

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import re

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


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction of a program.

  Attributes:
    opcode: the operation's name in HLO.
    arrays: (element type, dimensions) of its results on each device.
    operands: (element type, dimensions) of its arguments.
    rest: the text from the arguments on.
    times: how often it runs.
  """

  opcode: str
  arrays: tuple[tuple[str, tuple[int, ...]], ...]
  operands: tuple[tuple[str, tuple[int, ...]], ...]
  rest: str
  times: int

  @property
  def size(self) -> int:
    """Bytes of its results."""
    return sum(map(_size, self.arrays))


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective operation: communication between devices.

  Attributes:
    kind: 'all-gather', 'all-reduce', ...
    arrays: (element type, dimensions) of its results.
    size: bytes of its operands or of its results, whichever is larger.
    devices: number of devices in one group.
    times: how often it runs.
  """

  kind: str
  arrays: tuple[tuple[str, tuple[int, ...]], ...]
  size: int
  devices: int
  times: int

  @property
  def sent(self) -> float:
    """Bytes that a device sends in a ring, over all times that it runs."""
    return self.times * _SENT[self.kind](self.size, self.devices)


def instructions(text: str) -> list[Instruction]:
  """Returns all instructions; a loop without a known trip count counts once."""
  computations = dict(_computations(text))
  times = defaultdict(int)
  times[next(reversed(computations))] = 1  # the entry computation is last
  # Callees stand before their callers, so in reverse order a caller's count is
  # complete before it is added to those of its callees.
  for name, lines in reversed(computations.items()):
    for line in lines:
      for kind, callee in _called(line['rest']):
        trips = _TRIPS.search(line['rest']) if kind == 'body' else None
        times[callee] += times[name] * (int(trips[1]) if trips else 1)
  found = []
  for name, lines in computations.items():
    arrays = {line['name']: _arrays(line['shape']) for line in lines}
    for line in lines:
      arguments = re.findall(r'%([\w.-]+)', line['rest'].partition(')')[0])
      found.append(
        Instruction(
          line['opcode'],
          arrays[line['name']],
          tuple(x for a in arguments for x in arrays.get(a, ())),
          line['rest'],
          times[name],
        )
      )
  return found


def collectives(text: str) -> list[Collective]:
  """Returns the collective operations of a program."""
  partitions = re.search(r'num_partitions=(\d+)', text)
  num_devices = int(partitions[1]) if partitions else 1
  found = []
  for line in instructions(text):
    kind = line.opcode.removesuffix('-start')
    if kind in _SENT:
      # The result of an asynchronous start, except all-reduce-start, is a tuple
      # (operand, result): its largest array counts, not the sum.
      size = max(*map(_size, line.arrays)) if len(line.arrays) > 1 else 0
      if not (line.opcode.endswith('-start') and kind != 'all-reduce'):
        size = line.size
      size = max(size, sum(map(_size, line.operands)))
      devices = _group_size(line.rest) or num_devices
      found.append(Collective(kind, line.arrays, size, devices, line.times))
  return found


def operations(text: str) -> int:
  """Returns the multiplications and additions of all matrix products."""
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
  return total


def _computations(text) -> Iterator[tuple[str, list[Mapping[str, str]]]]:
  """Yields the name of each computation and its parsed instructions."""
  name, lines = None, []
  for line in text.splitlines():
    if match := _INSTRUCTION.match(line):
      lines.append(match.groupdict())
    elif line.startswith('}') and name is not None:
      yield name, lines
      name = None
    elif match := _COMPUTATION.match(line):
      name, lines = match['name'], []


def _called(rest) -> Iterator[tuple[str, str]]:
  """Yields how an instruction calls other computations, and their names."""
  for kind, one, several in _CALLED.findall(rest):
    names = [one] if one else several.split(',')
    for name in names:
      yield kind, name.strip().removeprefix('%')


def _arrays(shape) -> tuple[tuple[str, tuple[int, ...]], ...]:
  """Returns (element type, dimensions) of the arrays of an HLO shape."""
  return tuple(
    (kind, tuple(int(d.removeprefix('<=')) for d in dims.split(',') if d))
    for kind, dims in _ARRAY.findall(shape)
  )


def _size(array: tuple[str, Sequence[int]]) -> int:
  """Returns the bytes of an array."""
  kind, dims = array
  digits = re.search(r'\d+', kind)
  bits = int(digits[0]) if digits else 8 * (kind == 'pred')
  return math.prod(dims) * bits // 8


def _group_size(rest) -> int:
  """Returns the number of devices in one group; 0 if all are in one."""
  if match := re.search(r'replica_groups=\[\d+,(\d+)\]', rest):
    return int(match[1])
  if match := re.search(r'replica_groups=\{\{([\d,]+)\}', rest):
    return match[1].count(',') + 1
  match = re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', rest)
  if not match:
    return 0
  sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
  return math.prod(
    int(size or sizes[axis])
    for axis, size in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
  )
