"""The inputs that an engine refuses."""

from collections.abc import Sequence
from collections.abc import Sized

import numpy as np


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
