"""Starts the processes of a run together, and makes global arrays of rows."""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import socket
from typing import Any
import warnings

import jax
from jax._src import clusters
import numpy as np

from stppo_jax import exits
from stppo_jax.parallel import connected_hosts
from stppo_jax.parallel import hosts as hosts_lib

Tree = Any

START_TIMEOUT = 300.0  # seconds until all processes must be connected
_PATIENCE = 3600.0  # seconds that other hosts wait for a late host
# The coordinator of this package notices lost hosts, and names them. If jax's
# coordinator noticed a lost host first, it would end all other processes
# without naming that host. So jax's time-out is one day.
_JAX_HEARTBEAT = 24 * 3600
_JAX_SHUTDOWN = 10  # seconds that jax waits for the other processes at the end


@dataclasses.dataclass(frozen=True)
class Place:
  """Describes the place of this process among the processes of a run.

  Attributes:
    coordinator: host name and port of process 0.
    process_id: the number of this process.
    num_processes: the number of processes.
    local_device_ids: the devices of this process; None: all devices of the
      machine.
  """

  coordinator: str
  process_id: int
  num_processes: int
  local_device_ids: Sequence[int] | None = None


def place(
  coordinator: str, num_processes: int, process_id: int, *, collectors: int = 0
) -> Place | None:
  """Returns the place of this process, from the flags or from the cluster.

  Args:
    coordinator: host name and port of process 0; '' if no flag was given.
    num_processes: the number of processes; 0 if no flag was given.
    process_id: the number of this process; -1 if no flag was given.
    collectors: the number of processes that only collect.

  Returns:
    The place, or None if this is the only process of the run.

  Raises:
    ValueError: flags are missing or wrong, or no process would learn; the
      message is one line.
  """
  found = _place(coordinator, num_processes, process_id)
  count = 1 if found is None else found.num_processes
  if collectors >= count:
    raise ValueError(
      f'mesh.collectors={collectors}: must be below the number of processes of '
      f'the run, {count}, since one process must learn'
    )
  return found


def _place(
  coordinator: str, num_processes: int, process_id: int
) -> Place | None:
  given = {
    '--coordinator': coordinator != '',
    '--num_processes': num_processes != 0,
    '--process_id': process_id != -1,
  }
  if not any(given.values()):
    return detect()
  if missing := [flag for flag, is_given in given.items() if not is_given]:
    raise ValueError(
      f'{" and ".join(missing)}: missing; give all of '
      f'{", ".join(given)}, or none of them'
    )
  host, _, port = coordinator.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
    raise ValueError(
      f'--coordinator={coordinator}: must be HOST:PORT, the address of '
      'process 0'
    )
  if num_processes < 1:
    raise ValueError(f'--num_processes={num_processes}: must be at least 1')
  if not 0 <= process_id < num_processes:
    raise ValueError(
      f'--process_id={process_id}: must be at least 0, and below '
      f'--num_processes={num_processes}'
    )
  if num_processes == 1:
    return None
  return Place(coordinator, process_id, num_processes)


def detect() -> Place | None:
  """Returns the place of this process in its cluster, as jax detects it.

  A cluster is a TPU slice (VMs and GKE) or a job of Slurm, Open MPI or
  Kubernetes. The result is None outside of a cluster, and for the only process
  of a job.
  """
  with warnings.catch_warnings():
    # In every pod of Kubernetes, jax warns that a package is missing. This
    # warning is hidden.
    warnings.simplefilter('ignore')
    coordinator, count, process_id, devices = (
      clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(START_TIMEOUT)
      )
    )
  if coordinator is None or process_id is None or count in (None, 1):
    return None
  assert count is not None
  return Place(coordinator, process_id, count, devices)


