"""Types for the requests to a `SlotDriver`, and for its program calls."""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Append:
  """Describes a prompt or an observation, after which a turn begins.

  Attributes:
    token_ids: [L] int32.
    length: the number of tokens that the slot holds before the append. For a
      prompt it is 0, and the slot is emptied first.
    budget: the number of tokens that the policy may generate after these
      tokens.
    pages: the pages of the slot, with room for these tokens.
  """

  token_ids: np.ndarray
  length: int
  budget: int
  pages: Sequence[int]


@dataclasses.dataclass(frozen=True)
class CopyPrompt:
  """Describes a prompt that a slot copies from another slot of its device.

  Attributes:
    source: the slot that holds the prompt; it may hold later tokens, too.
    length: the number of tokens of the prompt.
    budget: the number of tokens that the policy may generate after the prompt.
    last_page: the page that the prompt fills only in part, and the page to
      which it is copied; None if the prompt fills all its pages.
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
    length: an upper bound of the number of tokens that the slot holds when the
      chunk begins.
    pages: the pages of the slot, with room for the chunk.
  """

  key_data: np.ndarray
  length: int
  pages: Sequence[int]


class Call(NamedTuple):
  """Describes a call of a program.

  Attributes:
    program: the name of the program. For a host that needs no program, it is
      'waits' or 'done', see `slice_driver`.
    size: the number of slots of each device that the program runs on; 0 if no
      program runs.
    num_pages: the number of pages that are read, see `slot_programs`.
    enough, greedy: see `SlotDriver.decode`.
  """

  program: str
  size: int = 0
  num_pages: int = 0
  enough: int = 0
  greedy: bool = False
