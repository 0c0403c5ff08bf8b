"""Rewards by hand; `scorers_test.py` has a twin of those of free text."""

import pytest

from stppo_jax.envs import rewards

_OPTIONS = {'A': 'Nasal cannula', 'B': 'Venturi mask', 'C': '<5', 'D': '>5'}


@pytest.mark.parametrize(
  ('letters', 'answers'),
  [
    ('B', ['B', ' (b) ', 'B.', 'Option B', 'B) Venturi mask']),
    ('B', ['b: the venturi  MASK.', 'Venturi mask', 'the Venturi mask.']),
    # The first is a letter and the text of another one.
    ('', ['B) Nasal cannula', 'E', 'Bag', '', '!']),
    ('C', ['<5']),
    ('CD', ['> 5']),  # normalised, both are "5"
  ],
)
def test_the_options_that_an_answer_means(letters, answers):
  for answer in answers:
    assert rewards.choose(answer, _OPTIONS) == frozenset(letters), answer


@pytest.mark.parametrize(
  ('answer', 'golden', 'accuracy'),
  [
    ('B', ['Venturi mask'], 1),
    ('Venturi mask', ['B'], 1),
    ('A', ['Venturi mask'], 0),
    ('A', ['A', 'B'], 1),
    ('>5', ['<5'], 0),
    ('> 5', ['<5'], 0),  # either of two is not an answer
    ('nothing', ['B'], 0),
    ('B', ['unknown'], 0),
    # An option whose text is a letter: the golden text "K" is option E.
    ('E', ['K'], 1),
    ('E. K', ['K'], 1),
    ('K', ['K'], 0),
  ],
)
def test_choice_accuracy_by_hand(answer, golden, accuracy):
  options = _OPTIONS | {'E': 'K', 'K': 'D'}
  assert rewards.choice_accuracy(answer, options, golden) == accuracy


_SEARCH = '<think>a</think><search>b</search>'
_ANSWER = '<think>c</think><answer>d</answer>'


@pytest.mark.parametrize(
  ('texts', 'reward'),
  [
    ([_ANSWER], 1),
    ([_SEARCH, _SEARCH, _ANSWER], 1),
    ([_SEARCH, _ANSWER + '<|im_end|>\n<|endoftext|>'], 1),
    (['so <think>a</think> hm ' + _ANSWER], 1),
    (['<answer>d</answer>'], 1),
    ([], 0),
    ([_SEARCH], 0),
    ([_ANSWER, _SEARCH], 0),
    (['nothing', _ANSWER], 0),
    (['<think>a' + _ANSWER], 0),
    (['a</think><answer>d</answer>'], 0),
    (['<answer>d</answer> and more'], 0),
    (['<answer>d</answer>' * 2], 0),
    (['<answer><think>a</think></answer>'], 0),
    (['<information>x</information>' + _ANSWER], 0),
    (['<think><search>b</search></think>' + _ANSWER], 0),
    (['<search></search>', _ANSWER], 0),
    ([_SEARCH + _ANSWER], 0),
  ],
)
def test_format_reward_by_hand(texts, reward):
  assert rewards.format_reward(texts) == reward


_ONE = 'e.g. <answer> Oslo </answer>. Question: q'
_TWO = 'inside <answer> and </answer>, ' + _ONE


@pytest.mark.parametrize(
  ('prompt', 'texts', 'response', 'search_r1'),
  [
    (_ONE, [_SEARCH, _ANSWER], 'd', 'd'),
    # The three faults of the original.
    ('', [_SEARCH, _ANSWER], 'd', None),
    (_ONE, ['nothing'], None, None),
    (_TWO, ['nothing'], None, 'Oslo'),
    ('', ['<answer>x', '</answer><answer>y</answer>'], 'y', 'y'),
    (_ONE, [], None, None),
    (_ONE, [_SEARCH], None, None),
    # A turn that searches before it answers has searched.
    (_ONE, [_SEARCH + _ANSWER], None, 'd'),
  ],
)
def test_the_answer_in_each_scope(prompt, texts, response, search_r1):
  assert rewards.SCOPES['response'](prompt, texts) == response
  assert rewards.SCOPES['search_r1'](prompt, texts) == search_r1
