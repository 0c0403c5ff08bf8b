"""A plan as numbers and texts that JSON can hold."""

from typing import Any

from stppo_jax.models import roofline
from stppo_jax.tools.plan import plan as plan_lib
from stppo_jax.tools.plan import search


def summary(plan: plan_lib.Plan, *, price: float = 0.0) -> dict[str, Any]:
  """Returns a plan as numbers and texts that JSON can hold.

  Args:
    plan: the plan.
    price: the price of a chip for an hour; 0: unknown.
  """
  work = plan.work
  at_least, seconds = plan.seconds
  hours = [x * plan.num_steps / 3600 for x in (at_least, seconds)]
  chip_hours = [x * plan.topology.num_chips for x in hours]
  costs = [price * x if price else None for x in chip_hours]
  return {
    'topology': plan.topology.name,
    'devices': plan.topology.num_devices,
    'chips': plan.topology.num_chips,
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
        'temporaries': cost.temporaries,
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
      *([roofline.BESIDE] if plan.held.collecting else []),
    ],
  }


def row(tried: search.Tried) -> dict[str, Any]:
  """Returns the line of a mesh in a sweep."""
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
