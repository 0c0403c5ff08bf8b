"""Reading what a retrieval server sent back, trusting none of it."""

import datetime
from email import utils as email_utils
import json
import math
from typing import Any

from stppo_jax import types
from stppo_jax.retrieval import corpus


def parse_result(
  body: bytes, num_queries: int
) -> list[list[types.Passage] | None]:
  """The passages of each query; None where a query's list is malformed.

  Both shapes of dialect A are read, `{"document": {...}, "score": 0.8}` and
  the bare document.

  Raises:
    ValueError: nothing of the reply can be used; one line.
  """
  try:
    reply = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise ValueError('the reply is not JSON') from error
  if not isinstance(reply, dict) or not isinstance(reply.get('result'), list):
    raise ValueError('the reply has no list "result"')
  result = reply['result']
  if len(result) != num_queries:
    # Which list belongs to which query is anyone's guess.
    raise ValueError(f'{len(result)} lists for {num_queries} queries')
  return [_parse_list(entry) for entry in result]


def retry_after_seconds(value: str | None) -> float:
  """Seconds a Retry-After header asks to wait; 0 if it is absent or unreadable.

  Args:
    value: seconds, or a date as in RFC 9110.
  """
  if value is None:
    return 0.0
  try:
    seconds = float(value)
  except ValueError:
    try:
      date = email_utils.parsedate_to_datetime(value)
    except ValueError:
      return 0.0
    if date.tzinfo is None:
      date = date.replace(tzinfo=datetime.UTC)
    seconds = (date - datetime.datetime.now(datetime.UTC)).total_seconds()
  return max(seconds, 0.0) if math.isfinite(seconds) else 0.0


def _parse_list(entry: Any) -> list[types.Passage] | None:
  if not isinstance(entry, list):
    return None
  try:
    return [_parse_item(item) for item in entry]
  except ValueError:
    return None


def _parse_item(item: Any) -> types.Passage:
  if not isinstance(item, dict) or 'document' not in item:
    return corpus.passage_of(item)
  if 'score' not in item:
    return corpus.passage_of(item['document'])
  score = item['score']
  if (
    isinstance(score, bool)
    or not isinstance(score, int | float)
    or not math.isfinite(score)
  ):
    raise ValueError('"score" is not a finite number')
  return corpus.passage_of(item['document'], score=float(score))
