"""Describes the dialogues of a collection, and gives them pages of the cache.

Rows that share a prompt share its full pages. A page is free again when the
last row that has it gives it back.

There may be fewer pages than all rows need at their longest. Then rows wait,
and the oldest one never does: what it may still need is kept free for it. When
it ends, it leaves at least as much for the row that is the oldest then, so that
every row ends.
"""

import collections
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.sampling import compiled_programs


@dataclasses.dataclass(eq=False)
class Row:
  """Describes a dialogue of a collection.

  Attributes:
    number: the number of the row in the collection.
    prompt: [L] int32, token ids.
    group: the group that shares the prompt.
    key_data: uint32 [2], the data of the row's key.
    lane: the lane of its slot; None while it waits for one.
    slot: its slot in the lane.
    pages: its pages of keys and values, of the device that has the slot.
    length: tokens so far, without those of chunks in flight.
    written: the tokens so far, in pieces, without those of a turn that has not
      ended.
    turn: serial number of the turn; it tells a late chunk of an earlier turn
      from one of this turn.
    generating: whether it is the policy's turn.
    in_flight: chunks in flight that decode this turn.
    chunks: token ids and log-probabilities of this turn so far.
    weights: the weights with which its turn is being written; None between
      turns, so that a row that waits holds none.
    version: the version of the weights of its last turn.
    due: the versions that its turns wait for; (): they take the newest weights.
    prompt_version: the version with which its slot begins a copy of its prompt;
      None if it cannot.
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
  written: list[np.ndarray] = dataclasses.field(default_factory=list)
  weights: compiled_programs.Weights | None = None
  version: int = 0
  due: Sequence[int] = ()
  prompt_version: int | None = None

  def is_due(self, weights: compiled_programs.Weights) -> bool:
    """Returns whether its next turn may begin with these weights."""
    is_free = self.turn >= len(self.due)
    return is_free or self.due[self.turn] <= weights.version

  def begin_turn(
    self, token_ids: np.ndarray, weights: compiled_programs.Weights
  ) -> None:
    """Begins a turn with these weights after some more tokens."""
    if not self.turn:
      self.prompt_version = weights.version
    self.length += len(token_ids)
    self.written.append(token_ids)
    self.turn += 1
    self.generating, self.in_flight, self.chunks = True, 0, []
    self.weights, self.version = weights, weights.version

  def begins_anew(
    self, token_ids: np.ndarray, version: int, recomputes: bool
  ) -> bool:
    """Returns whether its tokens are computed again before its next turn.

    Args:
      token_ids: the observation before the turn.
      version: the version of the turn's weights.
      recomputes: whether keys and values of other weights are computed again.
    """
    # The weights that have read the last token predict the next one. Without an
    # observation to read, these would be the weights of the turn before.
    is_other = self.length > 0 and self.version != version
    return is_other and (recomputes or not len(token_ids))

  def end_turn(self, *, stopped: bool) -> types.GeneratedTurn:
    """Ends the turn that is being written, and returns it."""
    ids, logprobs, truncated_logprobs = (
      np.concatenate(x) for x in zip(*self.chunks)
    )
    self.generating, self.weights = False, None
    self.written.append(ids)
    return types.GeneratedTurn(
      ids, logprobs, truncated_logprobs, stopped, self.version
    )


class PagePool:
  """Gives the pages of one device of a lane to its rows.

  Args:
    num_pages: the number of pages.
    page_size: tokens of a page.
    pages_per_row: the most pages that a row needs; no more than there are.
  """

  def __init__(self, num_pages: int, *, page_size: int, pages_per_row: int):
    assert num_pages >= pages_per_row
    self._size, self._most = page_size, pages_per_row
    self._free = list(range(num_pages))[::-1]
    self._holders: collections.Counter[int] = collections.Counter()
    self._rows: list[Row] = []  # the oldest first

  def add(self, row: Row) -> None:
    """Adds a row without pages, the youngest."""
    self._rows.append(row)

  def share(self, row: Row, other: Row, length: int) -> None:
    """Gives a row without pages the full pages of another row's first tokens.

    Args:
      row: gets the pages.
      other: has the pages.
      length: tokens that the two rows have in common.
    """
    row.pages = other.pages[: length // self._size]
    self._holders.update(row.pages)

  def grow(self, row: Row, length: int) -> bool:
    """Gives a row the pages that so many tokens need.

    Returns:
      Whether it has them now; if not, it has got none and must wait.
    """
    if not self.fits(row, length):
      return False
    for _ in range(self._missing(row, length)):
      row.pages.append(self._free.pop())
      self._holders[row.pages[-1]] += 1
    return True

  def fits(self, row: Row, length: int) -> bool:
    """Returns whether `grow` would give a row what it needs."""
    # What the oldest row may still need is not given to others, even if it is
    # free: the oldest one never waits, so all rows end.
    missing, oldest = self._missing(row, length), self._rows[0]
    kept = 0 if row is oldest else self._most - len(oldest.pages)
    return missing <= max(len(self._free) - kept, 0)

  def _missing(self, row: Row, length: int) -> int:
    return max(-(-length // self._size) - len(row.pages), 0)

  def remove(self, row: Row) -> None:
    """Takes back the pages of a row that has ended."""
    self._rows.remove(row)
    self.release(row)

  def emptied(self, row: Row, token_ids: np.ndarray) -> np.ndarray:
    """Empties a row; returns its tokens and the new ones, to be appended."""
    self.release(row)
    token_ids = np.concatenate([*row.written, token_ids])
    # No other row can copy its prompt any more: the hidden state that a copy
    # begins with is overwritten when the tokens are appended.
    row.length, row.written, row.prompt_version = 0, [], None
    return token_ids

  def release(self, row: Row) -> None:
    """Takes back the pages of a row, which stays."""
    pages, row.pages = row.pages, []
    for page in pages:
      self._holders[page] -= 1
      if not self._holders[page]:
        del self._holders[page]
        self._free.append(page)


def closest_in_length(
  row: Row, rows: Sequence[Row], size: int
) -> Sequence[Row]:
  """Returns `size` rows, `row` among them, whose lengths differ least."""
  by_length = sorted(rows, key=lambda row: row.length)
  place = by_length.index(row)
  firsts = range(max(place - size + 1, 0), min(place, len(rows) - size) + 1)

  def length_range(first):
    return by_length[first + size - 1].length - by_length[first].length

  first = min(firsts, key=length_range)
  return by_length[first : first + size]
