"""The answers that a client keeps, bounded by their memory."""

import collections
from collections.abc import Sequence
import sys

from stppo_jax import types

# The bytes of an entry without its strings, roughly.
_ENTRY_BYTES = 512

_Key = tuple[str, str]  # corpus, query
_Passages = tuple[types.Passage, ...]


class AnswerCache:
  """Keeps answers, and drops the least recently used ones when it is full."""

  def __init__(self, max_bytes: int):
    self._max_bytes = max_bytes
    self._bytes = 0
    self._answers: collections.OrderedDict[_Key, _Passages] = (
      collections.OrderedDict()
    )

  def find(self, key: _Key) -> _Passages | None:
    """Returns an answer, and marks it as used; None if there is none."""
    if key in self._answers:
      self._answers.move_to_end(key)
      return self._answers[key]
    return None

  def keep(self, key: _Key, passages: _Passages) -> None:
    """Adds or replaces an answer, and drops the least recently used ones."""
    if key in self._answers:
      self._bytes -= _size(key, self._answers.pop(key))
    self._answers[key] = passages
    self._bytes += _size(key, passages)
    while self._bytes > self._max_bytes:
      dropped, passages = self._answers.popitem(last=False)
      self._bytes -= _size(dropped, passages)


def _size(key: _Key, passages: Sequence[types.Passage]) -> int:
  """Returns an estimate of the bytes that an answer takes."""
  texts = [text for p in passages for text in (p.id, p.title, p.text)]
  return _ENTRY_BYTES + sum(map(sys.getsizeof, [*key, *texts]))
