"""The requests to retrieval servers, and how their replies are read.

`DIALECTS` has an entry for each protocol. A new protocol needs an entry, and a
function if its requests or its replies are like none of those below. The types
of a reply's fields are checked here; `replies.clean` bounds their values.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

from stppo_jax import types
from stppo_jax.retrieval import corpus
from stppo_jax.retrieval import replies


@dataclasses.dataclass(frozen=True)
class Dialect:
  """The differences between servers.

  Attributes:
    path: the path to which queries are posted, below the URL and the corpus.
    body: (queries, topk) -> JSON values of one request.
    read: (reply, number of queries) -> `replies.Answers`; raises ValueError
      with one line if nothing in the reply can be used.
    max_queries: the most queries in one request; None = no bound.
    health_path: the path that answers a GET with 200 when the server is ready.
      A server without it (404, 405) is ready as soon as it answers at all.
  """

  path: str
  body: Callable[[Sequence[str], int], dict[str, Any]]
  read: Callable[[bytes, int], replies.Answers]
  max_queries: int | None = None
  health_path: str = '/health'


def _search_r1_body(queries: Sequence[str], topk: int) -> dict[str, Any]:
  # The original server fails on return_scores: false.
  return {'queries': list(queries), 'topk': topk, 'return_scores': True}


def _skyrl_body(queries: Sequence[str], topk: int) -> dict[str, Any]:
  (query,) = queries
  return {'query': query, 'topk': topk, 'return_scores': True}


def _read_result(reply: bytes, num_queries: int) -> replies.Answers:
  """Reads `{"result": [[passage, ...], ...]}`, a list for each query.

  A passage is `{"document": {...}, "score": 0.8}` or the bare document.
  """
  fields = replies.load(reply)
  if not isinstance(fields, dict) or not isinstance(fields.get('result'), list):
    raise ValueError('the reply has no list "result"')
  result = fields['result']
  if len(result) != num_queries:
    # It is not known which list belongs to which query.
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
  if score != score:
    raise ValueError('"score" is nan')
  return corpus.passage_of(item['document'], score=score)


_SEARCH_R1 = Dialect(path='/retrieve', body=_search_r1_body, read=_read_result)
DIALECTS: Mapping[str, Dialect] = {
  # Search-R1, verl, and our own server.
  'search_r1': _SEARCH_R1,
  # SkyRL, verl-agent: one query per request.
  'skyrl': dataclasses.replace(_SEARCH_R1, body=_skyrl_body, max_queries=1),
}
SERVED = 'search_r1'  # the dialect of `server`, which a run can embed
