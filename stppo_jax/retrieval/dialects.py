"""The protocols of retrieval servers: their requests and their replies.

`DIALECTS` has an entry for each protocol, which the client and the server use.
A new protocol needs an entry, and two functions if its replies differ from all
of those below. The types of a reply's fields are checked here; `replies.clean`
bounds their values.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

from stppo_jax import types
from stppo_jax.data import passages as passages_lib
from stppo_jax.retrieval import replies

Passages = Sequence[types.Passage]
# The passages of each query. None stands for a query without an answer, which
# only dialects with several queries per request have.
Lists = Sequence[Passages | None]


@dataclasses.dataclass(frozen=True)
class Dialect:
  """The protocol of a server, as far as servers differ.

  Attributes:
    path: the path to which queries are posted, below the URL and the corpus.
    queries: the field of a request that holds its queries.
    topk: the field that holds the number of passages per query.
    read: takes the reply and the number of queries, and returns
      `replies.Answers`; raises ValueError with one line if nothing in the reply
      can be used.
    write: takes the passages of each query and whether scores are wanted, and
      returns the JSON values of a reply.
    one_query: whether a request has a single query as a string, and no list.
    scores: the field that says whether scores are wanted; '' = there is none.
    health_path: the path that answers a GET with 200 when the server is ready.
      A server without it (404, 405) is ready as soon as it answers at all.
  """

  path: str
  queries: str
  topk: str
  read: Callable[[bytes, int], replies.Answers]
  write: Callable[[Lists, bool], Any]
  one_query: bool = False
  scores: str = ''
  health_path: str = '/health'

  def body(self, queries: Sequence[str], topk: int) -> dict[str, Any]:
    """Returns the JSON values of one request."""
    if self.one_query:
      (query,) = queries
      body: dict[str, Any] = {self.queries: query, self.topk: topk}
    else:
      body = {self.queries: list(queries), self.topk: topk}
    # Scores are always asked for, because the server of Search-R1 fails on
    # return_scores: false.
    return body | ({self.scores: True} if self.scores else {})


def _read_result(reply: bytes, num_queries: int) -> replies.Answers:
  """Reads `{"result": [[passage, ...], ...]}`, a list for each query.

  A passage is `{"document": {...}, "score": 0.8}` or the bare document.
  """
  return _lists(replies.load(reply), 'result', num_queries, _read_passage)


def _read_results(reply: bytes, num_queries: int) -> replies.Answers:
  """Reads `{"results": [{"id", "content", "score"}, ...]}` of one query."""
  fields = replies.load(reply)
  if not isinstance(fields, dict) or not isinstance(
    fields.get('results'), list
  ):
    raise ValueError('the reply has no list "results"')
  return _one_list(fields['results'], num_queries, _read_content)


def _read_texts(reply: bytes, num_queries: int) -> replies.Answers:
  """Reads `[{"text"}, ...]` of one query."""
  items = replies.load(reply)
  if not isinstance(items, list):
    raise ValueError('the reply is no list')
  return _one_list(items, num_queries, _read_text)


def _read_answers(reply: bytes, num_queries: int) -> replies.Answers:
  """Reads `{"answers": [[text, ...], ...]}`, a list for each query."""
  return _lists(replies.load(reply), 'answers', num_queries, _read_contents)


def _lists(
  fields: Any, name: str, num_queries: int, read: Callable[[Any], types.Passage]
) -> replies.Answers:
  if not isinstance(fields, dict) or not isinstance(fields.get(name), list):
    raise ValueError(f'the reply has no list "{name}"')
  lists = fields[name]
  if len(lists) != num_queries:
    # Nothing says which list belongs to which query.
    raise ValueError(f'{len(lists)} lists for {num_queries} queries')
  return [_read_list(entry, read) for entry in lists]


def _one_list(
  items: list, num_queries: int, read: Callable[[Any], types.Passage]
) -> replies.Answers:
  if num_queries != 1:
    raise ValueError(f'one list for {num_queries} queries')
  return [_read_list(items, read)]


def _read_list(
  entry: Any, read: Callable[[Any], types.Passage]
) -> list[types.Passage] | None:
  if not isinstance(entry, list):
    return None
  try:
    return [read(item) for item in entry]
  except ValueError:
    return None


def _read_passage(item: Any) -> types.Passage:
  if not isinstance(item, dict) or 'document' not in item:
    return passages_lib.passage_of(item)
  if 'score' not in item:
    return passages_lib.passage_of(item['document'])
  return passages_lib.passage_of(item['document'], score=_score(item['score']))


def _read_content(item: Any) -> types.Passage:
  if not isinstance(item, dict) or 'content' not in item:
    raise ValueError('no "content"')
  document = {'id': item.get('id', ''), 'contents': item['content']}
  return passages_lib.passage_of(document, score=_score(item.get('score', 0.0)))


def _read_text(item: Any) -> types.Passage:
  if not isinstance(item, dict) or 'text' not in item:
    raise ValueError('no "text"')
  return _read_contents(item['text'])


def _read_contents(contents: Any) -> types.Passage:
  return passages_lib.passage_of({'contents': contents})


def _score(score: Any) -> float:
  if isinstance(score, bool) or not isinstance(score, int | float):
    raise ValueError('"score" is not a number')
  if score != score:
    raise ValueError('"score" is nan')
  return score


def _write_result(lists: Lists, scores: bool) -> dict[str, Any]:
  if not scores:
    return {'result': _written(lists, passages_lib.document_of)}
  write = lambda p: {'document': passages_lib.document_of(p), 'score': p.score}
  return {'result': _written(lists, write)}


def _write_results(lists: Lists, scores: bool) -> dict[str, Any]:
  del scores
  (passages,) = lists
  assert passages is not None
  return {
    'results': [
      {'id': p.id, 'content': _contents(p), 'score': p.score} for p in passages
    ]
  }


def _write_texts(lists: Lists, scores: bool) -> list[Any]:
  del scores
  (passages,) = lists
  assert passages is not None
  return [{'text': _contents(p)} for p in passages]


def _write_answers(lists: Lists, scores: bool) -> dict[str, Any]:
  del scores
  return {'answers': _written(lists, _contents)}


def _written(lists: Lists, write: Callable[[types.Passage], Any]) -> list[Any]:
  return [
    None if passages is None else [write(p) for p in passages]
    for passages in lists
  ]


def _contents(passage: types.Passage) -> str:
  return passages_lib.document_of(passage)['contents']


_SEARCH_R1 = Dialect(
  path='/retrieve',
  queries='queries',
  topk='topk',
  scores='return_scores',
  read=_read_result,
  write=_write_result,
)
_RLLM = Dialect(
  path='/retrieve',
  queries='query',
  one_query=True,
  topk='top_k',
  read=_read_results,
  write=_write_results,
)
DIALECTS: Mapping[str, Dialect] = {
  # Search-R1, verl, and our own server.
  'search_r1': _SEARCH_R1,
  # SkyRL, verl-agent: one query per request.
  'skyrl': dataclasses.replace(_SEARCH_R1, queries='query', one_query=True),
  # rLLM, RAGEN.
  'rllm': _RLLM,
  # ZeroSearch: the requests of rLLM, other replies.
  'zerosearch': dataclasses.replace(
    _RLLM, read=_read_texts, write=_write_texts
  ),
  # R1-Searcher.
  'r1_searcher': Dialect(
    path='/queries',
    queries='queries',
    topk='k',
    read=_read_answers,
    write=_write_answers,
  ),
}
SERVED = 'search_r1'  # the dialect of a server that a run embeds
