"""Rewards: every number here was worked out by hand."""

import pytest

from stppo_jax import text as text_lib
from stppo_jax.envs import rewards


@pytest.mark.parametrize(
  ('text', 'normal'),
  [
    ('The  Cat,\nsat!', 'cat sat'),
    ('A.B. the-end', 'ab theend'),  # punctuation goes first, then articles
    ("An apple a day's", 'apple days'),
    ('theatre another', 'theatre another'),
    ('“naïve” café', '“naïve” café'),  # only ASCII punctuation
    ('The', 'the'),  # rather than nothing
    ('', ''),
  ],
)
def test_normalised_text_by_hand(text, normal):
  assert text_lib.normalise(text) == normal


@pytest.mark.parametrize(
  ('answer', 'golden', 'em', 'substring', 'f1'),
  [
    ('The Beatles!', ['beatles'], 1, 1, 1),
    ('Beatles', ['Stones', 'the beatles'], 1, 1, 1),
    ('the band Beatles', ['Beatles'], 0, 1, 2 / 3),
    # Common: "new" once, "york"; 2 * 2 / (4 + 3).
    ('new new york city', ['new york state'], 0, 0, 4 / 7),
    ('york', ['new york'], 0, 0, 2 / 3),
    ('', ['x'], 0, 0, 0),
    ('cat', ['The'], 0, 0, 0),
    ('a', ['The'], 0, 0, 0),
    ('x', [], 0, 0, 0),
    ('14', ['14 July', '14 14'], 0, 0, 2 / 3),
  ],
)
def test_scores_of_free_text_by_hand(answer, golden, em, substring, f1):
  assert rewards.exact_match(answer, golden) == em
  assert rewards.substring_match(answer, golden) == substring
  assert rewards.token_f1(answer, golden) == pytest.approx(f1)


_OPTIONS = {'A': 'Nasal cannula', 'B': 'Venturi mask', 'C': '<5', 'D': '>5'}


@pytest.mark.parametrize(
  ('answer', 'letters'),
  [
    ('B', 'B'),
    (' (b) ', 'B'),
    ('B.', 'B'),
    ('Option B', 'B'),
    ('B) Venturi mask', 'B'),
    ('b: the venturi  MASK.', 'B'),
    ('Venturi mask', 'B'),
    ('the Venturi mask.', 'B'),
    ('B) Nasal cannula', ''),  # letter and text disagree
    ('E', ''),
    ('Bag', ''),
    ('', ''),
    ('!', ''),
    ('<5', 'C'),
    ('> 5', 'CD'),  # normalised, both are "5"
  ],
)
def test_the_options_that_an_answer_means(answer, letters):
  assert rewards.choose(answer, _OPTIONS) == frozenset(letters)


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
  ],
)
def test_choice_accuracy_by_hand(answer, golden, accuracy):
  assert rewards.choice_accuracy(answer, _OPTIONS, golden) == accuracy


def test_an_option_named_like_a_letter():
  vitamins = {'A': 'D', 'B': 'A', 'C': 'K'}
  # The golden text is "A", which is option B.
  assert rewards.choice_accuracy('B', vitamins, ['A']) == 1
  assert rewards.choice_accuracy('B. A', vitamins, ['A']) == 1
  assert rewards.choice_accuracy('A', vitamins, ['A']) == 0


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
    ([''], 0),
    ([_SEARCH], 0),
    ([_ANSWER, _SEARCH], 0),
    ([_ANSWER, _ANSWER], 0),
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


def test_searches_are_counted_by_turn():
  assert rewards.count_searches([_SEARCH, 'x', _SEARCH, _ANSWER]) == 2
  assert rewards.count_searches([]) == 0


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
