"""Estimates a run on devices that need not exist, and prints the estimate."""

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

# For each platform, the programs that are compiled if the user names none. The
# program that takes the longest to compile comes first.
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
  """Prints the plan of a run, or the plans of all meshes.

  This function chooses the devices that jax uses, so it must be called before
  any other code asks jax for devices.

  Args:
    config: the config of the run.
    topology_name: the name of the devices, see `parallel/topology.py`.
    programs: the names of the programs to compile; () for the programs that
      `_PROGRAMS` has for the platform; None to compile nothing.
    gib: the GiB of a device's memory; 0 for the memory that the topology has.
    length: the number of tokens of a row.
    loss_fraction: the largest share of a row's tokens that is trained on.
    price: the price of a chip for an hour; 0 if it is unknown.
    as_json: whether to print JSON.
    sweeps: whether to print the plans of all meshes.
    compile_best: with `sweeps`, the number of meshes whose programs are
      compiled, the best meshes first; -1 for all meshes.

  Returns:
    The exit code: 2 if no plan fits in memory, otherwise 0.

  Raises:
    Misconfigured: there is no such topology, or the config does not fit it.
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
    # Formulas find the changes to advise. Programs are compiled only with these
    # changes.
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
  """Makes jax use CPUs, with as many devices as compiling for CPU needs."""
  if topology.platform == 'cpu' and compiles:
    # jax makes its config's attributes at run time, so pyright misses them.
    devices = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if devices != topology.num_devices:
      jax.config.update('jax_platforms', 'cpu')
      jax.config.update('jax_num_cpu_devices', topology.num_devices)
    return
  jax.config.update('jax_platforms', 'cpu')  # no accelerator is needed
  if topology.platform == 'tpu' and compiles:
    # The compilation cache can store programs for chips that this machine does
    # not have, but it cannot load such programs.
    jax.config.update('jax_enable_compilation_cache', False)


def _sweep(
  config,
  topology: topology_lib.Topology,
  planner: search.Planner,
  programs: Sequence[str],
  compile_best: int,
) -> list[search.MeshCandidate]:
  """Returns the plans of all meshes, and compiles the best meshes' programs."""
  found = search.sweep_meshes(config, topology, planner)
  if not programs:
    return found
  last = len(found) if compile_best < 0 else compile_best
  # Compiling takes minutes, so it is done only for the meshes that are best by
  # the formulas.
  for n, tried in enumerate(found[:last]):
    if tried.plan is not None:
      changed = search.changed(config, tried.changes)
      plan = planner(changed, programs=programs)
      found[n] = tried._replace(plan=plan)
  return found
