"""Estimates a run on devices that need not be there, and prints it."""

from collections.abc import Mapping, Sequence
import functools
import json
from typing import Any

import jax

from stppo_jax import exits
from stppo_jax.parallel import topology as topology_lib
from stppo_jax.tools.plan import plan as plan_lib
from stppo_jax.tools.plan import programs as programs_lib
from stppo_jax.tools.plan import search
from stppo_jax.tools.plan import summary as summary_lib

# The programs that are compiled for a platform, the slowest to compile first.
_PROGRAMS: Mapping[str, tuple[str, ...]] = {
  'tpu': tuple(reversed([*programs_lib.PROGRAMS])),
  'gpu': (),
  'cpu': ('update',),
}


def show(
  config: Any,
  *,
  topology_name: str,
  programs: Sequence[str] | None,
  gib: float,
  length: int,
  loss_fraction: float,
  price: float,
  as_json: bool,
  sweeps: bool,
  compile_best: int,
) -> int:
  """Prints the plan of a run, or those of all meshes.

  Call it before jax is asked for devices: it chooses them.

  Args:
    config: the config of the run.
    topology_name: the devices, see `parallel/topology.py`.
    programs: the programs to compile; none: those that are compiled for the
      platform; None: none of them.
    gib: the memory of a device; 0: that of the topology's.
    length: tokens of a row.
    loss_fraction: the largest share of them that is trained on.
    price: the price of a chip for an hour.
    as_json: whether to print JSON.
    sweeps: whether to print all meshes.
    compile_best: with `sweeps`, how many are compiled, the best first; -1: all.

  Returns:
    The exit code, 2 if nothing fits.

  Raises:
    Misconfigured: there is no such topology, or the run does not fit it.
  """
  with exits.as_misconfigured():
    topology = _topology(topology_name)
  names: Sequence[str] = ()
  if programs is not None and topology.platform != 'gpu':
    names = programs or _PROGRAMS[topology.platform]
  _choose_devices(topology, compiles=bool(names))
  planner = functools.partial(
    plan_lib.make,
    length=length,
    loss_fraction=loss_fraction,
    topology=topology,
    gib=gib,
  )
  if sweeps:
    rows = [
      summary_lib.row(tried)
      for tried in _sweep(config, topology, planner, names, compile_best)
    ]
    print(
      json.dumps(rows, indent=2) if as_json else summary_lib.sweep_text(rows)
    )
    return 0 if any(row['fits'] for row in rows) else exits.USAGE
  plan = planner(config, programs=names)
  summary = summary_lib.summary(plan, price=price)
  if not plan.fits:
    compiler = functools.partial(planner, programs=names) if names else None
    # Candidates are found by formulas, and only a candidate is compiled.
    summary['advice'] = search.advice(
      config, planner, plan.limit, compiler=compiler
    )
  lines = summary_lib.text(summary)
  print(json.dumps(summary, indent=2) if as_json else '\n'.join(lines))
  return 0 if plan.fits else exits.USAGE


def _topology(name: str) -> topology_lib.Topology:
  try:
    return topology_lib.find(name)
  except ValueError as error:
    raise ValueError(f'--topology={error}') from error


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
    # The cache can store a program for chips that this machine does not have,
    # but cannot load it.
    jax.config.update('jax_enable_compilation_cache', False)


def _sweep(
  config,
  topology: topology_lib.Topology,
  planner: search.Planner,
  programs: Sequence[str],
  compile_best: int,
) -> list[search.MeshCandidate]:
  """Returns the plans of all meshes, the best of them compiled."""
  found = search.sweep_meshes(config, topology, planner)
  if not programs:
    return found
  last = len(found) if compile_best < 0 else compile_best
  # Compiling takes minutes, so it is kept for the meshes that are best by the
  # formulas.
  for n, tried in enumerate(found[:last]):
    if tried.plan is not None:
      changed = search.changed(config, tried.changes)
      plan = planner(changed, programs=programs)
      found[n] = tried._replace(plan=plan)
  return found
