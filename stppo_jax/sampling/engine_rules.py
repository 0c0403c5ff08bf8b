"""Checks the numbers of slots, lanes and pages of the engine.

Configs are checked with these functions, so this module does not import jax.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Why hosts cannot decode together (rollout.span=slice): for some keys of a
# config, whether a value forbids it, and the reason.
DECODES_ALONE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
  'mesh.collect_fraction': (
    lambda fraction: fraction > 0,
    'hosts that decode together learn with the same devices',
  ),
  'mesh.collectors': (
    lambda collectors: collectors > 0,
    'to jax, a host that only collects has no other hosts',
  ),
  'updates.routing_replay': (
    lambda replay: replay == 'sampler',
    'a host that decodes alone can read its experts without the others',
  ),
  'rollout.lanes': (
    lambda lanes: lanes > 1,
    'hosts that decode together have several devices',
  ),
  'rollout.turn_swaps': (
    lambda turn_swaps: turn_swaps != 'never',
    'hosts that decode together call a program with the same weights',
  ),
}
# What turns with newer weights need (rollout.turn_swaps). For some keys of a
# config: whether the option and the key's value go together, the values of the
# option that always do, and the reason.
SWAPS_TURNS: Sequence[tuple[str, Callable[[str, Any], bool], str, str]] = (
  (
    'rollout.steps_ahead',
    lambda swaps, ahead: ahead > 0,
    'never',
    'no weights change while a step is collected',
  ),
  (
    'rollout.engine',
    lambda swaps, engine: engine == 'local',
    'never',
    'a server does not tell which weights wrote a turn',
  ),
  (
    'rollout.pages',
    lambda swaps, pages: swaps == 'keep' or not pages,
    'never or keep',
    'a dialogue that is computed again may lack the pages that it had shared',
  ),
  (
    'updates.routing_replay',
    lambda swaps, replay: (
      replay == 'nowhere' or (swaps == 'keep' and replay == 'sampler')
    ),
    'never, or keep with routing_replay=sampler,',
    'a token has been routed by several versions',
  ),
)


def slots_problem(slots: int, *, lanes: int, group_size: int) -> str:
  """Returns why lanes cannot divide slots among them; '' if they can.

  Every lane has the same number of slots, which whole groups fill.

  Args:
    slots: the number of slots of all lanes.
    lanes: the number of lanes.
    group_size: the number of slots of a group.
  """
  multiple = lanes * group_size
  if slots % multiple == 0:
    return ''
  return (
    f'must be a multiple of {multiple}, which is rollout.lanes={lanes} times '
    f'rollout.group_size={group_size}'
  )


def devices_problem(lanes: int, num_devices: int) -> str:
  """Returns why lanes cannot run on this number of devices; '' if they can.

  The threads of two lanes could start their programs in another order on each
  device, and collectives of the two programs would then wait for each other for
  ever.
  """
  if lanes == 1 or num_devices == 1:
    return ''
  return (
    f'must be 1 on the {num_devices} devices of this host, on which the engine '
    'decodes'
  )


def tokens_per_page(page_size: int, max_length: int) -> int:
  """Returns the tokens of a page; see rollout.page_size for 0."""
  return page_size or min(-(-max_length // 4), 128)


def pages_problem(pages: int, *, parts: int, pages_per_row: int) -> str:
  """Returns why the slots cannot have this number of pages; '' if they can.

  Args:
    pages: the number of pages; 0: as many as full slots need.
    parts: the parts of the slots that have pages of their own: devices, or
      lanes.
    pages_per_row: the most pages that a row needs.
  """
  least = parts * pages_per_row
  if not pages or (pages >= least and pages % parts == 0):
    return ''
  if parts == 1:
    return (
      f'must be 0 (enough for all slots) or at least {least}, which the '
      'longest trajectory needs'
    )
  return (
    f'must be 0 (enough for all slots) or a multiple of {parts} from {least} '
    f'on: each of {parts} devices or lanes has pages of its own, and the '
    f'longest trajectory needs {pages_per_row}'
  )
