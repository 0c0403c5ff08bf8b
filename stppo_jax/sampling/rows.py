"""Describes the dialogues of a collection, and gives them pages of the cache.

Rows that share a prompt share the pages that the prompt fills completely. A
page becomes free when the last row that holds it gives it back.

There may be fewer pages than all rows need at their full length. Then rows wait
for pages, but the oldest row never waits: the pages that it may still need are
kept free for it. When the oldest row ends, it leaves enough free pages for the
next oldest row, so every row ends.
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
    group: the number of the group of rows that share the prompt.
    key_data: uint32 [2], the data of the row's key.
    lane: the lane of the row's slot; None while the row waits for a slot.
    slot: the number of the row's slot in the lane.
    pages: the numbers of the row's pages, on the device that has the slot.
    length: the number of tokens so far, without the tokens of chunks in flight.
    written: the tokens so far, in pieces, without the tokens of a turn that has
      not ended.
    turn: the number of turns that have begun. It distinguishes a late chunk of
      an earlier turn from a chunk of the current turn.
    generating: whether the policy is writing a turn of the row.
    in_flight: the number of chunks in flight that decode the current turn.
    chunks: for each chunk of the current turn, token ids and log-probabilities.
    weights: the weights that write the current turn. Between turns it is None,
      so that a row that waits keeps no old weights in memory.
    version: the version of the weights of the row's last turn.
    due: for each turn of the row, in order, the least version of weights with
      which the turn may begin. Turns beyond the end of `due` wait for nothing.
    prompt_version: the version of the weights that have read the prompt, if
      other rows can begin with a copy of the prompt; else None.
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
    """Returns whether the row's next turn may begin with these weights."""
    is_free = self.turn >= len(self.due)
    return is_free or self.due[self.turn] <= weights.version

  def begin_turn(
    self, token_ids: np.ndarray, weights: compiled_programs.Weights
  ) -> None:
    """Appends tokens to the row, and begins a turn with these weights."""
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
    """Returns whether the row's tokens are computed again before its next turn.

    Args:
      token_ids: the observation before the turn.
      version: the version of the turn's weights.
      recomputes: whether newer weights compute the keys and values of all
        tokens of a row again.
    """
    # The first token of a turn is predicted by the weights that have read the
    # token before the turn. If there is no observation to read, these would be
    # the weights of the previous turn.
    is_other = self.length > 0 and self.version != version
    return is_other and (recomputes or not len(token_ids))

  def end_turn(self, *, stopped: bool) -> types.GeneratedTurn:
    """Ends the current turn, and returns it."""
    ids, logprobs, truncated_logprobs = (
      np.concatenate(x) for x in zip(*self.chunks)
    )
    self.generating, self.weights = False, None
    self.written.append(ids)
    return types.GeneratedTurn(
      ids, logprobs, truncated_logprobs, stopped, self.version
    )


class PagePool:
  """Gives the pages of one device of a lane to the rows on that device.

  Args:
    num_pages: the number of pages.
    page_size: the number of tokens in a page.
    pages_per_row: the most pages that a row needs; at most `num_pages`.
  """

  def __init__(self, num_pages: int, *, page_size: int, pages_per_row: int):
    assert num_pages >= pages_per_row
    self._size, self._most = page_size, pages_per_row
    self._free = list(range(num_pages))[::-1]
    self._holders: collections.Counter[int] = collections.Counter()
    self._rows: list[Row] = []  # the oldest row first

  def add(self, row: Row) -> None:
    """Adds a row without pages as the youngest row."""
    self._rows.append(row)

  def share(self, row: Row, other: Row, length: int) -> None:
    """Lets a row without pages share the first full pages of another row.

    Args:
      row: the row that gets the pages.
      other: the row that holds the pages.
      length: the number of first tokens that both rows have in common.
    """
    row.pages = other.pages[: length // self._size]
    self._holders.update(row.pages)

  def grow(self, row: Row, length: int) -> bool:
    """Gives a row the pages that it needs to hold `length` tokens.

    Returns:
      Whether the row has these pages now. If not, it has got no further page
      and must wait.
    """
    if not self.fits(row, length):
      return False
    for _ in range(self._missing(row, length)):
      row.pages.append(self._free.pop())
      self._holders[row.pages[-1]] += 1
    return True

  def fits(self, row: Row, length: int) -> bool:
    """Returns whether `grow` would give the row pages for `length` tokens."""
    # Pages that the oldest row may still need are not given to other rows, even
    # if they are free. So the oldest row never waits, and all rows end.
    missing, oldest = self._missing(row, length), self._rows[0]
    kept = 0 if row is oldest else self._most - len(oldest.pages)
    return missing <= max(len(self._free) - kept, 0)

  def _missing(self, row: Row, length: int) -> int:
    return max(-(-length // self._size) - len(row.pages), 0)

  def remove(self, row: Row) -> None:
    """Removes a row that has ended, and takes back its pages."""
    self._rows.remove(row)
    self.release(row)

  def emptied(self, row: Row, token_ids: np.ndarray) -> np.ndarray:
    """Empties a row, and returns the tokens to append to it.

    The result has all tokens that the row had, followed by `token_ids`.
    """
    self.release(row)
    token_ids = np.concatenate([*row.written, token_ids])
    # Other rows can no longer copy the prompt of this row: a copy would begin
    # with the hidden state of the prompt, which the append overwrites.
    row.length, row.written, row.prompt_version = 0, [], None
    return token_ids

  def release(self, row: Row) -> None:
    """Takes back the pages of a row, which stays in the pool."""
    pages, row.pages = row.pages, []
    for page in pages:
      self._holders[page] -= 1
      if not self._holders[page]:
        del self._holders[page]
        self._free.append(page)


def closest_in_length(
  row: Row, rows: Sequence[Row], size: int
) -> Sequence[Row]:
  """Returns `size` rows, `row` among them, whose lengths differ the least."""
  by_length = sorted(rows, key=lambda row: row.length)
  place = by_length.index(row)
  firsts = range(max(place - size + 1, 0), min(place, len(rows) - size) + 1)

  def length_range(first):
    return by_length[first + size - 1].length - by_length[first].length

  first = min(firsts, key=length_range)
  return by_length[first : first + size]
