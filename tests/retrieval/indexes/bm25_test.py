"""BM25: its equation, the order of results, and queries without any."""

import collections
import math

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.retrieval.indexes import bm25

# After `bm25`, which imports it without jax.
import bm25s  # isort: skip


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


def test_agrees_with_the_equation_and_the_order_of_the_corpus():
  rng = np.random.default_rng(0)
  vocabulary = [f'w{i}' for i in range(40)]
  texts = [
    ' '.join(rng.choice(vocabulary, size=rng.integers(1, 30)))
    for _ in range(80)
  ]
  passages = [types.Passage(str(i), '', text) for i, text in enumerate(texts)]
  index = bm25.Bm25Index(passages, k1=1.2, b=0.6)
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
    assert [p.id for p in found] == [str(n) for n in order]


@pytest.mark.parametrize(
  ('texts', 'query', 'ids'),
  [
    # Ties come in the order of the corpus.
    (['same words'] * 4 + ['same same words'], 'same', '4012'),
    # Title and case count, and no word is too small.
    (['The X\nb', 'Y\nthe THE'], 'x', '0'),
    (['The X\nb', 'Y\nthe THE'], 'B', '0'),
    (['The X\nb', 'Y\nthe THE'], 'the', '10'),
    # A query without a known word finds nothing, nor does any in no words.
    *[(['cat', 'dog'], query, '') for query in ('', 'unknown', '?!', '\ud800')],
    *[(texts, 'cat', '') for texts in ([], [''], ['', '?'])],
    # Fewer than are wanted.
    (['cat', '', 'cat dog'], 'cat', '02'),
  ],
)
def test_what_a_query_finds(texts, query, ids):
  passages = [
    types.Passage(str(i), *text.rpartition('\n')[::2])
    for i, text in enumerate(texts)
  ]
  [found] = bm25.Bm25Index(passages).search([query], 4)
  assert ''.join(p.id for p in found) == ids


def test_bm25s_does_not_find_jax_whose_backend_it_would_start():
  assert not bm25s.selection.JAX_IS_AVAILABLE
