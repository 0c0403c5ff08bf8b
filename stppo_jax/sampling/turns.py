"""Rows as every engine plays them: what it refuses, and what comes back."""

from collections.abc import Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class GeneratedTurn:
  """One row's turn.

  Attributes:
    token_ids: [N] int32; at least one wherever one fits.
    logprobs: [N] float32, under softmax(logits / temperature).
    truncated_logprobs: [N] float32, under the truncated distribution; None
      where that is not known.
    stopped: False where a length limit ended the turn.
  """

  token_ids: np.ndarray
  logprobs: np.ndarray
  truncated_logprobs: np.ndarray | None
  stopped: bool


def check_prompts(
  prompts: Sequence[np.ndarray | None],
  keys: Sequence,
  *,
  group_size: int,
  max_length: int,
) -> None:
  """Whether a collection can begin.

  Args:
    prompts: token ids, one for each group of rows; None is not played.
    keys: one per row.
    group_size: rows of a prompt.
    max_length: tokens a row can hold.

  Raises:
    ValueError: a prompt that is empty or leaves no room to write, or too few
      keys.
  """
  for prompt in prompts:
    if prompt is not None and not 0 < len(prompt) < max_length:
      raise ValueError(
        f'a prompt of {len(prompt)} tokens; it needs at least one, and room '
        f'to write in max_length={max_length}'
      )
  if len(keys) < len(prompts) * group_size:
    rows = f'{len(prompts)} prompts of group_size={group_size}'
    raise ValueError(f'{len(keys)} keys for {rows}')


def check_observation(
  token_ids: np.ndarray, *, remaining: int, max_length: int
) -> None:
  """Whether the policy can write after these tokens.

  Raises:
    ValueError: it has no room.
  """
  if len(token_ids) >= remaining:
    raise ValueError(
      f'{len(token_ids)} tokens leave no room to write in the {remaining} '
      f'left of max_length={max_length}'
    )
