"""Chooses whether each host decodes by itself, or all of a slice together.

The compiler for TPU refuses programs for one host of some slices, or ends the
process. So each host first compiles small programs of its own, for chips as
they are in the slice, in a process of its own.
"""

from collections.abc import Callable
import dataclasses
import logging
import math
import multiprocessing
import operator
import os
from typing import Any

import jax

from stppo_jax.envs import environments
from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.parallel import topology
from stppo_jax.sampling import engine_rules
from stppo_jax.sampling import lowering
from stppo_jax.sampling import stops
from stppo_jax.training import components
from stppo_jax.training import engines
from stppo_jax.training import model_files

_log = logging.getLogger(__name__)

# Seconds that a host may try; usually it takes a minute.
_LIMIT = 900.0


def try_here(config) -> str:
  """Returns why programs for this host do not compile; '' if they may."""
  devices = jax.devices()
  decodes_alone = config.rollout.engine != 'local' or any(
    forbids(operator.attrgetter(key)(config))
    for key, (forbids, _) in engine_rules.DECODES_ALONE.items()
  )
  if devices[0].platform != 'tpu' or decodes_alone:
    return ''
  corner = [min(axis) for axis in zip(*(d.coords for d in devices))]
  here = jax.local_devices()[0].coords
  place = tuple(x - first for x, first in zip(here, corner))
  return try_host(config, topology.slice_of(devices), place)


def resolved(
  config,
  hosts: hosts_lib.Hosts,
  *,
  try_it: Callable[[Any], str] = try_here,
) -> Any:
  """Returns the config with a span in place of `auto`, the same on all hosts.

  Args:
    config: the config of a run.
    hosts: the hosts of the run, all of which call this function.
    try_it: returns why programs for this host do not compile, see `try_here`.
  """
  if config.rollout.span != 'auto' or hosts.count == 1:
    return config
  problems = hosts.exchange('span', try_it(config))
  changed = config.copy_and_resolve_references()
  with changed.unlocked():
    changed.rollout.span = 'slice' if any(problems) else 'host'
  for index, problem in enumerate(problems):
    if problem and hosts.is_first:
      line = f'its own programs do not compile: {problem}'
      _log.info('rollout.span=slice: %s: %s', hosts.describe(index), line)
  return changed.lock()


def try_host(
  config, name: str, place: tuple[int, ...], *, limit: float = _LIMIT
) -> str:
  """Returns why programs for a host of a slice do not compile; '' if they may.

  Args:
    config: the config of a run.
    name: the name of the slice, see `topology.find`.
    place: the coordinates of a chip of the host, by which the host is found:
      its number in the run may differ from that in the topology.
    limit: seconds that it may take.

  Raises:
    RuntimeError: nobody knows whether they compile; one line.
  """
  # Spawned: a fork would share the devices that this process holds.
  context = multiprocessing.get_context('spawn')
  ours, theirs = context.Pipe()
  child = context.Process(
    target=_try, args=(theirs, config, name, place), daemon=True
  )
  child.start()
  theirs.close()  # so that the end of the child is the end of the pipe
  try:
    # Decoding by the whole slice works where this does not, so a compiler that
    # takes too long counts as one that refuses.
    if not ours.poll(limit):
      return f'the compiler does not end within {limit:.0f} s'
    problem, error = ours.recv()
  except EOFError:
    child.join()
    if (child.exitcode or 0) < 0:  # by a signal
      return 'the compiler ends its process'
    problem, error = '', f'exit code {child.exitcode}'
  finally:
    child.kill()
    child.join()
  if error:
    raise RuntimeError(f'rollout.span=auto: the trial has failed: {error}')
  return problem


def _try(connection, config, name: str, place: tuple[int, ...]) -> None:
  """Sends why programs do not compile, and an error that is a bug."""
  jax.config.update('jax_platforms', 'cpu')
  # The compiler says much before it ends the process.
  os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
  problem = error = ''
  try:
    devices = topology.devices(topology.find(name))
    host = next(d.process_index for d in devices if tuple(d.coords) == place)
    _compile(config, devices, host)
  except topology.Rejected as rejected:
    problem = str(rejected)
  except (ValueError, OSError):
    pass  # the checks of the run refuse such a config
  except Exception as bug:
    error = hosts_lib.describe(bug)
  connection.send((problem, error))


def _compile(config, devices, host: int) -> None:
  """Compiles the programs of one layer and few slots for a host."""
  mesh = components.build_mesh(config, devices)
  shape = model_files.build_model_config(config, None, mesh)
  # The layers are computed in one loop, so what the compiler refuses for all
  # layers it also refuses for one.
  shape = dataclasses.replace(shape, num_layers=1, dense_layers=())
  placement = components.build_placement(config, shape, mesh, devices, host)
  assert placement is not None  # rollout.engine=local
  slots = math.lcm(
    config.rollout.group_size, cache_lib.row_shards(shape, placement.mesh)
  )
  options = engines.options(config, mesh_lib.num_hosts(mesh))
  model = functional.Model(shape, 'vocabulary', mesh=mesh)
  weights = jax.eval_shape(model.init, jax.random.key(0))
  environment = environments.find(config.env.name)
  programs = lowering.Lowering(
    model,
    placement=placement,
    # With 0 the engine chooses numbers that fit these few slots; the numbers of
    # the config fit the slots of the run.
    options=dataclasses.replace(options, slots=slots, pages=0, batch_rows=0),
    num_states=stops.num_states(environment.stop_strings),
    trained=sharding.with_layout(
      weights, sharding.param_shardings(weights, mesh)
    ),
  )
  for lowered in (programs.extend(), programs.decode()):
    topology.compiled(lowered)
