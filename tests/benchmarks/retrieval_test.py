"""A small version of each part of the benchmark of retrieval."""

import re

from benchmarks import retrieval


def test_every_part_prints_its_figure(capsys):
  retrieval.main(
    [
      '--passages=300',
      '--large=400',
      '--queries=40',
      '--workers=1',
      '--repeats=7',
      '--only',
      'search',
      'index',
    ]
  )
  output = capsys.readouterr().out
  assert 'BM25 over 300 passages' in output
  assert re.search(r'bm25s / ours: \d', output)
  assert re.search(r'index: 400 passages in [\d.]+ s', output)
  assert 'http' not in output


def test_queries_are_words_of_passages():
  passages = retrieval.random_passages(20, seed=0)
  assert passages == retrieval.random_passages(20, seed=0)
  queries = retrieval.random_queries(passages, 5, seed=0)
  texts = [set(passage.text.split()) for passage in passages]
  assert len(queries) == 5
  assert all(any({*q.split()} <= words for words in texts) for q in queries)
