"""The memory of answers that a client keeps."""

from stppo_jax import types
from stppo_jax.retrieval import answer_cache


def _passages(size):
  return (types.Passage('1', 'title', size * 'x'),)


def test_an_answer_that_is_replaced_counts_once():
  cache = answer_cache.AnswerCache(max_bytes=10_000)
  for size in (4000, 4000, 100):
    cache.keep(('', 'a'), _passages(size))
  cache.keep(('', 'b'), _passages(4000))
  assert cache.find(('', 'a')) == _passages(100)
  assert cache.find(('', 'b')) == _passages(4000)


def test_an_answer_that_is_too_large_is_not_kept():
  cache = answer_cache.AnswerCache(max_bytes=1000)
  for _ in range(3):
    cache.keep(('', 'a'), _passages(4000))
    assert cache.find(('', 'a')) is None
