"""Programs compiled ahead of time for a TPU slice that is not there.

The compiler for TPU is in the package `libtpu`, which needs no TPU:

    chips = topology.devices('v5e:4x4')
    mesh = mesh_lib.make_mesh(data=2, fsdp=8, tensor=1, devices=chips)
    ...                                   # build and lower programs on the mesh
    compiled = topology.compiled(lowered)

The devices can neither hold arrays nor run programs. Arguments are shapes with
the layouts of the mesh.
"""

import os
import re
from typing import Any

import jax

GIB = 2**30
# Memory of one chip that programs can use, GiB, by the name of its generation;
# the compiler refuses a program that needs more.
MEMORY = {'v4': 31.25, 'v5e': 15.75, 'v5p': 95.74, 'v6e': 31.25}
# Cycles of a chip per second, for `program.estimated_cycles`.
CLOCK = {'v4': 1.05e9, 'v5e': 1.5e9, 'v5p': 1.75e9, 'v6e': 1.75e9}
_NAME = re.compile(r'(?P<chip>\w+):\d+x\d+(x\d+)?')
# Otherwise libtpu looks for a TPU, and for another process that uses it.
_ENVIRONMENT = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'TPU_LOG_DIR': 'disabled',
}
_SIZE = re.compile(r'\b(\d[\d.]*[KMGT])')


class DoesNotFit(ValueError):
  """A program that needs more memory than a chip has; one line."""


def chip(name: str) -> str:
  """Returns the generation of the chips of a slice, a key of `MEMORY`.

  Raises:
    ValueError: the name is not that of a slice.
  """
  match = _NAME.fullmatch(name)
  if match is None or match['chip'] not in MEMORY:
    raise ValueError(
      f'{name}: no TPU slice; must be a generation and its chips along each '
      f'axis, such as v5e:4x4; generations: {", ".join(MEMORY)}'
    )
  return match['chip']


def devices(name: str) -> list[Any]:
  """Returns the devices of a TPU slice, to compile for.

  Args:
    name: a generation and the chips along each axis, such as v5e:4x4.

  Raises:
    ValueError: there is no such slice, or libtpu is not installed; one line.
  """
  # Imported here because nothing else needs it.
  from jax.experimental import topologies

  options: dict[str, Any] = {}
  if name == f'{chip(name)}:1x1':  # otherwise a host has four chips or more
    options['chips_per_host_bounds'] = (1, 1, 1)
  for key, value in _ENVIRONMENT.items():
    os.environ.setdefault(key, value)
  try:
    found = topologies.get_topology_desc(name, platform='tpu', **options)
  except Exception as error:
    if 'not installed' in str(error):
      reason = "needs the package libtpu: pip install 'stppo_jax[tpu]'"
    else:
      reason = str(error).partition('\n')[0]
    raise ValueError(f'{name}: {reason}') from error
  return list(found.devices)


def compiled(lowered: Any) -> Any:
  """Compiles a lowered program.

  Raises:
    DoesNotFit: it needs more memory than a chip has.
  """
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    # The first two sizes of the message are what is needed and what there is.
    sizes = _SIZE.findall(str(error))
    if not str(error).startswith('RESOURCE_EXHAUSTED') or len(sizes) < 2:
      raise
    needed, there = sizes[:2]
    raise DoesNotFit(f'needs {needed}iB of {there}iB on a chip') from error
