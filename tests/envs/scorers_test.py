"""Scores against the public definitions, on some two thousand pairs.

The twins follow the evaluation of SQuAD 1.1 and the scorers of Search-R1 word
for word: lower case, then no ASCII punctuation, then no articles, then single
spaces. They are written character by character, unlike ours.
"""

import collections
import itertools
import random
import string

import pytest

from stppo_jax import text as text_lib
from stppo_jax.envs import rewards


def _normal(text):
  kept = ''.join(c for c in text.lower() if c not in set(string.punctuation))
  words, word = [], ''
  for char in f'{kept} ':
    # An article stands between characters that are no word characters.
    if char.isalnum() or char == '_':
      word += char
      continue
    words.append('' if word in ('a', 'an', 'the') else word)
    words.append(' ' if char.isspace() else char)
    word = ''
  # An article becomes a space: what stands around it is not joined.
  return ' '.join(''.join(w if w else ' ' for w in words).split())


def _exact(answer, golden):
  return any(_normal(answer) == _normal(g) for g in golden)


def _substring(answer, golden):
  return any(_normal(g) in _normal(answer) for g in golden)


def _f1(answer, golden):
  best = 0.0
  for g in golden:
    ours, theirs = _normal(answer).split(), _normal(g).split()
    same = sum(
      (collections.Counter(ours) & collections.Counter(theirs)).values()
    )
    if same:
      precision, recall = same / len(ours), same / len(theirs)
      best = max(best, 2 * precision * recall / (precision + recall))
  return best


_TEXTS = (
  *('The Beatles', 'beatles', 'the  beatles!', 'A Day in the Life'),
  *('day in life', "Rock 'n' Roll", 'rock-n-roll', 'U.S.A.', 'usa'),
  *('an apple, a day', 'Theatre', 'anthem', '1,000', '1000', '3.14', '314'),
  *('July 4, 1776', '4 July 1776', '$5 million', '5 million'),
  *('Beyoncé', 'beyoncé', 'Beyonce', '“quoted”', 'quoted', 'naïve café'),
  *('東京', 'the 東京', 'Zürich\u00a0(city)', 'zürich city', 'ß', 'SS'),
  *('_under_score_', 'underscore', "king's", 'kings', 'a-b', 'ab'),
  *('x / y', 'x y', 'new new york city', 'new york state', 'york'),
)


def _agrees(answer, golden):
  assert text_lib.normalise(answer) == _normal(answer)
  assert rewards.exact_match(answer, golden) == _exact(answer, golden)
  assert rewards.token_f1(answer, golden) == pytest.approx(_f1(answer, golden))
  assert rewards.substring_match(answer, golden) == _substring(answer, golden)


def test_scores_equal_the_public_definitions():
  pairs = list(itertools.product(_TEXTS, _TEXTS))
  for answer, golden in pairs:
    _agrees(answer, [golden])
  found = [_exact(a, [g]) for a, g in pairs if a != g]
  assert 20 < sum(found) < 100  # neither of the two is rare
  draw = random.Random(0)
  for _ in range(300):
    _agrees(draw.choice(_TEXTS), draw.choices(_TEXTS, k=draw.randint(2, 5)))


@pytest.mark.parametrize(
  ('answer', 'golden', 'score'),
  [
    *[(answer, 'The', 0.0) for answer in ('', 'a', 'Oslo')],
    *[('the', 'The', 1.0), ('-', '+', 0.0), ('+', '+', 1.0)],
  ],
)
def test_where_nothing_of_a_golden_answer_is_compared_ours_differs(
  answer, golden, score
):
  for score_of in (
    rewards.exact_match,
    rewards.substring_match,
    rewards.token_f1,
  ):
    assert score_of(answer, [golden]) == score
    assert score_of(answer, []) == 0.0
  # Every text contains the empty one: to Search-R1, "The" is in all answers.
  assert _substring(answer, [golden])
