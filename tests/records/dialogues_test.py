"""Dialogues on a terminal: marked by role, and without control characters."""

import re

import pytest

from stppo_jax import streams
from stppo_jax.records import dialogues

_RECORD = {
  'question': 'Where was Ada born?',
  'golden_answers': ['London', 'London, England'],
  'prompt': 'Answer the question.\nWhere was Ada born?',
  'turns': [
    {
      'text': '<search>Ada</search>',
      'observation': '\n\n<information>Doc 1</information>\n\n',
      'action': 'search',
    },
    {
      'text': '<answer>London</answer>',
      'observation': '',
      'action': 'answer',
    },
  ],
  'rewards': {'exact_match': 1.0, 'f1': 0.0, 'format': 0.1},
  'scores': {'em': 1.0, 'f1': 0.5},
  'status': 'completed',
}


def test_a_dialogue_line_by_line():
  assert dialogues.render(_RECORD, colour=False).splitlines() == [
    '? Where was Ada born?',
    '? golden: London | London, England',
    '. Answer the question.',
    '. Where was Ada born?',
    '> <search>Ada</search>',
    '> [search]',
    '< <information>Doc 1</information>',
    '> <answer>London</answer>',
    '> [answer]',
    '= completed: em 1, f1 0.5; reward 1.1 (exact_match 1, format 0.1)',
  ]


def test_a_penalty_of_nothing_has_no_sign():
  rewards = {'exact_match': 0.0, 'search_penalty': -0.0}
  text = dialogues.render(_RECORD | {'rewards': rewards}, colour=False)
  last = '= completed: em 1, f1 0.5; reward 0'
  assert text.splitlines()[-1] == last


def test_colour_only_adds_colour():
  coloured = dialogues.render(_RECORD, colour=True)
  assert '\x1b[36m> <answer>London</answer>\x1b[0m' in coloured
  plain = re.sub(r'\x1b\[[0-9;]*m', '', coloured)
  assert plain == dialogues.render(_RECORD, colour=False)


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('a\x1b[2Jb', 'a\\x1b[2Jb'),
    ('a\rb\x08c\x7f\x9b', 'a\\rb\\x08c\\x7f\\x9b'),
    ('pay \u202eevil', 'pay \\u202eevil'),
    ('a\u2028b\u200bc', 'a\\u2028b\\u200bc'),
    ('\ud800', '\\ud800'),
    ('a\nb Zürich 東京', 'a\nb Zürich 東京'),
    ('[bold]x[/bold]', '[bold]x[/bold]'),
  ],
)
def test_hidden_characters_are_shown(text, expected):
  assert streams.escape(text) == expected
