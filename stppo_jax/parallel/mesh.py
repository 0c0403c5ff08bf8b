"""Makes the mesh of a run, and checks that it divides the sizes of a model."""

from collections.abc import Mapping, Sequence
import math
import re

import jax
import numpy as np

AXES = ('data', 'fsdp', 'expert', 'tensor')
BATCH_AXES = ('data', 'fsdp', 'expert')
# Devices along `expert` hold different experts of a mixture. All other weights
# are cut over them as they are over `fsdp`.
WEIGHT_AXES = ('fsdp', 'expert')

# On these kinds of devices, or topologies, the compiler (libtpu 0.0.42) ends
# the process when it compiles a collective (an exchange between devices) among
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
  """Returns a mesh over all devices.

  Args:
    data, fsdp, tensor, expert: devices along each axis; one of them may be -1,
      which means all devices that remain.
    devices: the devices to use; None: all.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
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
    # The compiler derives all shardings but those that `activations`
    # constrains.
    axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
  )


def divide(devices: Sequence, fraction: float) -> tuple[list, list]:
  """Returns the devices that learn, and those that collect beside them.

  The last devices of each host collect.

  Args:
    devices: devices of all hosts.
    fraction: the share of each host's devices that collects, which is rounded
      to whole devices; 0: all devices learn, and none only collects.

  Raises:
    ValueError: no device of a host is left for one of the two, or no program
      for the devices that learn can be compiled; one line.
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
  """Returns the mesh of training, over the devices that do not only collect.

  Args:
    data, fsdp, expert, tensor: devices along each axis, see `make_mesh`.
    collect_fraction: the share of each host's devices that only collects.
    collectors: the number of hosts that only collect, whose devices are not
      among these.
    devices: the devices of the run; None: all.

  Raises:
    ValueError: the axes do not fit the devices.
  """
  del collectors  # jax does not see their devices
  learning, collecting = divide(devices or jax.devices(), collect_fraction)
  try:
    return make_mesh(
      data=data, fsdp=fsdp, expert=expert, tensor=tensor, devices=learning
    )
  except ValueError as error:
    if not collecting:
      raise
    raise ValueError(
      f'{error}; the other {len(collecting)} collect: '
      f'mesh.collect_fraction={collect_fraction}'
    ) from error


def platform(mesh: jax.sharding.Mesh | None) -> str:
  """Returns the platform that a mesh is of: 'cpu', 'gpu' or 'tpu'.

  Programs depend on the mesh, never on the devices of this process: a
  program may be compiled for devices that are elsewhere (`topology`).

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
  """Raises ValueError unless the mesh divides what it shards.

  Where there are fewer heads of keys and values than devices along `tensor`,
  devices share them: of 4 heads on 8 devices, two devices each compute the same
  head.

  Args:
    mesh: the result of `make_mesh`.
    sharded: for each mesh axis, the sizes that it must divide, by name.
    num_kv_heads: number of key and value heads; the size of `tensor` must
      divide it or be a multiple of it.
    whose: what the error says of the sizes, such as ' of the value model'.

  Raises:
    ValueError: one line with the sizes that an axis does not divide and the
      numbers of devices that would fit.
  """
  for axis, sizes in sharded.items():
    heads = num_kv_heads if axis == 'tensor' else 0
    # The width is cut along both of `WEIGHT_AXES`.
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
        f'of up to {mesh.size} devices, {axis} may have {", ".join(fitting)}'
      )


def _undivided(
  sizes: Mapping[str, int], num_kv_heads: int, devices: int
) -> list[str]:
  """Returns the sizes that so many devices do not divide, as text."""
  wrong = [f'{name}={size}' for name, size in sizes.items() if size % devices]
  if num_kv_heads % devices and devices % num_kv_heads:
    wrong.append(f'num_kv_heads={num_kv_heads}')
  return wrong
