"""The protocols of retrieval servers: their requests and their replies.

`DIALECTS` has a `Dialect` for each protocol; both the client and the server use
it. A new protocol needs a new `Dialect`. If the passages in its replies have a
new form, the protocol also needs a function that reads a passage and a function
that writes a passage. This module checks the types of a reply's fields, and
`replies.clean` bounds their values.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from stppo_jax import types
from stppo_jax.data import passages as passages_lib
from stppo_jax.retrieval import replies


@dataclasses.dataclass(frozen=True)
class Dialect:
  """Describes a protocol by the features in which servers differ.

  A reply has a list of passages for each query, or only the list of the single
  query of its request.

  Attributes:
    path: the path to which queries are posted, below the URL and the corpus.
    queries: the field of a request that holds its queries.
    topk: the field of a request that holds the number of passages per query.
    passages: the field of a reply that holds the lists of passages; '' if the
      reply itself is the list.
    read_passage: takes the JSON values of a passage in a reply, and returns the
      passage; raises ValueError if the values cannot be used.
    write_passage: takes a passage and whether scores are wanted, and returns
      the JSON values of the passage in a reply.
    one_query: whether a request has a single query, as a string and not as a
      list.
    one_list: whether a reply has a single list of passages, and not a list for
      each query.
    scores: the field of a request that says whether scores are wanted; '' if
      requests have no such field.
  """

  path: str
  queries: str
  topk: str
  passages: str
  read_passage: Callable[[Any], types.Passage]
  write_passage: Callable[[types.Passage, bool], Any]
  one_query: bool = False
  one_list: bool = False
  scores: str = ''

  def path_of(self, corpus: str) -> str:
    """Returns the path below the URL to which queries are posted."""
    return (f'/{corpus}' if corpus else '') + self.path

  def body(self, queries: Sequence[str], topk: int) -> dict[str, Any]:
    """Returns the JSON values of one request."""
    asked: Any = list(queries)
    if self.one_query:
      (asked,) = queries
    # Scores are always asked for, because the server of Search-R1 fails on
    # return_scores: false.
    scores = {self.scores: True} if self.scores else {}
    return {self.queries: asked, self.topk: topk, **scores}

  def read(self, reply: bytes, num_queries: int) -> replies.Answers:
    """Returns the passages of each query; None in place of a malformed list.

    Raises:
      ValueError: if nothing in the reply can be used; the message is one line.
    """
    values, place = replies.load(reply), 'is not a list'
    if self.passages:
      values = values.get(self.passages) if isinstance(values, dict) else None
      place = f'has no list "{self.passages}"'
    if not isinstance(values, list):
      raise ValueError(f'the reply {place}')
    lists = [values] if self.one_list else values
    if len(lists) != num_queries:
      # It is unknown which list belongs to which query.
      raise ValueError(f'{len(lists)} lists for {num_queries} queries')
    return [self._read_list(entry) for entry in lists]

  def _read_list(self, entry: Any) -> list[types.Passage] | None:
    try:
      if isinstance(entry, list):
        return [self.read_passage(item) for item in entry]
    except ValueError:
      pass
    return None

  def write(
    self, lists: Sequence[Sequence[types.Passage]], scores: bool
  ) -> Any:
    """Returns the JSON values of a reply.

    Args:
      lists: the passages of each query.
      scores: whether scores are wanted.
    """
    written: Any = [
      [self.write_passage(p, scores) for p in passages] for passages in lists
    ]
    if self.one_list:
      (written,) = written
    return {self.passages: written} if self.passages else written


def _read_passage(item: Any) -> types.Passage:
  """Reads `{"document": {...}, "score": 0.8}`, or a bare document."""
  if not isinstance(item, dict) or 'document' not in item:
    return passages_lib.passage_of(item)
  score = _score(item.get('score', 0.0))
  return passages_lib.passage_of(item['document'], score=score)


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


def _write_passage(passage: types.Passage, scores: bool) -> dict[str, Any]:
  document = passages_lib.document_of(passage)
  return {'document': document, 'score': passage.score} if scores else document


def _write_content(passage: types.Passage, scores: bool) -> dict[str, Any]:
  contents = _write_contents(passage, scores)
  return {'id': passage.id, 'content': contents, 'score': passage.score}


def _write_text(passage: types.Passage, scores: bool) -> dict[str, Any]:
  return {'text': _write_contents(passage, scores)}


def _write_contents(passage: types.Passage, scores: bool) -> str:
  del scores
  return passages_lib.document_of(passage)['contents']


_SEARCH_R1 = Dialect(
  path='/retrieve',
  queries='queries',
  topk='topk',
  scores='return_scores',
  passages='result',
  read_passage=_read_passage,
  write_passage=_write_passage,
)
_RLLM = Dialect(
  path='/retrieve',
  queries='query',
  one_query=True,
  topk='top_k',
  passages='results',
  one_list=True,
  read_passage=_read_content,
  write_passage=_write_content,
)
DIALECTS: Mapping[str, Dialect] = {
  # Search-R1, verl, and our own server.
  'search_r1': _SEARCH_R1,
  # SkyRL, verl-agent: one query per request.
  'skyrl': dataclasses.replace(_SEARCH_R1, queries='query', one_query=True),
  # rLLM, RAGEN.
  'rllm': _RLLM,
  # ZeroSearch: the same requests as rLLM, but other replies.
  'zerosearch': dataclasses.replace(
    _RLLM, passages='', read_passage=_read_text, write_passage=_write_text
  ),
  # R1-Searcher.
  'r1_searcher': Dialect(
    path='/queries',
    queries='queries',
    topk='k',
    passages='answers',
    read_passage=_read_contents,
    write_passage=_write_contents,
  ),
}
SERVED = 'search_r1'  # the dialect of a server that a run embeds
