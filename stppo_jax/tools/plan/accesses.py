"""Counts the bytes that a compiled program moves to and from device memory.

Kernels keep what they compute inside them, so only what they take and return
counts. The compiler for TPU also moves arrays into a faster memory ahead of
their use, and marks them in the text; such an array counts when it is moved,
not when it is used. Of an array of which an instruction reads or overwrites a
part, the part counts. Instructions count as often as they run, and loops as
often as they can iterate, see `program`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import re

from stppo_jax.tools.plan import program

# Instructions that move nothing, or whose bytes count where they begin or in
# the computations that they call.
_FREE = frozenset(
  {
    *('parameter', 'constant', 'bitcast', 'get-tuple-element', 'tuple'),
    *('while', 'conditional', 'call', 'async-start', 'async-update'),
    *('after-all', 'optimization-barrier', 'partition-id', 'replica-id'),
  }
)
# The compiler for TPU puts pieces side by side that were moved one by one.
_JOINED = 'custom_call_target="ConcatBitcast"'
_READS_PART = frozenset({'slice', 'dynamic-slice', 'gather', 'slice-start'})
_WRITES_PART = 'dynamic-update-slice'
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?')
# In a layout: another memory than that in which arguments and results are.
_FAST = re.compile(r'S\([1-9]')


def count(text: str) -> int:
  """Returns the bytes that a device reads from its memory and writes to it.

  Args:
    text: the HLO text of a compiled program.
  """
  parsed = program.computations(text)
  times, fused = program.run_counts(parsed)
  total = 0
  for name, lines in parsed.items():
    if name in fused or not times[name]:
      continue
    by_name = {line['name']: line for line in lines}
    total += times[name] * sum(_moved(line, by_name, parsed) for line in lines)
  return total


def _moved(
  line: program.Line,
  by_name: Mapping[str, program.Line],
  parsed: Mapping[str, Sequence[program.Line]],
) -> int:
  """Returns the bytes that an instruction reads and writes.

  Args:
    line: the instruction.
    by_name: the instructions of its computation.
    parsed: all computations.
  """
  opcode = line['opcode']
  if opcode in _FREE or opcode.endswith('-done') or _JOINED in line['rest']:
    return 0
  operands = [
    _bytes(by_name[name]['shape']) if name in by_name else 0
    for name in program.arguments(line)
  ]
  if opcode == 'copy-start':  # (destination, source, context)
    return operands[0] + _sizes(line['shape'])[0]
  if opcode == 'slice-start':  # ((source), destination, context)
    fast, size = _sizes(line['shape'])[1], _sizes(line['shape'], all_=True)[1]
    return fast + (size if operands[0] else 0)
  if opcode.endswith('-start') and opcode != 'all-reduce-start':
    # A collective: (operands, as many results, contexts).
    results = _sizes(line['shape'])[len(operands) : 2 * len(operands)]
    return sum(operands) + sum(results)
  if opcode in _READS_PART:
    return min(operands[0], _all_bytes(line)) + _bytes(line['shape'])
  if opcode == _WRITES_PART:
    return 2 * operands[1] if operands[0] else operands[1]
  if opcode != 'fusion':
    return sum(operands) + _bytes(line['shape'])
  (_, callee), *_ = program.called(line)
  read = sum(
    min(size, _read_inside(parsed[callee], n, parsed))
    for n, size in enumerate(operands)
    if size
  )
  return read + _written(line, parsed[callee])


def _read_inside(
  lines: Sequence[program.Line],
  number: int,
  parsed: Mapping[str, Sequence[program.Line]],
) -> int:
  """Returns the bytes that a kernel reads of an argument, at most."""
  names = [
    line['name']
    for line in lines
    if line['opcode'] == 'parameter' and line['rest'].startswith(f'{number})')
  ]
  whole = sum(_all_bytes(x) for x in lines if x['name'] in names)
  total = 0
  for line in lines:
    given = program.arguments(line)
    for name in set(names).intersection(given):
      place = given.index(name)
      if line['opcode'] == 'bitcast':
        names.append(line['name'])
      elif line['opcode'] in _READS_PART and not place:
        total += _all_bytes(line)
      elif line['opcode'] == 'fusion':
        (_, callee), *_ = program.called(line)
        total += _read_inside(parsed[callee], place, parsed)
      elif line['opcode'] != _WRITES_PART or place:
        return whole
  # The rest of an array that is overwritten in part stays where it is, but what
  # is handed on as it is has been read.
  return whole if lines[-1]['name'] in names else total


def _written(line: program.Line, lines: Sequence[program.Line]) -> int:
  """Returns the bytes that a kernel writes of its results."""
  by_name = {x['name']: x for x in lines}
  root = lines[-1]
  roots = [root]
  if root['opcode'] == 'tuple':
    roots = [by_name[name] for name in program.arguments(root)]
  total = 0
  for size, result in zip(_sizes(line['shape']), roots, strict=False):
    while result['opcode'] == 'bitcast':
      result = by_name[program.arguments(result)[0]]
    if result['opcode'] == _WRITES_PART:
      update = by_name[program.arguments(result)[1]]
      size = min(size, _all_bytes(update))
    total += size
  return total


def _sizes(shape: str, *, all_: bool = False) -> list[int]:
  """Returns the bytes of each array of a shape; 0 for one in fast memory."""
  found = []
  for kind, dims, layout in _ARRAY.findall(shape):
    sizes = [int(n.removeprefix('<=')) for n in dims.split(',') if n]
    fast = _FAST.search(layout) and not all_
    found.append(0 if fast else program.size_of((kind, sizes)))
  return found


def _bytes(shape: str) -> int:
  return sum(_sizes(shape))


def _all_bytes(line: program.Line) -> int:
  return sum(_sizes(line['shape'], all_=True))
