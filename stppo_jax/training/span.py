"""Chooses whether each host decodes alone, or all hosts of a slice together.

For some TPU slices, the compiler refuses programs for a single host, or ends
the process that compiles them. So each host first compiles small trial programs
for itself, in a child process. The child process compiles for a description of
the slice's chips and does not use the chips.
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

# Seconds that a trial may take; usually it takes one minute.
_LIMIT = 900.0


def try_here(config) -> str:
  """Returns why programs for this host alone do not compile.

  The result is '' if they compile. It is also '' if no trial is needed: on
  other devices than TPUs, and for configs with which hosts must decode alone.
  """
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
  """Returns the config with `host` or `slice` in place of rollout.span=auto.

  All hosts get the same value: `slice` if the trial of any host has failed. The
  config of a run of one host is returned unchanged.

  Args:
    config: the config of a run.
    hosts: the hosts of the run, all of which call this function.
    try_it: runs the trial of this host, see `try_here`.
  """
  if config.rollout.span != 'auto' or hosts.count == 1:
    return config
  problems = hosts.exchange('span', try_it(config))
  changed = config.copy_and_resolve_references()
  with changed.unlocked():
    changed.rollout.span = 'slice' if any(problems) else 'host'
  for index, problem in enumerate(problems):
    if problem and hosts.is_first:
      line = f'programs for this host alone do not compile: {problem}'
      _log.info('rollout.span=slice: %s: %s', hosts.describe(index), line)
  return changed.lock()


def try_host(
  config, name: str, place: tuple[int, ...], *, limit: float = _LIMIT
) -> str:
  """Returns why programs for one host of a slice do not compile.

  The result is '' if they compile. It is also '' if the config is bad, because
  the checks of the run refuse such a config later.

  Args:
    config: the config of a run.
    name: the name of the slice, see `topology.find`.
    place: the coordinates of a chip of the host, which identify the host. The
      number of the host in the run would not identify it, because the number
      of the same host in the topology may differ.
    limit: the seconds that the trial may take.

  Raises:
    RuntimeError: the trial itself has failed, so the answer is not known; the
      message is one line.
  """
  # The child is spawned, because a forked child would share the devices that
  # this process holds.
  context = multiprocessing.get_context('spawn')
  ours, theirs = context.Pipe()
  child = context.Process(
    target=_try, args=(theirs, config, name, place), daemon=True
  )
  child.start()
  theirs.close()  # from now on, the pipe closes when the child ends
  try:
    # A compiler that takes too long counts as a compiler that refuses: the
    # hosts can decode together instead.
    if not ours.poll(limit):
      return f'the compiler does not end within {limit:.0f} s'
    problem, error = ours.recv()
  except EOFError:
    child.join()
    if (child.exitcode or 0) < 0:  # a signal has ended the child
      return 'the compiler ends its process'
    problem, error = '', f'exit code {child.exitcode}'
  finally:
    child.kill()
    child.join()
  if error:
    raise RuntimeError(f'rollout.span=auto: the trial has failed: {error}')
  return problem


def _try(connection, config, name: str, place: tuple[int, ...]) -> None:
  """Runs the trial in the child process, and sends its result.

  The result is a pair: the reason why the programs do not compile, and a line
  about an unexpected error. An element is '' if there is no reason or error.
  """
  jax.config.update('jax_platforms', 'cpu')
  # Standard error is dropped, because the compiler prints much to it before it
  # ends the process.
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
  """Compiles the engine's programs for a host, with one layer and few slots."""
  mesh = components.build_mesh(config, devices)
  shape = model_files.build_model_config(config, None, mesh)
  # All layers are computed in one loop. So if the compiler refuses a program of
  # all layers, it also refuses the program of one layer.
  shape = dataclasses.replace(shape, num_layers=1, dense_layers=())
  placement = components.build_placement(config, shape, mesh, devices, host)
  assert placement is not None  # trials are only for rollout.engine=local
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
    # The config's `pages` and `batch_rows` fit the slots of the run. With 0 the
    # engine chooses values that fit the few slots of this trial.
    options=dataclasses.replace(options, slots=slots, pages=0, batch_rows=0),
    num_states=stops.num_states(environment.stop_strings),
    trained=sharding.with_layout(
      weights, sharding.param_shardings(weights, mesh)
    ),
  )
  for lowered in (programs.extend(), programs.decode()):
    topology.compiled(lowered)
