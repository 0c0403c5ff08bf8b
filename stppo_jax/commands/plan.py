"""Estimate memory, time and cost of a run on hardware that you do not have.

python -m stppo_jax plan --config=FILE.py[:ALGORITHM] [--config.KEY=VALUE ...]
    [--topology=v5e:4x4 | --devices=64] [--hbm_gib=80.0] [--length=0]
    [--loss_fraction=0.5] [--compile=true] [--programs=decode,update]
    [--price=0.0] [--json] [--sweep_mesh] [--compile_best=0]

  --config=FILE.py[:ALGORITHM]  the config of the run
  --config.KEY=VALUE            sets a key of the config
  --topology=NAME               a TPU slice (a generation and its chips along
                                each axis), gpu:h100:8, or cpu:8
  --devices=N                   short for --topology=cpu:N
  --hbm_gib=X                   the memory of one device, in GiB; 0 = that of
                                the topology's devices
  --length=N                    tokens of a row; 0 = env.max_length
  --loss_fraction=X             the largest share of them that is trained on
  --compile=true                whether to compile, which takes minutes;
                                without it, temporaries are estimated too
  --programs=NAMES              the programs to compile: some of extend, decode,
                                publish, annotate, update
  --price=X                     the price of a chip for an hour, for the cost
  --json                        prints one JSON object
  --sweep_mesh                  ranks all meshes, those that fit by their time
  --compile_best=N              with --sweep_mesh: compiles the N best; -1 = all

Shards the run's models over devices that need not be there; of `model.path`
only config.json is read. Prints the bytes that one device holds, engines
included, and an estimate of a step's time by formulas, with its assumptions.
For a TPU slice, the programs of the run are compiled for TPU, which takes the
package libtpu and no TPU; for cpu:N, the update is compiled for CPU. A run has
each program in several sizes, of which only the largest is compiled. For GPUs
nothing is compiled. If the run does not fit in the memory, the exit code is 2,
and a line says with which changes it would; where programs are compiled, those
with the changes were compiled, too.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import math
from typing import Any

from stppo_jax.commands.flags import configuration

_GIB = 2**30
_OPTIONS = {
  'topology': '',
  'devices': 64,
  'hbm_gib': 0.0,
  'length': 0,
  'loss_fraction': 0.5,
  'compile': True,
  'programs': '',
  'price': 0.0,
  'compile_best': 0,
}
_RULES = {
  'devices': (lambda x: 0 < x < math.inf, 'greater than 0'),
  'hbm_gib': (lambda x: 0 <= x < math.inf, '0 or greater'),
  'length': (lambda x: x >= 0, '0 or greater'),
  'loss_fraction': (lambda x: 0 < x <= 1, 'in (0, 1]'),
  'price': (lambda x: 0 <= x < math.inf, '0 or greater'),
  'compile_best': (lambda x: x >= -1, '0 or greater, or -1'),
}
_NAMES = 'extend', 'decode', 'publish', 'annotate', 'update'
# The programs that are compiled for a platform, those first that take longest.
_PROGRAMS: Mapping[str, tuple[str, ...]] = {
  'tpu': tuple(reversed(_NAMES)),
  'gpu': (),
  'cpu': ('update',),
}


def main(argv: Sequence[str]) -> int:
  """Prints the plan; returns the exit code, 2 where it does not fit."""
  arguments = configuration.parse(
    argv, workdir=False, options=_OPTIONS, switches=('json', 'sweep_mesh')
  )
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

  from stppo_jax.parallel import topology as topology_lib

  try:
    topology = topology_lib.find(
      options['topology'] or f'cpu:{options["devices"]}'
    )
    programs = _programs(topology.platform, options)
  except ValueError as error:
    raise configuration.ConfigurationError([f'--topology={error}']) from error
  if topology.platform == 'cpu' and programs:
    # jax makes its config's attributes at run time.
    devices = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if devices != topology.num_devices:
      jax.config.update('jax_platforms', 'cpu')
      jax.config.update('jax_num_cpu_devices', topology.num_devices)
  else:
    jax.config.update('jax_platforms', 'cpu')  # no device is used
  if topology.platform == 'tpu' and programs:
    # A program for chips that are not there can be kept, but not read again.
    jax.config.update('jax_enable_compilation_cache', False)
  from stppo_jax.tools.plan import plan as plan_lib
  from stppo_jax.tools.plan import search
  from stppo_jax.tools.plan import summary as summary_lib

  def planner(config, programs=()) -> plan_lib.Plan:
    return plan_lib.make(
      config,
      length=options['length'] or config.env.max_length,
      loss_fraction=options['loss_fraction'],
      programs=programs,
      topology=topology,
      gib=options['hbm_gib'],
    )

  as_json = 'json' in arguments.switches
  if 'sweep_mesh' in arguments.switches:
    found = search.sweep_meshes(config, topology, planner)
    best = options['compile_best'] if programs else 0
    for n in range(len(found) if best < 0 else min(best, len(found))):
      if found[n].plan is not None:
        changes = found[n].changes
        plan = planner(search.changed(config, changes), programs)
        found[n] = search.Tried(changes, plan)
    rows = [summary_lib.row(tried) for tried in found]
    print(json.dumps(rows, indent=2) if as_json else _table(rows))
    return 0 if any(row['fits'] for row in rows) else 2
  plan = planner(config, programs)
  summary = summary_lib.summary(plan, price=options['price'])
  if not plan.fits:
    compiler = (lambda other: planner(other, programs)) if programs else None
    summary['advice'] = search.advice(
      config, planner, plan.limit, compiler=compiler
    )
  if as_json:
    print(json.dumps(summary, indent=2))
  else:
    print('\n'.join(describe(summary)))
  return 0 if plan.fits else 2


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the lines that print the meshes of a sweep."""
  lines = ['  data  fsdp tensor microbatch  at least  expected        GiB']
  for row in rows:
    cells = '{data:6} {fsdp:5} {tensor:6} {microbatch:10}'.format(**row)
    if row['problem']:
      lines.append(f'{cells}  {row["problem"]}')
      continue
    note = 'fits' if row['fits'] else 'does not fit'
    compiled = ', compiled' if row['compiled'] else ''
    lines.append(
      f'{cells} {row["seconds_at_least"]:7.1f} s {row["seconds"]:7.1f} s '
      f'{row["total"] / _GIB:10.1f}  {note}{compiled}'
    )
  return '\n'.join(lines)


