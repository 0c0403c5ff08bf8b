"""Describes devices that this machine may lack, and compiles for them.

    v5e:4x4       a TPU slice: a generation, and the chips along each axis
    gpu:h100:8    a number of GPUs, up to eight of them in a host
    cpu:8         a number of virtual devices of a CPU

The compiler for TPU is in the package `libtpu`, which needs no TPU:

    chips = topology.devices(topology.find('v5e:4x4'))
    mesh = mesh_lib.make_mesh(data=2, fsdp=8, tensor=1, devices=chips)
    ...                                   # build and lower programs on the mesh
    compiled = topology.compiled(lowered)

The devices can neither hold arrays nor run programs, so programs are lowered
with shapes that have shardings on the mesh. The function `virtual` needs no
compiler. The devices that it returns can form a mesh, which suffices to compute
shardings, but no program can be compiled for them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import os
import re
import types
from typing import Any, NamedTuple

import jax

GIB = 2**30


class Limits(NamedTuple):
  """Holds the limits of one device, as its maker publishes them.

  Attributes:
    memory: GiB that programs can use; for a TPU, the most that its compiler
      accepts.
    operations: bfloat16 multiplications and additions per second.
    bandwidth: bytes per second to and from the memory of the device.
    links: bytes per second that the device sends to other devices of its host;
      on a TPU, through both links of one axis of the torus.
    network: bytes per second that the device sends to another host.
    clock: cycles per second, for `hlo_cost.estimated_cycles`.
    per_chip: the number of devices of one chip.
  """

  memory: float
  operations: float
  bandwidth: float
  links: float
  network: float
  clock: float = 1.0
  per_chip: int = 1


# Source of operations and bandwidth: the page of each TPU version at
# cloud.google.com/tpu/docs. Source of the links of v4 to v6e: the table of "How
# to Scale Your Model" (jax-ml.github.io/scaling-book/tpus), by Google's
# engineers, which gives 45 or 90 GB/s for a link in one direction. The pages of
# Google imply 50 or 100 GB/s: they give the sum over both directions and all
# ports of a chip, 400 GB/s for v5e (four ports), 800 for v6e (four ports) and
# 1200 for v5p (six ports). The page of v4 gives no number. The clocks are
# unverified.
TPUS: Mapping[str, Limits] = {
  'v4': Limits(30.75, 275e12, 1.2e12, 90e9, 90e9, 1.05e9),
  'v5e': Limits(15.75, 197e12, 0.82e12, 90e9, 90e9, 1.5e9),
  'v5p': Limits(95.74, 459e12, 2.765e12, 180e9, 180e9, 1.75e9),
  'v6e': Limits(31.25, 918e12, 1.64e12, 180e9, 180e9, 1.75e9),
  # A chip of tpu7x is two devices, and each device has half of the chip's
  # rates. The rate of the links follows from Google's page: 1200 GB/s through
  # six ports in both directions.
  'tpu7x': Limits(94.75, 1153e12, 3.69e12, 100e9, 100e9, 1.9e9, 2),
}
# Source: NVIDIA's data sheets for A100, H100 and H200 (SXM). Operations are the
# numbers for dense matrices; links are half of the numbers for both directions.
# Two numbers are unverified: the network, for which each GPU has an adapter of
# 200 Gb/s (A100) or 400 Gb/s as in NVIDIA's DGX, and the usable memory of A100.
GPUS: Mapping[str, Limits] = {
  'a100': Limits(79.3, 312e12, 2.04e12, 300e9, 25e9),
  'h100': Limits(79.2, 989e12, 3.35e12, 450e9, 50e9),
  'h200': Limits(139.8, 989e12, 4.8e12, 450e9, 50e9),
}
# The rates of this CPU are guesses. They suffice to compare two plans for CPUs.
CPU = Limits(80.0, 50e9, 10e9, 5e9, 1e9)

_NUMBER = re.compile(r'0*[1-9]\d*')
_CHIPS = re.compile(rf'{_NUMBER.pattern}(x{_NUMBER.pattern}){{1,2}}')
_GPUS_PER_HOST, _CHIPS_PER_HOST = 8, 4
# Slices with eight chips in a single host. All other slices have at most four
# chips in a host.
_ONE_HOST = ('v5e:2x4', 'v6e:2x4')
# On a machine with TPUs, environment variables with these prefixes describe its
# hosts and chips. `devices` removes them and sets the variables of
# `_ENVIRONMENT`. Otherwise libtpu would look for the machine's TPU, and for
# another process that uses it.
_OF_A_MACHINE = 'TPU_', 'CLOUD_TPU_', 'MEGASCALE_'
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_LOG_DIR': 'disabled',
}
_SIZE = re.compile(r'\b(\d[\d.]*[KMGT])')


class DoesNotFit(ValueError):
  """Says in one line that a program needs more memory than a device has."""


class Rejected(ValueError):
  """Says in one line that the compiler cannot compile a program."""


@dataclasses.dataclass(frozen=True)
class Topology:
  """Describes some devices of one kind.

  Attributes:
    name: the name that `find` was given.
    platform: 'tpu', 'gpu' or 'cpu'.
    limits: the limits of one device.
    num_devices: the number of devices.
    per_host: the number of devices of a host.
  """

  name: str
  platform: str
  limits: Limits
  num_devices: int
  per_host: int

  @property
  def num_chips(self) -> int:
    """The number of chips, by which providers charge."""
    return self.num_devices // self.limits.per_chip


@dataclasses.dataclass(frozen=True)
class VirtualDevice:
  """Stands for a device in a mesh; it holds no arrays and runs no programs."""

  id: int
  process_index: int
  platform: str
  device_kind: str

  @property
  def client(self) -> Any:
    """A stand-in for jax's client, with the process index 0.

    The local devices of a mesh are its devices with this process index.
    """
    return types.SimpleNamespace(process_index=lambda: 0)

  def addressable_memories(self) -> list[Any]:
    """Returns stand-ins for the device's memories, which only have a `kind`."""
    kinds = 'device', 'pinned_host'
    return [types.SimpleNamespace(kind=kind) for kind in kinds]


