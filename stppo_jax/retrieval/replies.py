"""Parses and cleans the replies of servers, and caches answers.

Whatever a server sends, a cleaned passage can be cached, tokenised and written
to files: its texts are valid Unicode of bounded length, and its score is
finite.
"""

import collections
from collections.abc import Sequence
import dataclasses
import json
import sys
from typing import Any

from stppo_jax import text as text_lib
from stppo_jax import types

# The passages of each query; None for a query whose list is malformed.
Answers = Sequence[list[types.Passage] | None]

_LONGEST_INTEGER = 300  # an integer with more digits is read as a float
_EXCERPT = 80  # characters of a reply that a message quotes
# About the number of bytes that a cached answer takes in addition to its
# strings.
_ENTRY_BYTES = 512

_Key = tuple[str, str]  # corpus, query
_Passages = tuple[types.Passage, ...]


def load(reply: bytes) -> Any:
  """Returns the JSON values of a reply.

  Raises:
    ValueError: if the reply is not JSON; the message is one line.
  """
  try:
    return json.loads(reply, parse_int=_number)
  except (ValueError, RecursionError) as error:
    excerpt = reply[:_EXCERPT].decode('utf-8', 'replace')
    raise ValueError(f'the reply is not JSON: {excerpt!r}') from error


def clean(answers: Answers, *, topk: int, max_chars: int) -> Answers:
  """Returns the answers with valid, bounded texts and with finite scores.

  Args:
    answers: the passages of each query.
    topk: the most passages that are kept for each query.
    max_chars: the most characters that are kept of each text.
  """
  return [
    None if answer is None else [_clean(p, max_chars) for p in answer[:topk]]
    for answer in answers
  ]


def _clean(passage: types.Passage, max_chars: int) -> types.Passage:
  largest = sys.float_info.max
  return dataclasses.replace(
    passage,
    id=text_lib.whole(passage.id[:max_chars]),
    title=text_lib.whole(passage.title[:max_chars]),
    text=text_lib.whole(passage.text[:max_chars]),
    score=float(min(max(passage.score, -largest), largest)),
  )


def _number(digits: str) -> int | float:
  # int() refuses several thousand digits. A score is converted to a float,
  # which fails for an int of 400 digits.
  return int(digits) if len(digits) <= _LONGEST_INTEGER else float(digits)


class AnswerCache:
  """Caches answers; if full, drops the least recently used answers."""

  def __init__(self, max_bytes: int):
    self._max_bytes = max_bytes
    self._bytes = 0
    self._answers: collections.OrderedDict[_Key, _Passages] = (
      collections.OrderedDict()
    )

  def find(self, key: _Key) -> _Passages | None:
    """Returns a cached answer and marks it as used; None if not cached."""
    if key in self._answers:
      self._answers.move_to_end(key)
      return self._answers[key]
    return None

  def keep(self, key: _Key, passages: _Passages) -> None:
    """Adds or replaces an answer; drops old answers if the cache is full."""
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
