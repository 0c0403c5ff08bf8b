"""Estimate an update's memory and traffic on hardware you do not have.

python -m stppo_jax plan --config=FILE.py[:ALGORITHM] [--config.KEY=VALUE ...]
    [--devices=64] [--hbm_gib=80.0] [--length=0] [--loss_fraction=0.5]
    [--compile=true]

  --config=FILE.py[:ALGORITHM]  the config of the run
  --config.KEY=VALUE            sets a key of the config
  --devices=N                   the number of devices
  --hbm_gib=X                   the memory of one device, in GiB
  --length=N                    tokens of a row; 0 = env.max_length
  --loss_fraction=X             the largest share of them that is trained on
  --compile=true                whether to compile the update; without it, what
                                only the compiled program shows is left out

Shards the run's models over that many virtual devices; of `model.path` only
config.json is read. Prints the bytes that one device holds, engines included,
and the bytes that the devices send each other. The exit code is 2 if the update
does not fit in the memory.
"""

from collections.abc import Sequence
import math

from stppo_jax.commands import configuration

_GIB = 2**30
_OPTIONS = {
  'devices': 64,
  'hbm_gib': 80.0,
  'length': 0,
  'loss_fraction': 0.5,
  'compile': True,
}
_POSITIVE = (lambda x: 0 < x < math.inf, 'greater than 0')
_RULES = {
  'devices': _POSITIVE,
  'hbm_gib': _POSITIVE,
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
  if devices != options['devices']:
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', options['devices'])
  from stppo_jax.analysis import plan as plan_lib

  plan = plan_lib.make(
    config,
    length=options['length'] or config.env.max_length,
    loss_fraction=options['loss_fraction'],
    compiles=options['compile'],
  )
  for line in describe(plan):
    print(line)
  fits = plan.total <= options['hbm_gib'] * _GIB
  print(f'{"fits" if fits else "does not fit"} in {options["hbm_gib"]} GiB')
  return 0 if fits else 2


def describe(plan) -> list[str]:
  """Returns the lines that print a plan; sizes are of one device."""
  lines = [' '.join(f'{axis}={size}' for axis, size in plan.axes.items())]
  if plan.temporaries is None:
    during = {'gradients (not compiled: no other temporaries)': plan.gradients}
  else:
    during = {'temporaries, as planned for CPU': plan.temporaries}
  for name, size in {**plan.sizes, **during, 'total': plan.total}.items():
    lines.append(f'{size / _GIB:10.3f} GiB  {name}')
  for kind in sorted({c.kind for c in plan.collectives}):
    of_kind = [c for c in plan.collectives if c.kind == kind]
    sent, times = sum(c.sent for c in of_kind), sum(c.times for c in of_kind)
    lines.append(f'{sent / _GIB:10.3f} GiB  sent by {times} {kind}')
  if plan.operations:
    lines.append(f'{plan.operations / 1e12:10.3f} TFLOP of matrix products')
  return lines
