"""Describes what a slot driver does, and the calls of programs for it."""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Append:
  """Describes a prompt or an observation, after which a turn begins.

  Attributes:
    token_ids: [L] int32.
    length: tokens that the slot holds before; 0 for a prompt, before which the
      slot is emptied.
    budget: tokens that the policy may generate after them.
    pages: the pages of the slot, with room for these tokens.
  """

  token_ids: np.ndarray
  length: int
  budget: int
  pages: Sequence[int]


@dataclasses.dataclass(frozen=True)
class CopyPrompt:
  """Describes a prompt that a slot gets from another slot of its device.

  Attributes:
    source: the slot that holds the prompt; its row may have gone on since.
    length: tokens of the prompt.
    budget: tokens that the policy may generate after it.
    last_page: the page that the prompt does not fill, and the page that it is
      copied to; None if the prompt fills its pages.
  """

  source: int
  length: int
  budget: int
  last_page: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Decode:
  """Describes a slot in which the policy generates.

  Attributes:
    key_data: uint32 [2], the data of the row's key.
    length: most tokens that the slot can hold when the chunk begins.
    pages: the pages of the slot, with room for the chunk.
  """

  key_data: np.ndarray
  length: int
  pages: Sequence[int]


class Call(NamedTuple):
  """Describes a call of a program.

  Attributes:
    program: its name, or a state of a host that needs none, see `slice_driver`.
    size: the slots of each device that it runs on; 0 where it runs on none.
    num_pages: see `slot_programs`.
    enough, greedy: see `SlotDriver.decode`.
  """

  program: str
  size: int = 0
  num_pages: int = 0
  enough: int = 0
  greedy: bool = False
