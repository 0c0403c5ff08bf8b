"""A dialogue, as the host sees it."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(eq=False)
class Row:
  """A dialogue of a collection.

  Attributes:
    number: the number of the row in the collection.
    prompt: [L] int32, token ids.
    group: the group that shares the prompt.
    key_data: uint32 [2], the data of the row's key.
    lane: the lane of its slot; None while it waits for one.
    slot: its slot in the lane.
    pages: its pages of keys and values, of the device that has the slot.
    length: tokens so far, without those of chunks in flight.
    turn: serial number of the turn; it tells a late chunk of an earlier turn
      from one of this turn.
    generating: whether it is the policy's turn.
    in_flight: chunks in flight that decode this turn.
    chunks: token ids and log-probabilities of this turn so far.
  """

  number: int
  prompt: np.ndarray
  group: int
  key_data: np.ndarray
  lane: Any = None
  slot: int = -1
  pages: list[int] = dataclasses.field(default_factory=list)
  length: int = 0
  turn: int = 0
  generating: bool = False
  in_flight: int = 0
  chunks: list[list[np.ndarray]] = dataclasses.field(default_factory=list)
