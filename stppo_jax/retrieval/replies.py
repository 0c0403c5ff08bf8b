"""Parses and cleans the replies of servers.

Whatever a server sends, a cleaned passage can be cached, tokenised and written:
its texts are valid Unicode of bounded length, and its score is finite.
"""

from collections.abc import Sequence
import dataclasses
import json
import sys
from typing import Any

from stppo_jax import types

# The passages of each query; None where a query's list is malformed.
Answers = Sequence[list[types.Passage] | None]

_LONGEST_INTEGER = 300  # digits; a longer one is read as a float
_EXCERPT = 80  # characters of a reply that a message quotes


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
    topk: the number of passages that are kept of each query.
    max_chars: the number of characters that are kept of each text.
  """
  return [
    None if answer is None else [_clean(p, max_chars) for p in answer[:topk]]
    for answer in answers
  ]


def _clean(passage: types.Passage, max_chars: int) -> types.Passage:
  largest = sys.float_info.max
  return dataclasses.replace(
    passage,
    id=_text(passage.id[:max_chars]),
    title=_text(passage.title[:max_chars]),
    text=_text(passage.text[:max_chars]),
    score=float(min(max(passage.score, -largest), largest)),
  )


def _text(text: str) -> str:
  """Returns a text with U+FFFD for each half of a surrogate pair.

  JSON can escape such a half, which no tokenizer and no file accepts.
  """
  return text.encode('utf-16-le', 'surrogatepass').decode(
    'utf-16-le', 'replace'
  )


def _number(digits: str) -> int | float:
  # int() refuses some thousand digits, and a float cannot hold 400.
  return int(digits) if len(digits) <= _LONGEST_INTEGER else float(digits)
