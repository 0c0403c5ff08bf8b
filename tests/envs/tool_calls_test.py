"""Calls of tools are read in the forms that chat models write."""

import json

from hypothesis import given
from hypothesis import strategies as st
import pytest

from stppo_jax.envs import tools

_INVALID = ('invalid', '')
_ADD = '{"name": "add", "arguments": {"a": 1}}'
_CALL = ('tool', tools.Call('add', {'a': 1}))


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    # Hermes and Qwen.
    (f'<tool_call>\n{_ADD}\n</tool_call>', _CALL),
    (f'<think>hm</think><tool_call>{_ADD}</tool_call><|im_end|>', _CALL),
    # Llama.
    ('{"name": "add", "parameters": {"a": 1}}<|eot_id|>', _CALL),
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>', _CALL),
    # The first complete element is the action.
    (f'<tool_call>{_ADD}</tool_call><answer>2</answer>', _CALL),
    (f'<answer>2</answer><tool_call>{_ADD}</tool_call>', ('answer', '2')),
    ('<think>x</think><answer> a b\n</answer>', ('answer', 'a b')),
    ('<search>x</search><answer>2</answer>', ('answer', '2')),
    # No arguments are none.
    ('<tool_call>{"name": "now"}</tool_call>', ('tool', tools.Call('now', {}))),
    # What is no call.
    ('', _INVALID),
    ('I would add them.', _INVALID),
    (_ADD + ' and so on', _INVALID),
    ('so: ' + _ADD, _INVALID),
    ('<tool_call>add(1)</tool_call>', _INVALID),
    (f'<tool_call>{_ADD} {_ADD}</tool_call>', _INVALID),
    (f'<tool_call>[{_ADD}]</tool_call>', _INVALID),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', _INVALID),
    ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', _INVALID),
    (f'<TOOL_CALL>{_ADD}</TOOL_CALL>', _INVALID),
    ('<tool_call>' + '[' * 9000 + '</tool_call>', _INVALID),
  ],
)
def test_a_turn_has_one_action(text, expected):
  assert tools.parse(text) == expected


@given(
  st.text(min_size=1),
  st.dictionaries(st.text(), st.integers() | st.text(max_size=9)),
)
def test_a_call_that_is_written_is_read(name, arguments):
  call = json.dumps({'name': name, 'arguments': arguments})
  expected = ('tool', tools.Call(name, arguments))
  assert tools.parse(f'<tool_call>{call}</tool_call>') == expected
  assert tools.parse(call) == expected
