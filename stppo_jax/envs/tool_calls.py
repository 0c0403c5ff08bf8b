"""Reads the call of a tool in the text that the policy wrote in one turn."""

from collections.abc import Mapping
import dataclasses
import json
import re
from typing import Any

from stppo_jax.envs import actions
from stppo_jax.envs import protocol

STOP_STRINGS: tuple[str, ...] = ('</tool_call>', '</answer>')

# Llama writes this token before a call without tags.
_PYTHON_TAG = '<|python_tag|>'
_END_OF_TURN = re.compile(r'(?:\s|<\|[a-z_]+\|>|</s>)*')


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of a tool: its name and its arguments by name."""

  name: str
  arguments: Mapping[str, Any]


def parse(text: str) -> tuple[str, Call | str]:
  """Returns the action of a turn, and the call or the answer in it.

  A call is the JSON object {"name", "arguments"} in a <tool_call> element, as
  Hermes and Qwen write it, or a turn that is nothing but such an object, as
  Llama writes it. Llama's name of the arguments, "parameters", is accepted too.

  Returns:
    ('tool', the call), ('answer', the text) or (`protocol.INVALID`, '').
  """
  action = actions.parse_action(text, ('tool_call', 'answer'))
  if action.kind == 'answer':
    return 'answer', action.content
  if action.kind == 'tool_call':
    call = _call(action.content, '')
  else:
    call = _call(text.strip().removeprefix(_PYTHON_TAG), _END_OF_TURN)
  return ('tool', call) if call else (protocol.INVALID, '')


def _call(text: str, rest: str | re.Pattern[str]) -> Call | None:
  """Returns the call at the start of a text, if `rest` is all that follows."""
  text = text.lstrip()
  try:
    fields, end = json.JSONDecoder().raw_decode(text)
  except (ValueError, RecursionError):
    return None
  if not re.fullmatch(rest, text[end:]) or not isinstance(fields, dict):
    return None
  name = fields.get('name')
  arguments = fields.get('arguments', fields.get('parameters', {}))
  if not isinstance(name, str) or not isinstance(arguments, dict):
    return None
  return Call(name, arguments)
