"""The TPU slices that exist: their names, topologies and machines.

Cloud TPU names a slice by its generation and a count, such as v5litepod-16. GKE
names a slice by the label of its nodes and a topology, such as
tpu-v5-lite-podslice and 4x4. The names, sizes and runtimes are from these
pages:

  https://cloud.google.com/tpu/docs/system-architecture-tpu-vm (a page for each
  generation), https://cloud.google.com/tpu/docs/runtimes and
  https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
"""

import math
import re
from typing import NamedTuple


class Generation(NamedTuple):
  """A generation of TPUs.

  Attributes:
    accelerator: the text before the count in the name of a slice of Cloud TPU;
      '' = only GKE has this generation.
    counted: what each chip adds to the count in this name: 1 if the name counts
      chips, 2 if the name counts cores.
    label: the value of cloud.google.com/gke-tpu-accelerator.
    runtime: the software of the machines in Cloud TPU.
    largest: the number of chips of the largest slice.
    axes: the number of axes of a topology.
    devices: the number of devices that jax has for each chip.
  """

  accelerator: str
  counted: int
  label: str
  runtime: str
  largest: int
  axes: int
  devices: int = 1


GENERATIONS = {
  'v4': Generation('v4', 2, 'tpu-v4-podslice', 'tpu-ubuntu2204-base', 4096, 3),
  'v5e': Generation(
    'v5litepod', 1, 'tpu-v5-lite-podslice', 'v2-alpha-tpuv5-lite', 256, 2
  ),
  'v5p': Generation('v5p', 2, 'tpu-v5p-slice', 'v2-alpha-tpuv5', 6144, 3),
  'v6e': Generation('v6e', 1, 'tpu-v6e-slice', 'v2-alpha-tpuv6e', 256, 2),
  'tpu7x': Generation('', 2, 'tpu7x', '', 9216, 3, 2),
}
_FLAT = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_CUBIC = ('2x2x1', '2x2x2', '2x2x4', '2x4x4')  # larger: multiples of 4
_NUMBER = re.compile(r'[1-9]\d{0,4}')


class Slice(NamedTuple):
  """A slice of Cloud TPU: its chips, its machines, and their software."""

  chips: int
  machines: int
  runtime: str


def find(accelerator: str) -> Slice:
  """Returns the slice that has a name in Cloud TPU, such as v5litepod-16.

  Raises:
    ValueError: if there is no such slice; the message is one line that begins
      with "must be", for a caller that writes the flag in front of it.
  """
  name, _, count = accelerator.rpartition('-')
  known = {x.accelerator: x for x in GENERATIONS.values() if x.accelerator}
  if name not in known or not _NUMBER.fullmatch(count):
    raise ValueError(
      f'must be GENERATION-COUNT, such as v5litepod-16; the generations are '
      f'{", ".join(known)}, and v5litepod is v5e'
    )
  generation = known[name]
  chips, rest = divmod(int(count), generation.counted)
  sizes = [_chips(x) for x in (_FLAT if generation.axes == 2 else _CUBIC)]
  is_large = generation.axes == 3 and chips % 64 == 0
  if rest or not (chips in sizes or is_large) or chips > generation.largest:
    small = ', '.join(f'{name}-{x * generation.counted}' for x in sizes)
    more = f', or a multiple of {64 * generation.counted} up to '
    more += str(generation.largest * generation.counted)
    raise ValueError(f'must be {small}{more * (generation.axes == 3)}')
  # A machine of Cloud TPU has four chips, but a slice of eight is one machine.
  is_one = chips < 4 or (generation.axes == 2 and chips == 8)
  return Slice(chips, 1 if is_one else chips // 4, generation.runtime)


def nodes(label: str, topology: str, chips: str) -> tuple[int, int]:
  """Returns the number of nodes of a slice in GKE, and of chips per node.

  Args:
    label: the value of cloud.google.com/gke-tpu-accelerator.
    topology: the numbers of chips along the axes, such as 4x4.
    chips: the number of chips per node. If '', a node has four chips, or all
      chips of a slice with fewer than four.

  Raises:
    ValueError: if GKE has no such slice; the message is one line that begins
      with the flag that is wrong.
  """
  generation = next(x for x in GENERATIONS.values() if x.label == label)
  start = f'--topology={topology}: must be '
  if generation.axes == 2 and topology not in _FLAT:
    raise ValueError(f'{start}{", ".join(_FLAT)} for {label}')
  if generation.axes == 3 and topology not in _CUBIC:
    sizes = [int(x) for x in topology.split('x') if _NUMBER.fullmatch(x)]
    is_cubic = len(sizes) == len(topology.split('x')) == 3
    is_cubic = is_cubic and sizes == sorted(sizes)
    if not is_cubic or any(x % 4 for x in sizes):
      raise ValueError(
        f'{start}{", ".join(_CUBIC)}, or three multiples of 4 that do not '
        f'decrease, for {label}'
      )
  total = _chips(topology)
  if total > generation.largest:
    raise ValueError(f'{start}at most {generation.largest} chips for {label}')
  choices = [min(total, 4)]
  if topology == '2x4':
    choices.append(8)  # the only slice with two kinds of nodes
  each = int(chips or choices[0])
  if each not in choices:
    text = ' or '.join(map(str, choices))
    raise ValueError(
      f'--chips={chips}: must be {text}, the chips of a node of '
      f'--topology={topology}'
    )
  return total // each, each


def _chips(topology: str) -> int:
  return math.prod(map(int, topology.split('x')))
