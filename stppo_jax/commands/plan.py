"""Estimate memory and traffic of a run on hardware that you do not have.

python -m stppo_jax plan --config=FILE.py[:ALGORITHM] [--config.KEY=VALUE ...]
    [--topology=v5e:4x4 | --devices=64] [--hbm_gib=80.0] [--length=0]
    [--loss_fraction=0.5] [--compile=true]

  --config=FILE.py[:ALGORITHM]  the config of the run
  --config.KEY=VALUE            sets a key of the config
  --topology=NAME               a TPU slice: a generation and its chips along
                                each axis; needs the package libtpu, no TPU
  --devices=N                   without a topology: the number of devices
  --hbm_gib=X                   the memory of one device, in GiB; 0 = that of
                                the topology's chips, or 80
  --length=N                    tokens of a row; 0 = env.max_length
  --loss_fraction=X             the largest share of them that is trained on
  --compile=true                whether to compile; without it, what only
                                compiled programs show is left out

Shards the run's models over devices that need not be there; of `model.path`
only config.json is read. Prints the bytes that one device holds, engines
included, and the bytes that the devices send each other. With a topology,
annotate and update are compiled by the compiler for TPU, otherwise the update
by that for CPU. The exit code is 2 if the run does not fit in the memory.
"""

from collections.abc import Sequence
import math

from stppo_jax.commands import configuration

_GIB = 2**30
_DEFAULT_GIB = 80.0
_OPTIONS = {
  'topology': '',
  'devices': 64,
  'hbm_gib': 0.0,
  'length': 0,
  'loss_fraction': 0.5,
  'compile': True,
}
_RULES = {
  'devices': (lambda x: 0 < x < math.inf, 'greater than 0'),
  'hbm_gib': (lambda x: 0 <= x < math.inf, '0 or greater'),
  'length': (lambda x: x >= 0, '0 or greater'),
  'loss_fraction': (lambda x: 0 < x <= 1, 'in (0, 1]'),
}


def main(argv: Sequence[str]) -> int:
  """Prints the plan; returns the exit code, 2 where it does not fit."""
  arguments = configuration.parse(argv, workdir=False, options=_OPTIONS)
  options, config = arguments.options, arguments.config
  errors = [
    f'--{name}={options[name]}: must be {allowed}'
    for name, (is_allowed, allowed) in _RULES.items()
    if not is_allowed(options[name])
  ]
  if errors:
    raise configuration.ConfigurationError(errors)
  # Imported late: a wrong flag is answered before jax is loaded.
  import jax

  # jax makes its config's attributes at run time.
  devices = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
  slice_name = options['topology']
  if slice_name:
    jax.config.update('jax_platforms', 'cpu')  # no device is used
    # A program for chips that are not there can be kept, but not read again.
    jax.config.update('jax_enable_compilation_cache', False)
  elif devices != options['devices']:
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', options['devices'])
  from stppo_jax.analysis import plan as plan_lib
  from stppo_jax.parallel import topology

  programs = ('annotate', 'update') if slice_name else ('update',)
  plan = plan_lib.make(
    config,
    length=options['length'] or config.env.max_length,
    loss_fraction=options['loss_fraction'],
    programs=programs if options['compile'] else (),
    topology=slice_name,
  )
  for line in describe(plan):
    print(line)
  memory = options['hbm_gib'] or _DEFAULT_GIB
  if slice_name and not options['hbm_gib']:
    memory = topology.MEMORY[topology.chip(slice_name)]
  fits = plan.total <= memory * _GIB and not plan.problems
  print(f'{"fits" if fits else "does not fit"} in {memory} GiB')
  return 0 if fits else 2


def describe(plan) -> list[str]:
  """Returns the lines that print a plan; sizes are of one device."""
  lines = [' '.join(f'{axis}={size}' for axis, size in plan.axes.items())]
  compiler = plan.platform.upper()
  during = {
    f'temporaries of {name}, as planned for {compiler}': cost.temporaries
    for name, cost in plan.programs.items()
  }
  if not during:
    during = {'gradients (not compiled: no other temporaries)': plan.gradients}
  for name, size in {**plan.sizes, **during, 'total': plan.total}.items():
    lines.append(f'{size / _GIB:10.3f} GiB  {name}')
  lines += plan.problems
  for name, cost in plan.programs.items():
    lines += _describe(name, cost)
  return lines


def _describe(name: str, cost) -> list[str]:
  """Returns the lines about what a compiled program does."""
  lines = []
  for kind in sorted({c.kind for c in cost.collectives}):
    of_kind = [c for c in cost.collectives if c.kind == kind]
    sent, times = sum(c.sent for c in of_kind), sum(c.times for c in of_kind)
    lines.append(f'{sent / _GIB:10.3f} GiB  sent by {times} {kind} of {name}')
  if cost.operations:
    teras = cost.operations / 1e12
    lines.append(f'{teras:10.3f} TFLOP of matrix products of {name}')
  if cost.seconds:
    lines.append(
      f'{cost.seconds:10.3f} s  in the kernels of {name}, by the estimate of '
      'the compiler, which is good for comparing'
    )
  return lines
