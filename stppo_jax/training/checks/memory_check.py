"""Checks, before anything is loaded, that a run fits its devices' memory.

The count is the plan's of weights, moments, gradients, the
reference, the engine, and what decoding copies of it. Programs need more than
that, so what is refused here would have failed later, after everything was
loaded. What is advised counts the temporaries of an update too, by the plan's
estimate.
"""

import jax

from stppo_jax import exits
from stppo_jax.tools.plan import plan as plan_lib
from stppo_jax.tools.plan import search


def device_memory() -> int | None:
  """Returns the bytes that programs may use of the smallest local device.

  None if the devices do not report it; CPUs do not.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  limits = [x['bytes_limit'] for x in stats if x.get('bytes_limit')]
  return min(limits, default=None)


def check(config, limit: int | None) -> None:
  """Checks that the models, their training and the engine fit.

  Args:
    config: the config of a run that fits its files and devices otherwise.
    limit: the bytes of a device; None: they are not known.

  Raises:
    Misconfigured: they do not fit; one line with what is largest, and with what
      would fit.
  """
  if limit is None:
    return
  plan = _plan(config)
  if _bytes(plan) <= limit:
    return
  held = {**plan.sizes, **plan.collecting}
  parts = sorted(held.items(), key=lambda part: -part[1])
  gib = search.gib
  largest = ', '.join(f'{gib(size)} for {name}' for name, size in parts[:3])
  raise exits.Misconfigured(
    f'the run needs {gib(_bytes(plan))} of each device or more ({largest}), '
    f'and there are {gib(limit)}; {search.advice(config, _plan, limit)}'
  )


def _plan(config) -> plan_lib.Plan:
  # At most all tokens of a row carry loss.
  return plan_lib.make(config, length=config.env.max_length, loss_fraction=1.0)


def _bytes(plan: plan_lib.Plan) -> int:
  """Returns the bytes on the device that holds most."""
  learns = sum(plan.sizes.values()) + plan.estimated['gradients']
  decodes = sum((plan.collecting or plan.sizes).values()) + plan.copied
  return max(learns, decodes)
