"""Checks the numbers of slots, lanes and pages of the engine.

The check of a config calls these functions and must not need jax, so this
module does not import jax.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Settings with which hosts cannot decode together (rollout.span=slice). For
# each key of the config: a function that says whether a value of the key is
# such a setting, and the reason.
DECODES_ALONE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
  'mesh.collect_fraction': (
    lambda fraction: fraction > 0,
    'hosts decode together only on the devices that learn',
  ),
  'mesh.collectors': (
    lambda collectors: collectors > 0,
    'jax on a host that only collects does not know the other hosts',
  ),
  'updates.routing_replay': (
    lambda replay: replay == 'sampler',
    'a host alone could not read the experts that its rows have chosen',
  ),
  'rollout.lanes': (
    lambda lanes: lanes > 1,
    'several lanes need a single device, but a slice has several',
  ),
  'rollout.turn_swaps': (
    lambda turn_swaps: turn_swaps != 'never',
    'hosts that decode together need the same weights in every call',
  ),
}
# Settings that do not fit every value of rollout.turn_swaps. Each entry has the
# key of the setting, a function that says whether a value of turn_swaps (other
# than never, which always fits) and a value of the key fit together, the values
# of turn_swaps that the error message proposes, and the reason.
SWAPS_TURNS: Sequence[tuple[str, Callable[[str, Any], bool], str, str]] = (
  (
    'rollout.steps_ahead',
    lambda swaps, ahead: ahead > 0,
    "'never'",
    'no weights change while a step is collected',
  ),
  (
    'rollout.engine',
    lambda swaps, engine: engine == 'local',
    "'never'",
    'a server does not tell which weights wrote a turn',
  ),
  (
    'rollout.pages',
    lambda swaps, pages: swaps == 'keep' or not pages,
    "'never' or 'keep'",
    'a dialogue that is computed again shares no pages, and may find too few',
  ),
  (
    'updates.routing_replay',
    lambda swaps, replay: (
      replay == 'nowhere' or (swaps == 'keep' and replay == 'sampler')
    ),
    "'never', or 'keep' with routing_replay=sampler,",
    'a token has been routed by several versions',
  ),
)


def slots_problem(slots: int, *, lanes: int, group_size: int) -> str:
  """Returns the reason why slots cannot be divided into lanes; '' if they can.

  Every lane must have the same number of slots, a multiple of the group size.

  Args:
    slots: the number of slots of all lanes.
    lanes: the number of lanes.
    group_size: the number of slots that a group fills.
  """
  multiple = lanes * group_size
  if slots % multiple == 0:
    return ''
  return (
    f'must be a multiple of {multiple}, which is rollout.lanes={lanes} times '
    f'rollout.group_size={group_size}'
  )


def devices_problem(lanes: int, num_devices: int) -> str:
  """Returns the reason why lanes cannot run on these devices; '' if they can.

  The threads of two lanes could start their programs in a different order on
  each device. Collectives of the two programs would then wait for each other
  for ever.
  """
  if lanes == 1 or num_devices == 1:
    return ''
  return (
    f'must be 1 on the {num_devices} devices of this host, on which the engine '
    'decodes'
  )


def tokens_per_page(page_size: int, max_length: int) -> int:
  """Returns the number of tokens in a page of the KV cache.

  If `page_size` is 0, a page holds a quarter of `max_length`, but at most 128
  tokens.
  """
  return page_size or min(-(-max_length // 4), 128)


def pages_problem(pages: int, *, parts: int, pages_per_row: int) -> str:
  """Returns the reason why a number of pages is not allowed; '' if it is.

  Args:
    pages: the number of pages; 0 means `pages_per_row` pages for each slot.
    parts: the number of equal parts that the pages are divided into. Each lane
      has one part on each device that has a share of the slots.
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
