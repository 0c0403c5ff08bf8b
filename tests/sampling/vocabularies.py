"""Small tokenizers in which stop strings are cut in many ways."""

import functools

from stppo_jax.envs import prompts
from stppo_jax.sampling import tokenizer as tokenizer_lib


@functools.cache
def phrases() -> tokenizer_lib.Tokenizer:
  """Tags are one token each, and can be spelled in characters too."""
  return tokenizer_lib.phrase_tokenizer(
    prompts.phrases([' the', ' of', 'search', 'er>'])
  )


@functools.cache
def bpe() -> tokenizer_lib.Tokenizer:
  """Byte-level; tags are several tokens, and '></' ends one and goes on."""
  texts = ['<search> x</search></answer>', 'research </think><answer>é\n']
  return tokenizer_lib.train_byte_level_bpe(texts * 5, vocab_size=300)
