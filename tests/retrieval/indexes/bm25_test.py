"""BM25: scores by hand, the order of results, and queries without any."""

import collections
import math
import subprocess
import sys

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.data import passages as passages_lib
from stppo_jax.retrieval.indexes import bm25
from tests.retrieval import real_data

# After `bm25`, which imports it without jax.
import bm25s  # isort: skip


def _passages(*texts):
  return [types.Passage(str(i), '', text) for i, text in enumerate(texts)]


def _ids(passages):
  return [passage.id for passage in passages]


def _reference(texts, query, k1, b):
  """Returns the scores by the equation of the docstring."""
  documents = [bm25.words_of(text) for text in texts]
  mean_length = sum(map(len, documents)) / len(documents)
  scores = []
  for words in documents:
    counts, score = collections.Counter(words), 0.0
    for word in dict.fromkeys(bm25.words_of(query)):
      df = sum(word in other for other in documents)
      idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
      tf = counts[word]
      norm = k1 * (1 - b + b * len(words) / mean_length)
      score += idf * tf / (tf + norm) if tf else 0.0
    scores.append(score)
  return scores


def test_one_score_by_hand():
  # Two passages of two words: lengths equal their mean; "cat" is in one.
  index = bm25.Bm25Index(_passages('cat sat', 'dog ran'), k1=0.9, b=0.4)
  [[passage]] = index.search(['cat'], 5)
  assert passage.id == '0'
  assert passage.score == pytest.approx(math.log(2.0) / 1.9, rel=1e-6)


def test_agrees_with_the_equation_and_the_order_of_the_corpus():
  rng = np.random.default_rng(0)
  vocabulary = [f'w{i}' for i in range(40)]
  texts = [
    ' '.join(rng.choice(vocabulary, size=rng.integers(1, 30)))
    for _ in range(80)
  ]
  index = bm25.Bm25Index(_passages(*texts), k1=1.2, b=0.6)
  for _ in range(20):
    query = ' '.join(rng.choice(vocabulary, size=4))
    query = f'{query} {query[:3]}'  # A word that is there twice counts once.
    expected = _reference(texts, query, 1.2, 0.6)
    order = sorted(
      (n for n in range(80) if expected[n] > 0),
      key=lambda n: (-round(expected[n], 5), n),
    )[:7]
    [found] = index.search([query], 7)
    np.testing.assert_allclose(
      [p.score for p in found], [expected[n] for n in order], rtol=1e-5
    )
    assert _ids(found) == [str(n) for n in order]


def test_ties_come_in_the_order_of_the_corpus():
  index = bm25.Bm25Index(_passages(*['same words'] * 9, 'same same words'))
  [found] = index.search(['same'], 4)
  assert _ids(found) == ['9', '0', '1', '2']


def test_title_and_case_count_and_no_word_is_too_small():
  index = bm25.Bm25Index(
    [
      types.Passage('a', 'The X', 'b'),
      types.Passage('b', 'Y', 'the THE'),
    ]
  )
  first, second, third = index.search(['x', 'the', 'B'], 3)
  assert _ids(first) == ['a']
  assert _ids(second) == ['b', 'a']
  assert _ids(third) == ['a']


@pytest.mark.parametrize('query', ['', 'unknown', '?!', '\ud800'])
def test_a_query_without_a_known_word_finds_nothing(query):
  assert bm25.Bm25Index(_passages('cat', 'dog')).search([query], 3) == [[]]


@pytest.mark.parametrize('texts', [(), ('',), ('', '?')])
def test_a_corpus_without_words_finds_nothing(texts):
  assert bm25.Bm25Index(_passages(*texts)).search(['cat'], 3) == [[]]


def test_topk_beyond_the_corpus():
  index = bm25.Bm25Index(_passages('cat', '', 'cat dog'))
  assert _ids(index.search(['cat'], 50)[0]) == ['0', '2']


def test_importing_it_does_not_import_jax():
  script = (
    'import sys, stppo_jax.retrieval.indexes.bm25\n'
    'assert not [m for m in sys.modules if m.split(".")[0] == "jax"]\n'
  )
  subprocess.run([sys.executable, '-c', script], check=True, timeout=60)


def test_the_ranking_is_that_of_bm25s_called_directly():
  passages = passages_lib.read_corpus(real_data.SHIPPED / 'corpus.jsonl')
  index = bm25.Bm25Index(passages)
  rows = real_data.questions(real_data.SHIPPED / 'questions.jsonl')
  texts = [bm25.words_of(f'{p.title}\n{p.text}') for p in passages]
  direct = bm25s.BM25(k1=0.9, b=0.4, backend='numpy')
  direct.index(texts, show_progress=False)
  for row in rows:
    words = dict.fromkeys(bm25.words_of(row['question']))
    scores_P = direct.get_scores([w for w in words if w in direct.vocab_dict])
    order = np.argsort(-scores_P, kind='stable')[:10]
    [found] = index.search([row['question']], 10)
    assert _ids(found) == [passages[n].id for n in order]
    np.testing.assert_allclose(
      [p.score for p in found], scores_P[order], rtol=1e-6
    )
