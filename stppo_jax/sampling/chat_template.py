"""Makes the tokens of a prompt, by the chat template of a model if it has one.

A template is rendered once for each dialogue, for its prompt. Whatever follows
is appended as tokens, to the turn that the template has opened. So what a
template does to turns that have ended, such as removing their thoughts, never
happens: the model reads the tokens that it wrote.

L tokens of a prompt.
"""

from collections.abc import Mapping, Sequence
import datetime
import functools
import re
from typing import Any, NamedTuple

import numpy as np

# Templates that ask for today's date get this one. It is the date that the
# template of Llama 3 writes where it cannot ask. Prompts must not depend on the
# day, or a resumed run would go on with other prompts.
_DAY = datetime.date(2024, 7, 26)
_CLOCK = re.compile(r'strftime_now\s*\(\s*([\'"])((?:(?!\1)[^\\])*)\1\s*\)')
_CLOCK_LEFT = re.compile(r'strftime_now\s*\(')
# A user message that stands for any other.
PROBE = 'Which word comes next?'

Tools = Sequence[Mapping[str, Any]]


class Options(NamedTuple):
  """The section `prompt` of a config, which `configs/base.py` explains."""

  system: str = ''
  enable_thinking: str = 'auto'
  tools: bool = True
  bos: str = 'auto'


class Prompts:
  """Makes prompts of user messages.

  Args:
    fast: a fast tokenizer of `transformers`.
    options: how prompts are made.
  """

  def __init__(self, fast: Any, options: Options):
    self._fast, self._options = fast, options

  def encode(self, text: str, tools: Tools = ()) -> np.ndarray:
    """Returns the ids of a user message, in its chat template if it has one.

    Args:
      text: the message.
      tools: functions that the template describes to the model, if it can.

    Returns:
      int32 [L].

    Raises:
      ValueError: if the chat template fails, or leaves a message out, or has no
        place for what an option asks for; the message is one line.
    """
    if not self._options.tools:
      tools = ()
    rendered = self._render(self._messages(text), tools, **self._choices)
    # A template writes the special tokens of its model itself, also the first.
    ids = self._fast.encode(
      rendered, add_special_tokens=False, split_special_tokens=False
    )
    return np.asarray(self._begun(ids), np.int32)

  @functools.cached_property
  def folds_system(self) -> bool:
    """Whether the system text begins the user's message.

    It does so without a template, and with one that refuses system messages or
    leaves them out, such as those of Gemma 2 and Mistral.
    """
    system = self._options.system
    if not system or not self._fast.chat_template:
      return bool(system)
    try:
      self._render(_dialogue(system, PROBE))
    except ValueError:  # raised again below if there is another reason
      return True
    return False

  @functools.cached_property
  def _choices(self) -> Mapping[str, Any]:
    """The variables of a template beside messages and tools."""
    name, choice = 'enable_thinking', self._options.enable_thinking
    if choice == 'auto':
      return {}
    messages = self._messages(PROBE)
    if self._render(messages, (), **{name: True}) == self._render(
      messages, (), **{name: False}
    ):
      raise ValueError(
        f'prompt.{name}={choice}: must be auto, the prompt does not depend on '
        f'{name} with this chat template'
      )
    return {name: choice == 'on'}

  def _messages(self, text: str) -> list[dict[str, str]]:
    """Returns the dialogue that a prompt consists of."""
    system = self._options.system
    if self.folds_system:  # as the template of Gemma 3 does it
      return _dialogue('', f'{system}\n\n{text}')
    return _dialogue(system, text)

  def _render(
    self, messages: Sequence[dict[str, str]], tools: Tools = (), **choices: Any
  ) -> str:
    """Returns messages as text, in the chat template if there is one."""
    if not self._fast.chat_template:
      return messages[-1]['content']
    try:
      # Without tools, None: some templates take an empty list for tools.
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
    assert isinstance(text, str)  # a list only for several dialogues
    for message in messages:
      if without_space(message['content']) not in without_space(text):
        raise ValueError(
          f'the chat template leaves out what the {message["role"]} says'
        )
    return text

  @property
  def begun_by_tokenizer(self) -> bool:
    """Whether prompts begin with a bos token by the tokenizer's rules alone."""
    bos = self._fast.bos_token_id
    is_open = self._options.bos == 'auto' and not self._fast.chat_template
    return is_open and bos is not None and self._begun([])[:1] == [bos]

  def _begun(self, ids: list[int]) -> list[int]:
    """Returns the ids with the token that begins a text, once or not at all."""
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
  """Returns a user message, after a system message if there is one."""
  messages = [{'role': 'system', 'content': system}] if system else []
  return [*messages, {'role': 'user', 'content': text}]


def _without_clock(template: str) -> str:
  """Returns a template that has the day in place of questions for it."""
  template = _CLOCK.sub(lambda call: repr(_DAY.strftime(call[2])), template)
  # `transformers` gives templates its own function of this name, and there is
  # no way to give them another.
  if _CLOCK_LEFT.search(template):
    raise ValueError(
      'it calls strftime_now with something else than a quoted text, so that '
      'prompts would depend on the day'
    )
  return template


def without_space(text: str) -> str:
  """Returns the text without its white space."""
  return ''.join(text.split())