def find(name: str) -> Topology:
  """Returns the topology that a name, such as 'v5e:4x4', describes.

  Raises:
    ValueError: the name describes no topology; the message lists valid names.
  """
  kind, _, size = name.rpartition(':')
  gpu = kind.removeprefix('gpu:')
  if kind in TPUS and _CHIPS.fullmatch(size):
    limits, chips = TPUS[kind], math.prod(map(int, size.split('x')))
    host = chips if name in _ONE_HOST else _CHIPS_PER_HOST
    count, host = chips * limits.per_chip, host * limits.per_chip
    return Topology(name, 'tpu', limits, count, min(count, host))
  if gpu != kind and gpu in GPUS and _NUMBER.fullmatch(size):
    host = min(int(size), _GPUS_PER_HOST)
    return Topology(name, 'gpu', GPUS[gpu], int(size), host)
  if kind == 'cpu' and _NUMBER.fullmatch(size):
    return Topology(name, 'cpu', CPU, int(size), int(size))
  raise ValueError(
    f'{name}: no such topology; must be a TPU generation and its chips along '
    f'each axis, such as v5e:4x4 (generations: {", ".join(TPUS)}), or '
    f'gpu:KIND:NUMBER, such as gpu:h100:8 (kinds: {", ".join(GPUS)}), or '
    'cpu:NUMBER'
  )


