"""Turns a plan into plain data for JSON, and into lines to print."""

from collections.abc import Mapping, Sequence
from typing import Any

from stppo_jax.models import roofline
from stppo_jax.tools.plan import plan as plan_lib
from stppo_jax.tools.plan import search

_GIB = 2**30
_GAINS = (
  'the forward passes of env.rewards.information_gain are not counted, which '
  'are up to env.max_turns + 1 for each trajectory'
)


def summary(plan: plan_lib.Plan, *, price: float = 0.0) -> dict[str, Any]:
  """Returns a plan as numbers and texts that JSON can hold.

  Args:
    plan: the plan.
    price: the price of a chip for an hour; 0 if it is unknown.
  """
  work = plan.work
  at_least, seconds = plan.seconds
  hours = [x * plan.num_steps / 3600 for x in (at_least, seconds)]
  chip_hours = [x * plan.num_chips for x in hours]
  # Without a price the costs are None, because 0 would mean that a run is free.
  costs = [price * x if price else None for x in chip_hours]
  return {
    'topology': plan.topology.name,
    'devices': plan.topology.num_devices,
    'chips': plan.num_chips,
    'collectors': plan.collectors,
    'mesh': dict(plan.axes),
    'fits': plan.fits,
    'problems': plan.problems,
    'memory': {
      'sizes': dict(plan.held.sizes),
      'collecting': dict(plan.held.collecting),
      'copied': plan.held.copied,
      'compiled_for': plan.topology.platform if plan.programs else '',
      'temporaries': plan.temporaries,
      'estimated': dict(plan.estimated),
      'total': plan.total,
      'limit': plan.limit,
      'headroom': plan.limit - plan.total,
    },
    'programs': {
      name: {
        'arguments': cost.arguments,
        'in_place': cost.in_place,
        'peak': cost.peak,
        'accessed': cost.accessed,
        'operations': cost.operations,
        'kernel_seconds': cost.seconds,
        'collectives': cost.sent,
      }
      for name, cost in plan.programs.items()
    },
    'step': {
      'trajectories': work.trajectories,
      'length': work.length,
      'losses': work.losses,
      'slots': plan.slots,
      'parts': {
        name: {
          'operations': phase.operations,
          'computed': phase.computed,
          'read': phase.read,
          'sent': [
            {'kind': kind, 'axis': axis, 'bytes': size}
            for (kind, axis), size in phase.traffic.items()
          ],
          'seconds_at_least': phase.bound,
          'seconds': phase.expected,
        }
        for name, phase in plan.phases.items()
      },
      'seconds_at_least': at_least,
      'seconds': seconds,
      'tokens_per_second': work.trajectories * work.length / seconds,
      'questions_per_second': work.trajectories / work.group_size / seconds,
    },
    'run': {
      'num_steps': plan.num_steps,
      'hours': hours[1],
      'chip_hours': chip_hours[1],
      'chip_hours_at_least': chip_hours[0],
      'cost': costs[1],
      'cost_at_least': costs[0],
    },
    'assumptions': [
      *roofline.ASSUMPTIONS,
      *([roofline.BESIDE] if plan.work.collectors else []),
      *([_GAINS] if plan.asks_for_gains else []),
    ],
  }


def row(tried: search.MeshCandidate) -> dict[str, Any]:
  """Returns the data of one mesh in a sweep, for JSON and for `sweep_text`."""
  found = {
    'data': tried.changes['mesh.data'],
    'fsdp': tried.changes['mesh.fsdp'],
    'tensor': tried.changes['mesh.tensor'],
    'microbatch': tried.changes['updates.microbatch_size'],
    'fits': False,
    'problem': tried.problem,
  }
  if tried.plan is not None:
    at_least, seconds = tried.plan.seconds
    found |= {
      'fits': tried.plan.fits,
      'problem': '; '.join(tried.plan.problems),
      'compiled': bool(tried.plan.programs),
      'seconds_at_least': at_least,
      'seconds': seconds,
      'total': tried.plan.total,
    }
  return found


def sweep_text(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the table of the meshes of a sweep as text."""
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


def text(summary: Mapping[str, Any]) -> list[str]:
  """Returns the lines of a summary for printing; sizes are of one device."""
  axes = ' '.join(f'{axis}={n}' for axis, n in summary['mesh'].items())
  memory = summary['memory']
  lines = [f'{summary["topology"]}: {axes}']
  for title, sizes in _sections(memory).items():
    lines += ['', title] if sizes else []
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
        f'{program["kernel_seconds"]:10.3f} s  in kernels, as the compiler '
        'estimates; only for comparisons'
      )
  lines += ['', *_describe_step(summary)]
  fits = 'fits' if summary['fits'] else 'does not fit'
  lines += ['', f'{fits} in {memory["limit"] / _GIB:.4g} GiB']
  return lines + ([summary['advice']] if 'advice' in summary else [])


def _sections(memory: Mapping[str, Any]) -> dict[str, dict[str, int]]:
  """Returns the sections of a table of a device's memory, by title.

  A section maps the name of a part of the memory, such as 'policy parameters',
  to bytes. The last section has the total, the limit and the difference between
  them.
  """
  learning, collecting = dict(memory['sizes']), dict(memory['collecting'])
  # The memory that is held all the time, if the same devices learn and collect.
  always = {name: x for name, x in learning.items() if name in collecting}
  for name in always:
    del learning[name], collecting[name]
  if memory['copied']:
    label = 'keys and values of active slots, which decode copies'
    collecting[label] = memory['copied']
  if memory['compiled_for']:
    compiler = memory['compiled_for'].upper()
    for name, size in memory['temporaries'].items():
      where = collecting if name in roofline.COLLECTING else learning
      where[f'other memory of {name}, as compiled for {compiler}'] = size
  else:
    for name, size in memory['estimated'].items():
      learning[f'{name}, estimated'] = size
  which = 'While it' if always else 'Memory of a device that'
  return {
    'Memory of a device': always,
    f'{which} learns': learning,
    f'{which} collects': collecting,
    'At most': {x: memory[x] for x in ('total', 'limit', 'headroom')},
  }


def _describe_step(summary: Mapping[str, Any]) -> list[str]:
  """Returns the lines about the time of a step, which formulas estimate."""
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
  if step['slots']:
    beside = summary['collectors']
    which = f'Each of {beside} more hosts' if beside else 'Each host'
    lines.append(f'{which} decodes {step["slots"]} trajectories at a time')
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
