"""The texts of a search dialogue: the prompt and the observations."""

from collections.abc import Sequence
import pathlib

from stppo_jax import text as text_lib
from stppo_jax import types
from stppo_jax.envs import protocol

PLACEHOLDER = '{question}'

# The prompt has exactly one complete <answer> element, because the reward scope
# 'search_r1' also counts the <answer> elements of the prompt.
BUILT_IN = """\
Find the answer to the question at the end of this message.
First reason inside <think> and </think>. When you lack a fact, write a query \
inside <search> and </search>: what the search engine finds then appears \
between <information> and </information>. Think again whenever you have read \
something new, and search as often as you need. Once you know the answer, \
give it without any explanation inside the answer tag, for example \
<answer> Lake Victoria </answer>.
Question: {question}
"""

_INFORMATION = ('\n\n<information>', '</information>\n\n')
# Short fixed parts of prompts and observations. Each gets a token of its own,
# see `phrases`.
_FORM = ('Question:', *(f'Doc {i}(Title:' for i in range(1, 10)), ')')
_CORRECTION = (
  'No valid action. Write a query inside <search> and </search>, or the '
  'answer inside <answer> and </answer>.'
)


def load_template(path: str, built_in: str = BUILT_IN) -> str:
  """Reads a prompt template.

  Args:
    path: a text file that contains `{question}`; '' for the built-in prompt.
    built_in: the built-in prompt.

  Raises:
    ValueError: if the file is missing, is not UTF-8 or does not contain
      `{question}`; the message is one line.
  """
  if not path:
    return built_in
  try:
    template = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, 'strerror', None) or 'not UTF-8'
    raise ValueError(f'prompt_template={path!r}: {reason}') from error
  if PLACEHOLDER not in template:
    raise ValueError(f'prompt_template={path!r}: no {PLACEHOLDER} in it')
  return template


def fill(template: str, question: types.Question) -> str:
  """Returns the prompt with the text of a question.

  In a choice question, the options follow the text, one per line. A tag of a
  dialogue in these texts, such as <search>, gets round brackets: (search).
  """
  text = question.text
  if question.kind == 'choice':
    options = (f'{key}. {option}' for key, option in question.options.items())
    text += '\nOptions:\n' + '\n'.join(options)
  text = text_lib.neutralise_tags(text)
  # str.format would fail on other braces in the template, which are plain text.
  return template.replace(PLACEHOLDER, text)


def information(passages: Sequence[types.Passage]) -> protocol.Observation:
  """Returns passages as an observation.

  A tag of a dialogue in the passages, such as <answer>, gets round brackets:
  (answer).
  """
  body = ''.join(
    f'Doc {i}(Title: {passage.title}) {passage.text}\n'
    for i, passage in enumerate(passages, start=1)
  )
  return protocol.Observation(
    prefix=_INFORMATION[0],
    # Tags are sought in all passages as one text, because a tag could begin in
    # a title and end in the text after the title.
    body=text_lib.neutralise_tags(body),
    suffix=_INFORMATION[1],
  )


def correction() -> protocol.Observation:
  """Returns the observation that follows a turn without a valid action."""
  # The text is our own, so it is the prefix of the observation, in which tags
  # stay as they are.
  return protocol.Observation(f'\n\n{_CORRECTION}\n\n', body='', suffix='')


def phrases(vocabulary: Sequence[str]) -> list[str]:
  """Returns the strings of a dialogue that get a token of their own.

  The order of the strings decides their token ids. A model that is trained
  already would break if the order changed.

  Args:
    vocabulary: the strings of the questions and passages.
  """
  tags = [*text_lib.TAGS, *_INFORMATION]
  return [*tags, *vocabulary, _CORRECTION, *_FORM]
