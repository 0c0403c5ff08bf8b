"""How retrieval servers are asked, and how their answers are read.

`DIALECTS` holds an entry for each protocol; a new one costs an entry, and a
function where neither body nor reader is one of those below. Nothing that a
server sends is trusted.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
from typing import Any

from stppo_jax import types
from stppo_jax.retrieval import corpus

# The passages of each query; None where a query's list is malformed.
Answers = list[list[types.Passage] | None]


@dataclasses.dataclass(frozen=True)
class Dialect:
  """The differences between servers.

  Attributes:
    path: where queries are posted to, below the URL and the corpus.
    body: (queries, topk) -> JSON values of one request.
    read: (reply, number of queries) -> `Answers`; raises ValueError with one
      line where nothing of the reply can be used.
    max_queries: most queries in one request; None = no bound.
    health_path: a get is answered with 200 once the server is ready. Servers
      without it (404, 405) are ready as soon as they answer at all.
  """

  path: str
  body: Callable[[Sequence[str], int], dict[str, Any]]
  read: Callable[[bytes, int], Answers]
  max_queries: int | None = None
  health_path: str = '/health'


def _search_r1_body(queries: Sequence[str], topk: int) -> dict[str, Any]:
  # The original server fails on return_scores: false.
  return {'queries': list(queries), 'topk': topk, 'return_scores': True}


def _skyrl_body(queries: Sequence[str], topk: int) -> dict[str, Any]:
  (query,) = queries
  return {'query': query, 'topk': topk, 'return_scores': True}


def _read_result(reply: bytes, num_queries: int) -> Answers:
  """Reads `{"result": [[passage, ...], ...]}`, a list for each query.

  A passage is `{"document": {...}, "score": 0.8}` or the bare document.
  """
  try:
    fields = json.loads(reply)
  except (ValueError, RecursionError) as error:
    raise ValueError('the reply is not JSON') from error
  if not isinstance(fields, dict) or not isinstance(fields.get('result'), list):
    raise ValueError('the reply has no list "result"')
  result = fields['result']
  if len(result) != num_queries:
    # Which list belongs to which query is anyone's guess.
    raise ValueError(f'{len(result)} lists for {num_queries} queries')
  return [_read_list(entry) for entry in result]


def _read_list(entry: Any) -> list[types.Passage] | None:
  if not isinstance(entry, list):
    return None
  try:
    return [_read_passage(item) for item in entry]
  except ValueError:
    return None


def _read_passage(item: Any) -> types.Passage:
  if not isinstance(item, dict) or 'document' not in item:
    return corpus.passage_of(item)
  if 'score' not in item:
    return corpus.passage_of(item['document'])
  score = item['score']
  if isinstance(score, bool) or not isinstance(score, int | float):
    raise ValueError('"score" is not a number')
  try:
    score = float(score)
  except OverflowError as error:  # JSON has integers of any length.
    raise ValueError('"score" is too large') from error
  if not math.isfinite(score):
    raise ValueError('"score" is not finite')
  return corpus.passage_of(item['document'], score=score)


_SEARCH_R1 = Dialect(path='/retrieve', body=_search_r1_body, read=_read_result)
DIALECTS: Mapping[str, Dialect] = {
  # Search-R1, verl, and our own server.
  'search_r1': _SEARCH_R1,
  # SkyRL, verl-agent: one query per request.
  'skyrl': dataclasses.replace(_SEARCH_R1, body=_skyrl_body, max_queries=1),
}
