"""Mixtures: their syntax, their filters and their order by index."""

import collections

import pytest

from stppo_jax import types
from stppo_jax.data import mixtures


def _questions(data_set, count, **more):
  return [
    types.Question(f'{n}', f'question {n}', ('x y', 'z'), data_set, **more)
    for n in range(count)
  ]


def test_a_mixture_is_read():
  text = 'nq:train weight=2, a/b.jsonl weight=0.5 limit=7 hops>=2 kind!=mcq'
  filters = (
    mixtures.Filter('hops', '>=', 2),
    mixtures.Filter('kind', '!=', 'mcq'),
  )
  assert mixtures.parse(text) == (
    mixtures.Element('nq', 'train', weight=2.0),
    mixtures.Element('a/b.jsonl', weight=0.5, limit=7, filters=filters),
  )
  assert mixtures.parse('nq') == (mixtures.Element('nq'),)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('nq,', 'the name of a data set is missing'),
    ('nq weight=1, b', "'b' has no weight, but other elements have"),
    ('nq weight=0', 'weight=0: must be a number greater than 0'),
    ('nq limit=0', "'limit=0': must be a whole number, 1 or greater"),
    ('nq hops>=two', "'hops>=two': must be a whole number"),
    ('nq kind>open', 'expected weight=W'),
    ('my file.jsonl', "'file.jsonl': expected weight=W"),
  ],
)
def test_a_text_that_is_no_mixture_is_refused(text, message):
  with pytest.raises(ValueError) as error:
    mixtures.parse(text)
  assert message in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('filters', 'kept'),
  [
    ('hops>=2', ['b', 'c']),
    ('hops<2', ['a']),
    ('kind=mcq', ['c']),
    ('kind=open hops>0', ['b']),
    ('dataset!=a', ['b', 'c']),
    ('gold=1', ['b']),
    ('options>3', ['c']),
    ('answer_words<=1', ['a', 'b', 'c']),
    ('question_words=3', []),
  ],
)
def test_filters_keep_the_questions_for_which_they_hold(filters, kept):
  options = dict(zip('ABCD', 'xyzw'))
  questions = [
    *_questions('a', 1),
    *_questions('b', 1, hops=2, gold_passages=('p',)),
    *_questions('c', 1, kind='choice', hops=4, options=options),
  ]
  (element,) = mixtures.parse(f'name {filters}')
  if kept:
    chosen = element.choose(questions)
    assert [question.data_set for question in chosen] == kept
  else:
    with pytest.raises(ValueError, match='name: no question passes'):
      element.choose(questions)


def test_a_limit_is_a_sample_that_is_always_the_same():
  (element,) = mixtures.parse('a limit=10')
  questions = _questions('a', 100)
  chosen = element.choose(questions)
  assert chosen == element.choose(questions) and len(chosen) == 10
  ids = [int(question.id) for question in chosen]
  assert ids == sorted(ids) and ids != list(range(10))
  assert len(element.choose(questions[:3])) == 3


def test_without_weights_an_epoch_has_every_question_once():
  mixture = mixtures.Mixture([_questions('a', 5), _questions('b', 8)])
  order = mixture.order((3,), 0, 39)
  for epoch in (order[:13], order[13:26], order[26:]):
    assert sorted(epoch) == list(range(13))
  assert order[:13] != order[13:26]
  # Any place can be asked for, in any order.
  assert mixture.order((3,), 20, 9) == order[20:29]
  assert mixture.order((4,), 0, 39) != order
  counted = collections.Counter(mixture[index].data_set for index in order)
  assert counted == {'a': 15, 'b': 24}
  with pytest.raises(IndexError):
    mixture[13]


def test_with_weights_every_block_is_divided_by_them():
  sizes = {'a': 5000, 'b': 30, 'c': 700}
  parts = [_questions(name, size) for name, size in sizes.items()]
  mixture = mixtures.Mixture(parts, weights=[5, 1, 1])
  order = mixture.order((0,), 0, 3000)
  names = [mixture[index].data_set for index in order]
  for block in (names[:1000], names[1000:2000], names[2000:]):
    counted = collections.Counter(block)
    assert counted.total() == 1000
    assert counted['a'] == pytest.approx(5000 / 7, abs=1)
    assert counted['b'] == pytest.approx(1000 / 7, abs=1)
  # Each data set has epochs of its own: none is seen twice before all are.
  for name, size in sizes.items():
    seen = [i for i, n in zip(order, names) if n == name][:size]
    assert len(set(seen)) == len(seen)
  small = [i for i, n in zip(order, names) if n == 'b']
  assert len(set(small[:30])) == 30 and set(small[30:60]) == set(small[:30])
  assert mixture.order((0,), 990, 1020) == order[990:2010]
  with pytest.raises(ValueError, match='less than 1/1000 of the sum'):
    mixtures.Mixture(parts, weights=[5000, 1, 1])
