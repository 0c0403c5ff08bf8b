"""Checks, before any weight is read, that a tokenizer carries a dialogue."""

from collections.abc import Sequence

from stppo_jax.sampling import tokenizer as tokenizer_lib

_QUESTION = 'Which word comes next?'
_WORD = ' word '


def check(tokenizer: tokenizer_lib.Tokenizer, tags: Sequence[str]) -> None:
  """Raises ValueError if tags or words do not survive encoding and decoding.

  The environment reads decoded text, so a tag that comes back in another form
  would make every turn invalid. White space beside a tag may differ.

  Args:
    tokenizer: the policy's tokenizer.
    tags: the tags of the environment.

  Raises:
    ValueError: the prompt, a tag or a word does not come back; one line.
  """
  prompt = tokenizer.decode(tokenizer.encode_prompt(_QUESTION))
  if _without_space(_QUESTION) not in _without_space(prompt):
    raise ValueError(
      f'the tokenizer gives the prompt {_QUESTION!r} back as {prompt!r}'
    )
  written = _WORD.join(('', *tags, ''))
  read = tokenizer.decode(tokenizer.encode_text(written, tags=tags))
  position = 0
  for tag in tags:
    position = read.find(tag, position)
    if position < 0:
      break
    position += len(tag)
  if position < 0 or _without_space(read) != _without_space(written):
    raise ValueError(
      f'the tokenizer gives the dialogue {written!r} back as {read!r}'
    )


def _without_space(text: str) -> str:
  return ''.join(text.split())
