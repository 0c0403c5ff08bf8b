"""Checks, before anything is loaded, that a run fits its devices' memory.

The count is the plan's (`analysis/plan.py`) of weights, moments, gradients, the
reference, and the engine. Programs need more than that, so what is refused here
would have failed later, after everything was loaded.
"""

from collections.abc import Iterator
from collections.abc import Mapping

import jax

from stppo_jax.analysis import plan as plan_lib
from stppo_jax.training.building import assembly

_GIB = 2**30


def device_memory() -> int | None:
  """Returns the bytes that programs may use of the smallest local device.

  None where devices do not say it, as CPUs do not.
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
  parts = sorted(plan.sizes.items(), key=lambda part: -part[1])
  largest = ', '.join(f'{_gib(size)} for {name}' for name, size in parts[:3])
  raise assembly.Misconfigured(
    f'the run needs {_gib(_bytes(plan))} GiB of each device or more '
    f'({largest}), and there are {_gib(limit)}; '
    + _advice(config, plan.axes, limit)
  )


def _advice(config, axes: Mapping[str, int], limit: int) -> str:
  """Returns which layout on the same devices would fit, or comes closest."""
  needs = []
  for keys in _layouts(axes):
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict(keys)
    try:
      needs.append((_bytes(_plan(other)), keys))
    except assembly.Misconfigured:  # it does not divide the model or the rows
      continue
  # The first that fits shares weights between the fewest devices.
  need, keys = next(
    (found for found in needs if found[0] <= limit),
    min(needs, key=lambda found: found[0]),
  )
  flags = ' '.join(f'{key}={value}' for key, value in keys.items())
  if need <= limit:
    return f'with {flags} it needs {_gib(need)}'
  return (
    f'no other fsdp and rollout.tensor fit: with {flags} it needs {_gib(need)}'
  )


def _layouts(axes: Mapping[str, int]) -> Iterator[dict[str, int]]:
  """Yields keys of the config; `mesh.tensor` stays as it is."""
  shared = axes['data'] * axes['fsdp']
  for fsdp in _divisors(shared):
    for tensor in _divisors(jax.local_device_count()):
      yield {
        'mesh.data': shared // fsdp,
        'mesh.fsdp': fsdp,
        'mesh.tensor': axes['tensor'],
        'rollout.tensor': tensor,
      }


def _divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]


def _plan(config) -> plan_lib.Plan:
  # Length and loss matter to temporaries only, which are not counted.
  return plan_lib.make(config, length=config.env.max_length, loss_fraction=1.0)


def _bytes(plan: plan_lib.Plan) -> int:
  return sum(plan.sizes.values()) + plan.estimated['gradients']


def _gib(size: int) -> str:
  number = size / _GIB
  return f'{number:.1f}' if number >= 1 else f'{number:.2g}'
