"""All that the policy reads: the prompt, passages, a word of correction."""

from collections.abc import Mapping
from collections.abc import Sequence
import pathlib

from stppo_jax import types
from stppo_jax.envs import neutralisation
from stppo_jax.envs import protocol

PLACEHOLDER = '{question}'

# Exactly one complete answer tag: scoring with scope 'search_r1' counts them.
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

_CORRECTION = (
  'No valid action. Write a query inside <search> and </search>, or the '
  'answer inside <answer> and </answer>.'
)


def load_template(path: str) -> str:
  """Reads a prompt template.

  Args:
    path: a text file that contains `{question}`; '' = the built-in prompt.

  Raises:
    ValueError: no such file, not UTF-8, or no placeholder; one line.
  """
  if not path:
    return BUILT_IN
  try:
    template = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, 'strerror', None) or 'not UTF-8'
    raise ValueError(f'prompt template {path!r}: {reason}') from error
  if PLACEHOLDER not in template:
    raise ValueError(f'prompt template {path!r}: no {PLACEHOLDER} in it')
  return template


def fill(template: str, question: types.Question) -> str:
  """The prompt of a question; options follow the question, a line each."""
  text = question.text
  if question.kind == 'choice':
    text += '\nOptions:\n' + _option_lines(question.options)
  # Not str.format: other braces in the template are text.
  return template.replace(PLACEHOLDER, text)


def information(passages: Sequence[types.Passage]) -> protocol.Observation:
  """Passages as an observation; tags of ours in them are neutralised."""
  body = ''.join(
    f'Doc {i}(Title: {passage.title}) {passage.text}\n'
    for i, passage in enumerate(passages, start=1)
  )
  return protocol.Observation(
    prefix='\n\n<information>',
    # All at once: a tag could be spread over a title and its text.
    body=neutralisation.neutralise_tags(body),
    suffix='</information>\n\n',
  )


def correction() -> protocol.Observation:
  """What follows a turn without a valid action."""
  return protocol.Observation(prefix='\n\n', body=_CORRECTION, suffix='\n\n')


def _option_lines(options: Mapping[str, str]) -> str:
  return '\n'.join(f'{letter}. {text}' for letter, text in options.items())
