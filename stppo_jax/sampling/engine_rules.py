"""The rules for lanes, pages and what is generated from.

Configs are checked with them: no jax here.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Sized
from typing import Any

import numpy as np

# Why hosts cannot decode together (rollout.span=slice): for some keys of a
# config, whether a value forbids it, and the reason.
DECODES_ALONE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
  'mesh.collect_fraction': (
    lambda fraction: fraction > 0,
    'hosts that decode together learn with the same devices',
  ),
  'updates.routing_replay': (
    lambda replay: replay == 'sampler',
    'a host that decodes alone can read its experts without the others',
  ),
  'rollout.lanes': (
    lambda lanes: lanes > 1,
    'hosts that decode together have several devices',
  ),
}


def slots_problem(
  slots: int, *, lanes: int, group_size: int, prefix: str = ''
) -> str:
  """Returns why lanes cannot divide slots among them; '' if they can.

  Every lane has the same number of slots, which whole groups fill.

  Args:
    slots: the number of slots of all lanes.
    lanes: the number of lanes.
    group_size: the number of slots of a group.
    prefix: precedes the names of the options in the line.
  """
  multiple = lanes * group_size
  if slots % multiple == 0:
    return ''
  return (
    f'must be a multiple of {multiple}, which is {prefix}lanes={lanes} times '
    f'{prefix}group_size={group_size}'
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


def check_prompts(
  prompts: Sequence[np.ndarray | None],
  keys: Sized,
  *,
  group_size: int,
  max_length: int,
) -> None:
  """Checks that a collection can begin.

  Args:
    prompts: token ids, one array for each group of rows; None for a group that
      is left out.
    keys: one for each row.
    group_size: rows that share a prompt.
    max_length: tokens that a row can hold.

  Raises:
    ValueError: if a prompt is empty or leaves no room to generate, or if there
      are too few keys.
  """
  for prompt in prompts:
    if prompt is not None and not 0 < len(prompt) < max_length:
      raise ValueError(
        f'a prompt of {len(prompt)} tokens; it needs at least one, and room '
        f'to generate in max_length={max_length}'
      )
  if len(keys) < len(prompts) * group_size:
    rows = f'{len(prompts)} prompts of group_size={group_size}'
    raise ValueError(f'{len(keys)} keys for {rows}: every row needs a key')


def check_observation(
  token_ids: np.ndarray, *, remaining: int, max_length: int
) -> None:
  """Checks that the policy can generate after an observation.

  Args:
    token_ids: [L] int32, the observation.
    remaining: tokens that still fit into the row.
    max_length: tokens that a row can hold.

  Raises:
    ValueError: if it leaves no room for a token.
  """
  if len(token_ids) >= remaining:
    raise ValueError(
      f'{len(token_ids)} tokens leave no room to generate in the {remaining} '
      f'left of max_length={max_length}'
    )
