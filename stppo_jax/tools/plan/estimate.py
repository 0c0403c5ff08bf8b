"""Estimates a run on devices that need not be there, and prints it."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
from typing import Any

import jax

from stppo_jax import exits
from stppo_jax.parallel import topology as topology_lib
from stppo_jax.tools.plan import plan as plan_lib
from stppo_jax.tools.plan import search
from stppo_jax.tools.plan import summary as summary_lib

# The programs that are compiled for a platform, those first that take longest.
_PROGRAMS: Mapping[str, tuple[str, ...]] = {
  'tpu': ('update', 'annotate', 'publish', 'decode', 'extend'),
  'gpu': (),
  'cpu': ('update',),
}


def show(config: Any, flags: Any) -> int:
  """Prints the plan of a run, or those of all meshes.

  Call it before jax is asked for devices: it chooses them.

  Args:
    config: the config of the run.
    flags: the flags of the command `plan`, whose help describes them.

  Returns:
    The exit code, 2 if nothing fits.

  Raises:
    Misconfigured: there is no such topology, or the run does not fit it.
  """
  name = flags.topology or f'cpu:{flags.devices or 64}'
  try:
    topology = topology_lib.find(name)
  except ValueError as error:
    raise exits.Misconfigured(f'--topology={error}') from error
  programs: Sequence[str] = ()
  if flags.compile and topology.platform != 'gpu':
    programs = flags.programs or _PROGRAMS[topology.platform]
  _choose_devices(topology, compiles=bool(programs))
  planner = functools.partial(
    plan_lib.make,
    length=flags.length or config.env.max_length,
    loss_fraction=flags.loss_fraction,
    topology=topology,
    gib=flags.hbm_gib,
  )
  if flags.sweep_mesh:
    found = search.sweep_meshes(config, topology, planner)
    if programs:
      last = len(found) if flags.compile_best < 0 else flags.compile_best
      compiler = functools.partial(planner, programs=programs)
      found[:last] = [
        search.compiled(config, x, compiler) for x in found[:last]
      ]
    rows = [summary_lib.row(tried) for tried in found]
    text = json.dumps(rows, indent=2)
    print(text if flags.json else summary_lib.sweep_text(rows))
    return 0 if any(row['fits'] for row in rows) else exits.USAGE
  plan = planner(config, programs=programs)
  summary = summary_lib.summary(plan, price=flags.price)
  if not plan.fits:
    compiler = functools.partial(planner, programs=programs)
    summary['advice'] = search.advice(
      config, planner, plan.limit, compiler=compiler if programs else None
    )
  lines = summary_lib.text(summary)
  print(json.dumps(summary, indent=2) if flags.json else '\n'.join(lines))
  return 0 if plan.fits else exits.USAGE


def _choose_devices(topology: topology_lib.Topology, *, compiles: bool) -> None:
  """Makes jax use CPU devices, as many as a program needs to be compiled."""
  if topology.platform == 'cpu' and compiles:
    # jax makes its config's attributes at run time.
    devices = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if devices != topology.num_devices:
      jax.config.update('jax_platforms', 'cpu')
      jax.config.update('jax_num_cpu_devices', topology.num_devices)
    return
  jax.config.update('jax_platforms', 'cpu')  # no device is used
  if topology.platform == 'tpu' and compiles:
    # A program for chips that are not there can be kept, but not read again.
    jax.config.update('jax_enable_compilation_cache', False)