@contextlib.contextmanager
def joined(
  here: Place | None,
  *,
  start_timeout: float = START_TIMEOUT,
  collectors: int = 0,
) -> Iterator[hosts_lib.Hosts]:
  """Yields the hosts of a run once all are connected, and ends them together.

  The context must be entered before jax is asked for devices. For jax, the
  hosts that learn form one run, and each host that only collects is a separate
  run. So no compiled program uses devices of both kinds of hosts, and neither
  kind waits for the other inside a program.

  Args:
    here: the place of this process; None: it is the only process.
    start_timeout: seconds to wait until all hosts are connected.
    collectors: the number of hosts that only collect; they are the last hosts.

  Raises:
    HostFailed: a host did not connect in time, or has failed.
    Misconfigured: the hosts were given different numbers of collectors, or jax
      sees a wrong number of hosts in the run of this host.
  """
  if here is None:
    yield hosts_lib.ALONE
    return
  hosts = connected_hosts.ConnectedHosts(
    here.coordinator,
    here.process_id,
    here.num_processes,
    jax_port=_free_port(),
    start_timeout=start_timeout,
    patience=_PATIENCE,
    collectors=collectors,
  )
  address, world = hosts.jax_address, (here.num_processes, here.process_id)
  if collectors:
    address = address if hosts.learns else f'127.0.0.1:{_free_port()}'
    group = hosts.group
    world = (group.count, group.index) if hosts.learns else (1, 0)
  try:
    given = hosts.exchange('collectors', collectors)
    if len(set(given)) > 1:
      raise exits.Misconfigured(
        'config.mesh.collectors: must be the same on all hosts, which have '
        + ', '.join(map(str, given))
      )
    # This package handles signals. jax's service would replace the package's
    # signal handlers.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(
      address,
      *world,
      local_device_ids=here.local_device_ids,
      cluster_detection_method='deactivate',
      coordinator_bind_address=address,
      heartbeat_timeout_seconds=_JAX_HEARTBEAT,
      shutdown_timeout_seconds=_JAX_SHUTDOWN,
    )
    if collectors and jax.process_count() != world[0]:
      raise exits.Misconfigured(
        f'mesh.collectors={collectors}: {hosts.describe(hosts.index)}: jax '
        f'sees the devices of {jax.process_count()} hosts, not of {world[0]}: '
        'on TPUs, all hosts that learn must be in one slice, and each host '
        'that collects must be a slice of its own'
      )
    yield hosts
    # First all hosts say that they are done. Then jax's clients leave jax's
    # coordinator. The relays of jax's clients, and the connections to this
    # package's coordinator, are closed last.
    hosts.leave()
    jax.distributed.shutdown()
    hosts.close()
  except BaseException as error:
    cause = error
    if isinstance(error, jax.errors.JaxRuntimeError):
      # If another host was lost, a collective on this host fails with a
      # JaxRuntimeError. The cause is then the failure of the other host.
      cause = hosts.diagnose(error)
    line = str(cause)
    if not isinstance(cause, hosts_lib.HostFailed):
      line = (
        f'{hosts.describe(hosts.index)} failed: {hosts_lib.describe(cause)}'
      )
    hosts.fail(line, getattr(cause, 'exit_code', exits.BUG))
    if cause is error:
      raise
    raise cause from error


def by_host(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
  """Returns a mesh of the same devices, with each host's devices adjacent.

  In a batch on this mesh, a host holds whole rows, which are the rows that the
  host has collected. With a single process, the mesh is returned unchanged.

  Raises:
    ValueError: the hosts have different numbers of devices, or `tensor` would
      divide a row between hosts; the message is one line.
  """
  if jax.process_count() == 1:
    return mesh
  # On a TPU, jax orders devices along the torus, where the devices of several
  # hosts may alternate.
  devices = sorted(mesh.devices.flat, key=lambda d: (d.process_index, d.id))
  counts = collections.Counter(device.process_index for device in devices)
  if len(set(counts.values())) > 1:
    listed = ', '.join(f'{n} on host {i}' for i, n in counts.items())
    raise ValueError(
      f'every host must have the same number of devices; there are {listed}'
    )
  tensor, local = mesh.shape['tensor'], counts[0]
  if local % tensor:
    raise ValueError(
      f'mesh.tensor={tensor}: must divide the {local} devices of a host'
    )
  return jax.sharding.Mesh(
    np.asarray(devices).reshape(mesh.devices.shape),
    mesh.axis_names,
    axis_types=mesh.axis_types,
  )


def from_local_rows(tree: Tree, sharding: jax.sharding.NamedSharding) -> Tree:
  """Returns global arrays made of the rows that each process holds.

  Args:
    tree: a pytree of numpy arrays with this process's rows. The global arrays
      hold the rows of all processes in the order of the processes.
    sharding: the sharding of the global arrays.
  """
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(sharding, x), tree
  )


def to_local_rows(tree: Tree) -> Tree:
  """Returns the rows of global arrays that this process holds, as numpy arrays.

  This function is the inverse of `from_local_rows`.
  """

  def local(array: jax.Array) -> np.ndarray:
    # Replicas on several devices hold the same rows, which are taken once.
    parts = {
      shard.index[0].start or 0: shard.data
      for shard in array.addressable_shards
    }
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])

  return jax.tree.map(local, tree)


def _free_port() -> int:
  """Returns a port of this machine that is free now."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]
