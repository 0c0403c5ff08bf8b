"""Makes the mesh of a run, and checks that it divides the sizes of a model."""

from collections.abc import Mapping, Sequence
import math
import re

import jax
import numpy as np

AXES = ('data', 'fsdp', 'expert', 'tensor')
BATCH_AXES = ('data', 'fsdp', 'expert')
# Devices along `expert` hold different experts of a mixture of experts. The
# width of all other weights is sharded over `fsdp` and `expert` together.
WEIGHT_AXES = ('fsdp', 'expert')

# If the kind of a device or the name of a topology matches this pattern, the
# compiler (libtpu 0.0.42) ends the process when it compiles a collective among
# some, but not all, chips of several hosts.
_ONLY_WHOLE_HOSTS = re.compile(r'v[56](e\b| lite\b)')


def make_mesh(
  *,
  data: int,
  fsdp: int,
  tensor: int,
  expert: int = 1,
  devices: Sequence | None = None,
) -> jax.sharding.Mesh:
  """Returns a mesh with the axes `AXES`.

  Args:
    data, fsdp, tensor, expert: the number of devices along each axis; one of
      the four may be -1, which means all devices that remain.
    devices: the devices of the mesh; None: all devices of jax.

  Raises:
    ValueError: the product of the four is not the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = [data, fsdp, expert, tensor]
  if sizes.count(-1) == 1:
    known = math.prod(size for size in sizes if size != -1)
    sizes[sizes.index(-1)] = len(devices) // max(known, 1)
  if math.prod(sizes) != len(devices):
    experts = f'mesh.expert={expert} ' if expert != 1 else ''
    raise ValueError(
      f'mesh.data={data} mesh.fsdp={fsdp} {experts}mesh.tensor={tensor} does '
      f'not fit {len(devices)} devices: the sizes must multiply to that number'
    )
  return jax.sharding.Mesh(
    np.asarray(devices).reshape(sizes),
    AXES,
    # Auto: the compiler derives every sharding that no code constrains.
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
  )


def divide(devices: Sequence, fraction: float) -> tuple[list, list]:
  """Returns the devices that learn, and the devices that only collect.

  The last devices of each host collect.

  Args:
    devices: the devices of all hosts.
    fraction: the share of each host's devices that only collects, rounded to
      whole devices; 0: all devices learn.

  Raises:
    ValueError: on a host, no device would learn or none would collect, or the
      compiler would fail for the devices that learn; the message is one line.
  """
  by_host: dict[int, list] = {}
  for device in devices:
    by_host.setdefault(device.process_index, []).append(device)
  kind = devices[0].device_kind
  if fraction and len(by_host) > 1 and _ONLY_WHOLE_HOSTS.search(kind):
    raise ValueError(
      f'mesh.collect_fraction={fraction}: must be 0 on {len(by_host)} hosts of '
      f'{kind}, because their compiler fails if only some chips of several '
      'hosts learn; it may be above 0 on hosts of v4 or v5p, and on a single '
      'host of v5e or v6e'
    )
  learning, collecting = [], []
  for host in by_host.values():
    count = round(fraction * len(host))
    if fraction and not 0 < count < len(host):
      raise ValueError(
        f'mesh.collect_fraction={fraction}: must leave at least one of the '
        f'{len(host)} devices of a host to collect, and one to learn; '
        f'{fraction} of {len(host)} is rounded to {count}; '
        f'{0.5 if len(host) > 1 else 0} would do'
      )
    learning += host[: len(host) - count]
    collecting += host[len(host) - count :]
  return learning, collecting


def make_learning_mesh(
  *,
  data: int,
  fsdp: int,
  expert: int,
  tensor: int,
  collect_fraction: float,
  collectors: int = 0,
  devices: Sequence | None = None,
) -> jax.sharding.Mesh:
  """Returns the mesh of training, over the devices that learn.

  Args:
    data, fsdp, expert, tensor: see `make_mesh`.
    collect_fraction: the share of each host's devices that only collects.
    collectors: the number of hosts that only collect; it has no effect, since
      the devices of these hosts are not in `devices`.
    devices: the devices of the hosts that learn; None: all devices of jax.

  Raises:
    ValueError: the axes do not fit the devices.
  """
  del collectors  # jax sees no devices of hosts that only collect
  learning, collecting = divide(devices or jax.devices(), collect_fraction)
  try:
    return make_mesh(
      data=data, fsdp=fsdp, expert=expert, tensor=tensor, devices=learning
    )
  except ValueError as error:
    if not collecting:
      raise
    raise ValueError(
      f'{error}; the other {len(collecting)} devices collect: '
      f'mesh.collect_fraction={collect_fraction}'
    ) from error


def platform(mesh: jax.sharding.Mesh | None) -> str:
  """Returns the platform of a mesh's devices: 'cpu', 'gpu' or 'tpu'.

  Code that builds programs asks the mesh and not this process for the platform,
  because a program may be compiled for devices of another machine (`topology`).

  Args:
    mesh: the result of `make_mesh`; None: one CPU.
  """
  return 'cpu' if mesh is None else mesh.devices.flat[0].platform


def num_hosts(mesh: jax.sharding.Mesh) -> int:
  """Returns the number of hosts that the devices of a mesh belong to."""
  return len({device.process_index for device in mesh.devices.flat})


def check_divides(
  mesh: jax.sharding.Mesh,
  sharded: Mapping[str, Mapping[str, int]],
  *,
  num_kv_heads: int,
  whose: str = '',
) -> None:
  """Raises ValueError if an axis does not divide a dimension that it shards.

  If there are fewer key and value heads than devices along `tensor`, devices
  share heads: with 4 heads on 8 devices, two devices compute each head.

  Args:
    mesh: the result of `make_mesh`.
    sharded: for each mesh axis, the names and sizes of the dimensions that the
      axis must divide.
    num_kv_heads: the number of key and value heads; the size of `tensor` must
      divide this number or be a multiple of it.
    whose: the text that follows the dimensions in the message, such as
      ' of the value model'.

  Raises:
    ValueError: one line with the dimensions that an axis does not divide, and
      the numbers of devices that would fit.
  """
  for axis, sizes in sharded.items():
    heads = num_kv_heads if axis == 'tensor' else 0
    # The width of weights is sharded over both `WEIGHT_AXES`, so the product of
    # the sizes of these two axes must divide the width.
    times = mesh.shape['expert'] if axis == 'fsdp' else 1
    if wrong := _undivided(sizes, heads, times * mesh.shape[axis]):
      fitting = [
        str(n)
        for n in range(1, mesh.size // times + 1)
        if not _undivided(sizes, heads, times * n)
      ]
      beside = f' with expert={times}' if times > 1 else ''
      raise ValueError(
        f'mesh {axis}={mesh.shape[axis]}{beside} does not divide '
        f'{", ".join(wrong)}{whose}; '
        f'on at most {mesh.size} devices, {axis} may be {", ".join(fitting)}'
      )


def _undivided(
  sizes: Mapping[str, int], num_kv_heads: int, devices: int
) -> list[str]:
  """Returns NAME=SIZE of each size that the number of devices does not divide.

  See `check_divides` for `num_kv_heads`.
  """
  wrong = [f'{name}={size}' for name, size in sizes.items() if size % devices]
  if num_kv_heads % devices and devices % num_kv_heads:
    wrong.append(f'num_kv_heads={num_kv_heads}')
  return wrong
