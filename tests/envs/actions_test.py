"""Actions: by hand, and against a search over all pairs of tags."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
import pytest

from stppo_jax.envs import actions


@pytest.mark.parametrize(
  ('text', 'kind', 'content'),
  [
    ('<think>x</think><search> who\nis it </search>', 'search', 'who\nis it'),
    ('<answer>42</answer><|im_end|>', 'answer', '42'),
    ('<answer></answer>', 'answer', ''),
    # What closes first is the action, from the first opening tag of its name.
    ('<search>a<answer>b</answer>c</search>', 'answer', 'b'),
    ('<search>a<search>b</search>', 'search', 'a<search>b'),
    # Any characters inside.
    ('<search><|im_end|>{}</think></search>', 'search', '<|im_end|>{}</think>'),
    ('<search>' + 'q' * 2048 + '</search>', 'search', 'q' * 2048),
    # The policy's mistakes.
    ('<search></search><answer>a</answer>', 'invalid', ''),
    ('<search>' + 'q' * 2049 + '</search>', 'invalid', ''),
    ('<Search>a</Search>', 'invalid', ''),
    ('<search >a</search>', 'invalid', ''),
  ],
)
def test_the_action_of_a_turn_by_hand(text, kind, content):
  assert actions.parse_action(text) == actions.Action(kind, content)


def _all_pairs(text):
  """Returns every complete tag as (end, start, kind, content)."""
  pairs = []
  for kind in ('search', 'answer'):
    first, last = f'<{kind}>', f'</{kind}>'
    starts = [i for i in range(len(text)) if text.startswith(first, i)]
    ends = [i for i in range(len(text)) if text.startswith(last, i)]
    for start, end in itertools.product(starts, ends):
      if start + len(first) <= end:
        pairs.append((end, start, kind, text[start + len(first) : end]))
  return pairs


_PIECES = ['<search>', '</search>', '<answer>', '</answer>', 'a ', '\n', '<']


@given(st.lists(st.sampled_from(_PIECES), max_size=12).map(''.join))
def test_the_first_to_close_reaches_back_furthest(text):
  pairs = _all_pairs(text)
  _, _, kind, content = min(pairs, default=(0, 0, 'invalid', ''))
  expected = actions.Action(kind, content.strip())
  if expected == actions.Action('search'):  # without a query
    expected = actions.Action('invalid')
  assert actions.parse_action(text) == expected


@given(st.text())
def test_any_text_has_an_action(text):
  assert actions.parse_action(text).kind in ('search', 'answer', 'invalid')
  query = text.replace('<', '')
  if 0 < len(query.strip()) <= actions.MAX_QUERY_CHARS:
    action = actions.parse_action(f'<search>{query}</search>')
    assert action == actions.Action('search', query.strip())
