"""Small tokenizers in which stop strings are cut in many ways."""

import functools

from stppo_jax.envs import prompts
from stppo_jax.sampling import tokenizer as tokenizer_lib


@functools.cache
def phrases() -> tokenizer_lib.Tokenizer:
  """Returns a tokenizer with a token for each tag and each character."""
  return tokenizer_lib.phrase_tokenizer(
    prompts.phrases([' the', ' of', 'search', 'er>'])
  )


@functools.cache
def bpe() -> tokenizer_lib.Tokenizer:
  """Returns a byte-level tokenizer, in which a tag is several tokens.

  One of its tokens, '></', ends a tag and begins another.
  """
  texts = ['<search> x</search></answer>', 'research </think><answer>é\n']
  return tokenizer_lib.train_byte_level_bpe(texts * 5, vocab_size=300)