def virtual(topology: Topology) -> list[Any]:
  """Returns devices that can form a mesh, but for which no program compiles.

  Raises:
    ValueError: the last host would have fewer devices than the other hosts;
      the message is one line.
  """
  if topology.num_devices % topology.per_host:
    raise ValueError(
      f'{topology.name}: the number of devices must be a multiple of the '
      f'{topology.per_host} devices that each host has'
    )
  return [
    VirtualDevice(n, n // topology.per_host, topology.platform, topology.name)
    for n in range(topology.num_devices)
  ]


def devices(topology: Topology) -> list[Any]:
  """Returns devices of a TPU slice, for which programs can be compiled.

  The devices of each host are adjacent, as in a run.

  Raises:
    ValueError: there is no such slice, or libtpu is not installed; the message
      is one line.
  """
  # Imported here because only this function uses the module.
  from jax.experimental import topologies

  name = topology.name
  options: dict[str, Any] = {}
  # By default, a host has four chips or more, but 1x1 is a host with one chip.
  if name.endswith(':1x1'):
    options['chips_per_host_bounds'] = (1, 1, 1)
  if name in _ONE_HOST:
    options['chips_per_host_bounds'] = (2, 4, 1)
  # By default, a chip of v4 would be two devices. As a megacore, the chip is
  # one device.
  if name.startswith('v4:'):
    options['chip_config_name'] = 'megacore'
  for key in [key for key in os.environ if key.startswith(_OF_A_MACHINE)]:
    if key != 'TPU_LIBRARY_PATH':  # the path of libtpu, which is still needed
      del os.environ[key]
  os.environ.update(_ENVIRONMENT)
  try:
    found = topologies.get_topology_desc(name, platform='tpu', **options)
  except Exception as error:
    if 'not installed' in str(error):
      reason = (
        "needs the package libtpu: run pip install '.[tpu]' in the clone, or "
        '--compile=False for an estimate without it'
      )
    else:
      reason = str(error).partition('\n')[0]
    raise ValueError(f'{name}: {reason}') from error
  return sorted(found.devices, key=lambda d: (d.process_index, d.id))


def compiled(lowered: Any) -> Any:
  """Compiles a lowered program, and returns the compiled program.

  Raises:
    DoesNotFit: the program needs more memory than a device has.
    Rejected: the compiler fails.
  """
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    # The first two sizes in the message are the memory that the program needs
    # and the memory that the device has.
    sizes = _SIZE.findall(str(error))
    if str(error).startswith('RESOURCE_EXHAUSTED') and len(sizes) > 1:
      needed, there = sizes[:2]
      line = f'needs {needed}iB of {there}iB on a chip'
      raise DoesNotFit(line) from error
    first = str(error).strip().partition('\n')[0]
    raise Rejected(f'the compiler rejects it: {first}') from error


# Name that jax gives a kind of device -> the limits of the kind.
_KINDS = {
  'TPU v4': TPUS['v4'],
  'TPU v5 lite': TPUS['v5e'],
  'TPU v5e': TPUS['v5e'],
  'TPU v5': TPUS['v5p'],
  'TPU v5p': TPUS['v5p'],
  'TPU v6 lite': TPUS['v6e'],
  'TPU v6e': TPUS['v6e'],
  'TPU7x': TPUS['tpu7x'],
  'NVIDIA A100-SXM4-40GB': GPUS['a100'],
  'NVIDIA A100-SXM4-80GB': GPUS['a100'],
  'NVIDIA H100 80GB HBM3': GPUS['h100'],
  'NVIDIA H200': GPUS['h200'],
}


def limits_of(device: Any) -> Limits | None:
  """Returns the limits of a device; None if unknown, as for a real CPU."""
  if isinstance(device, VirtualDevice):
    return find(device.device_kind).limits
  return _KINDS.get(device.device_kind)


def slice_of(chips: Sequence[Any]) -> str:
  """Returns the name of the TPU slice that chips form; '' if not known."""
  limits = limits_of(chips[0])
  kinds = [kind for kind, known in TPUS.items() if known is limits]
  axes = list(zip(*(chip.coords for chip in chips)))
  sizes = [max(axis) - min(axis) + 1 for axis in axes]
  # Slices of v5e and v6e have two axes, so a third axis of size 1 is left out.
  names = [str(size) for n, size in enumerate(sizes) if n < 2 or size > 1]
  return f'{kinds[0]}:{"x".join(names)}' if kinds else ''


def peak_operations(mesh: jax.sharding.Mesh) -> float | None:
  """Returns the peak bfloat16 operations per second of a mesh's devices.

  The result is the sum over the devices; None if the limits of a device are not
  known, as for a real CPU.
  """
  limits = [limits_of(device) for device in mesh.devices.flat]
  if None in limits:
    return None
  return sum(x.operations for x in limits if x)