def _programs(platform: str, options: Mapping[str, Any]) -> Sequence[str]:
  """Returns the names of the programs to compile.

  Raises:
    ConfigurationError: there is no program of a given name.
  """
  names = [name for name in options['programs'].split(',') if name]
  for name in names:
    if name not in _NAMES:
      raise configuration.ConfigurationError(
        [f'--programs={name}: must be some of {", ".join(_NAMES)}']
      )
  if not options['compile'] or platform == 'gpu':
    return ()
  return names or _PROGRAMS[platform]


def describe(summary: Mapping[str, Any]) -> list[str]:
  """Returns the lines that print a summary; sizes are of one device."""
  axes = ' '.join(f'{axis}={n}' for axis, n in summary['mesh'].items())
  memory = summary['memory']
  which = ' that learns' if memory['collecting'] else ''
  lines = [f'{summary["topology"]}: {axes}', '', f'Memory of a device{which}']
  sizes = dict(memory['sizes'])
  names = list(memory['temporaries'])
  if memory['compiled_for']:
    compiler = memory['compiled_for'].upper()
    for name in names:
      label = f'other memory of {name}, as compiled for {compiler}'
      sizes[label] = memory['temporaries'][name]
  else:
    for name, size in memory['estimated'].items():
      sizes[f'{name}, estimated'] = size
  if memory['collecting']:
    lines += [f'{x / _GIB:10.3f} GiB  {name}' for name, x in sizes.items()]
    lines += ['', 'Memory of a device that collects']
    sizes = dict(memory['collecting'])
  if memory['copied']:
    label = 'keys and values of active slots, which decode copies'
    sizes[label] = memory['copied']
  for name in ('total', 'limit', 'headroom'):
    sizes[name] = memory[name]
  lines += [f'{x / _GIB:10.3f} GiB  {name}' for name, x in sizes.items()]
  lines += summary['problems']
  for name, program in summary['programs'].items():
    lines += ['', f'The compiled program of {name}, on a device']
    if program['arguments']:
      lines.append(
        f'{program["arguments"] / _GIB:10.3f} GiB  of arguments, of which '
        f'{program["in_place"] / _GIB:.3f} GiB are updated in place'
      )
    if program['accessed']:
      lines.append(
        f'{program["accessed"] / _GIB:10.3f} GiB  read from memory or written '
        'to it'
      )
    for entry in program['collectives']:
      bound = 'at most ' if entry['kind'] == 'all-reduce' else ''
      lines.append(
        f'{entry["bytes"] / _GIB:10.3f} GiB  {bound}sent by {entry["times"]} '
        f'{entry["kind"]} along {entry["axes"]}'
      )
    if program['operations']:
      teras = program['operations'] / 1e12
      lines.append(f'{teras:10.3f} TFLOP  in matrix products')
    if program['kernel_seconds']:
      lines.append(
        f'{program["kernel_seconds"]:10.3f} s  in kernels, by the estimate of '
        'the compiler, which is good for comparing'
      )
  lines += ['', *_describe_step(summary)]
  fits = 'fits' if summary['fits'] else 'does not fit'
  lines += ['', f'{fits} in {memory["limit"] / _GIB:.4g} GiB']
  return lines + ([summary['advice']] if 'advice' in summary else [])


def _describe_step(summary: Mapping[str, Any]) -> list[str]:
  """Returns the lines about the time of a step, by formulas."""
  step = summary['step']
  lines = [
    f'A step of {step["trajectories"]} trajectories of {step["length"]} '
    f'tokens, of which {step["losses"]} are trained on, by formulas',
    '     at least   expected    TFLOP   GiB read   GiB sent',
  ]
  for name, part in step['parts'].items():
    sent = sum(entry['bytes'] for entry in part['sent'])
    lines.append(
      f'{part["seconds_at_least"]:11.2f} s {part["seconds"]:8.2f} s '
      f'{part["operations"] / 1e12:8.0f} {part["read"] / _GIB:10.0f} '
      f'{sent / _GIB:10.1f}  {name}'
    )
  lines.append(
    f'{step["seconds_at_least"]:11.2f} s {step["seconds"]:8.2f} s {"":30}a step'
  )
  lines += [
    f'{entry["bytes"] / _GIB:10.3f} GiB  sent by {entry["kind"]} along '
    f'{entry["axis"]} in {name}'
    for name, part in step['parts'].items()
    for entry in part['sent']
  ]
  lines.append(
    f'{step["tokens_per_second"]:,.0f} tokens and '
    f'{step["questions_per_second"]:.3g} questions per second'
  )
  run = summary['run']
  price = ''
  if run['cost'] is not None:
    price = f', which cost {run["cost"]:,.2f} (at least '
    price += f'{run["cost_at_least"]:,.2f})'
  lines.append(
    f'{run["num_steps"]} steps: {run["hours"]:.3g} hours, '
    f'{run["chip_hours"]:.4g} chip-hours{price}'
  )
  return [*lines, *(f'Assumed: {line}.' for line in summary['assumptions'])]
