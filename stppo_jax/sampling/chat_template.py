"""Makes the token ids of prompts, with a model's chat template if it has one.

A template is rendered only once for each dialogue, for its prompt. Later tokens
are appended to the turn that the template has opened. Many templates change
turns that have ended, for example by removing their thoughts. Such changes
never happen here: the model reads exactly the tokens that it wrote.

L tokens of a prompt.
"""

from collections.abc import Mapping, Sequence
import datetime
import functools
import re
from typing import Any, NamedTuple

import numpy as np

# Templates that ask for today's date get this fixed date. If prompts depended
# on the day, a resumed run would go on with other prompts. The template of
# Llama 3 writes the same date if it cannot ask for today's.
_DAY = datetime.date(2024, 7, 26)
_CLOCK = re.compile(r'strftime_now\s*\(\s*([\'"])((?:(?!\1)[^\\])*)\1\s*\)')
_CLOCK_LEFT = re.compile(r'strftime_now\s*\(')
# An example of a user message, used to test what a template does.
PROBE = 'Which word comes next?'

Tools = Sequence[Mapping[str, Any]]


class Options(NamedTuple):
  """Holds the section `prompt` of a config, see `configs/base.py`."""

  system: str = ''
  enable_thinking: str = 'auto'
  tools: bool = True
  bos: str = 'auto'


class Prompts:
  """Makes prompts from user messages.

  Args:
    fast: a fast tokenizer of `transformers`.
    options: the options of the prompts.
  """

  def __init__(self, fast: Any, options: Options):
    self._fast, self._options = fast, options

  def encode(self, text: str, tools: Tools = ()) -> np.ndarray:
    """Returns the token ids of a prompt with one user message.

    The message is rendered in the chat template if the tokenizer has one.

    Args:
      text: the user message.
      tools: functions that the template describes to the model; a template that
        does not support functions ignores them.

    Returns:
      int32 [L].

    Raises:
      ValueError: if the chat template fails, leaves a message out, or does not
        support the value of an option; the message is one line.
    """
    if not self._options.tools:
      tools = ()
    rendered = self._render(self._messages(text), tools, **self._choices)
    # A template writes all special tokens of its model itself, including the
    # first, so the tokenizer must not add any.
    ids = self._fast.encode(
      rendered, add_special_tokens=False, split_special_tokens=False
    )
    return np.asarray(self._begun(ids), np.int32)

  @functools.cached_property
  def folds_system(self) -> bool:
    """Whether the system text is put at the start of the user's message.

    This is the case without a template, and with templates that refuse system
    messages or leave them out, such as the templates of Gemma 2 and Mistral.
    """
    system = self._options.system
    if not system or not self._fast.chat_template:
      return bool(system)
    try:
      self._render(_dialogue(system, PROBE))
    except ValueError:  # if the template is broken, `encode` raises the error
      return True
    return False

  @functools.cached_property
  def _choices(self) -> Mapping[str, Any]:
    """The variables of the template whose values the options set."""
    name, choice = 'enable_thinking', self._options.enable_thinking
    if choice == 'auto':
      return {}
    messages = self._messages(PROBE)
    if self._render(messages, (), **{name: True}) == self._render(
      messages, (), **{name: False}
    ):
      raise ValueError(
        f"prompt.{name}={choice}: must be 'auto', because with this template "
        f'the prompt does not depend on {name}'
      )
    return {name: choice == 'on'}

  def _messages(self, text: str) -> list[dict[str, str]]:
    """Returns the messages of a prompt whose user message has this text."""
    system = self._options.system
    # The template of Gemma 3 also puts the system text before the user's text.
    if self.folds_system:
      return _dialogue('', f'{system}\n\n{text}')
    return _dialogue(system, text)

  def _render(
    self, messages: Sequence[dict[str, str]], tools: Tools = (), **choices: Any
  ) -> str:
    """Returns the messages as one text, rendered in the chat template.

    Without a template the text is the content of the last message.
    """
    if not self._fast.chat_template:
      return messages[-1]['content']
    try:
      # Without tools the value is None: some templates treat an empty list as a
      # list of tools.
      given = [dict(each) for each in tools] or None
      template = self._fast.get_chat_template(None, given)
      text = self._fast.apply_chat_template(
        list(messages),
        chat_template=_without_clock(template),
        tools=given,
        tokenize=False,
        add_generation_prompt=True,
        **choices,
      )
    except Exception as error:  # a template is a program: it may raise anything
      reason = f'{type(error).__name__}: {" ".join(str(error).split())}'
      raise ValueError(f'the chat template fails ({reason})') from error
    # `apply_chat_template` returns a list only for several dialogues.
    assert isinstance(text, str)
    for message in messages:
      if without_space(message['content']) not in without_space(text):
        raise ValueError(
          f'the chat template leaves out the text of the {message["role"]} '
          'message'
        )
    return text

  @property
  def begun_by_tokenizer(self) -> bool:
    """Whether prompts get a bos token by the rules of the tokenizer.

    It is false if a chat template or the option `bos` decides on the bos token.
    """
    bos = self._fast.bos_token_id
    is_open = self._options.bos == 'auto' and not self._fast.chat_template
    return is_open and bos is not None and self._begun([])[:1] == [bos]

  def _begun(self, ids: list[int]) -> list[int]:
    """Returns the ids with exactly one bos token at the start, or with none.

    The option `bos` decides. With 'auto' the chat template decides or, without
    a template, the tokenizer.
    """
    bos, choice = self._fast.bos_token_id, self._options.bos
    if bos is None:
      if choice == 'on':
        raise ValueError('prompt.bos=on: the tokenizer names no bos_token')
      return ids
    is_begun = choice == 'on'
    if choice == 'auto':
      # Without a template, the rules of the tokenizer decide.
      own = ids if self._fast.chat_template else self._fast.encode(PROBE)
      is_begun = own[:1] == [bos]
    count = next((n for n, i in enumerate(ids) if i != bos), len(ids))
    return [bos] * is_begun + ids[count:]


def _dialogue(system: str, text: str) -> list[dict[str, str]]:
  """Returns a user message, after a system message if `system` is not empty."""
  messages = [{'role': 'system', 'content': system}] if system else []
  return [*messages, {'role': 'user', 'content': text}]


def _without_clock(template: str) -> str:
  """Returns the template with a fixed date in place of `strftime_now` calls."""
  template = _CLOCK.sub(lambda call: repr(_DAY.strftime(call[2])), template)
  # `transformers` passes its own `strftime_now` to templates, and a caller
  # cannot replace that function.
  if _CLOCK_LEFT.search(template):
    raise ValueError(
      'it calls strftime_now with an argument that is not a quoted text, so '
      'prompts would depend on the day'
    )
  return template


def without_space(text: str) -> str:
  """Returns the text with all white space removed."""
  return ''.join(text.split())
