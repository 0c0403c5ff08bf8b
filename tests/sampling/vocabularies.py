"""Small tokenizers in which stop strings are cut in many ways."""

import functools
import json
import pathlib
import tempfile

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import trainers
import transformers

from stppo_jax import text as text_lib
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


def with_added(
  tokens=(), *, special=(), chat_template=None
) -> tokenizer_lib.Tokenizer:
  """Returns the byte-level tokenizer with added tokens, as instruct models.

  Args:
    tokens: added tokens that are not special, such as <think> of Qwen3.
    special: special tokens beside the end token, <|im_end|>.
    chat_template: the chat template, if there is one.
  """
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer.from_str(_bpe_file()),
    eos_token='<|im_end|>',
    chat_template=chat_template,
  )
  fast.add_tokens(list(tokens))
  fast.add_special_tokens({'extra_special_tokens': list(special)})
  return tokenizer_lib.Tokenizer(fast)


@functools.cache
def llama(strip: bool = True) -> tokenizer_lib.Tokenizer:
  """Returns a tokenizer of the kind that SentencePiece makes.

  Args:
    strip: whether a space is put before a text and removed from what is
      decoded, as in Llama 2, TinyLlama and Mistral; not so in Gemma.
  """
  spaces = normalizers.Replace(' ', '▁')
  backend = byte_fallback(
    ['<search> x</search></answer>', 'research </think> é\n the of'] * 5,
    vocab_size=120,
    normalizer=normalizers.Sequence(
      [normalizers.Prepend('▁'), spaces] if strip else [spaces]
    ),
    strip=strip,
  )
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    unk_token='<unk>',
    bos_token='<s>',
    eos_token='</s>',
  )
  return tokenizer_lib.Tokenizer(fast)


def byte_fallback(
  texts, *, vocab_size, normalizer=None, pre_tokenizer=None, strip=True
) -> tokenizers.Tokenizer:
  """Returns a BPE tokenizer that spells unknown characters in bytes.

  Args:
    texts: what it is trained on.
    vocab_size: the number of trained tokens.
    normalizer, pre_tokenizer: what comes before BPE.
    strip: whether the space before a text is removed from what is decoded.
  """
  trained = tokenizers.Tokenizer(models.BPE())
  if normalizer is not None:
    trained.normalizer = normalizer
  if pre_tokenizer is not None:
    trained.pre_tokenizer = pre_tokenizer
  trained.train_from_iterator(
    texts, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False)
  )
  learned = json.loads(trained.to_str())['model']
  tokens = ['<unk>', '<s>', '</s>', *(f'<0x{n:02X}>' for n in range(256))]
  tokens += [token for token in learned['vocab'] if token != '\n']
  trained.model = models.BPE(
    vocab={token: n for n, token in enumerate(tokens)},
    merges=[tuple(pair) for pair in learned['merges'] if '\n' not in pair],
    unk_token='<unk>',
    fuse_unk=True,
    byte_fallback=True,
  )
  steps = [
    decoders.Replace('▁', ' '),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(' ', 1, 0),
  ]
  trained.decoder = decoders.Sequence(steps if strip else steps[:3])
  return trained


@functools.cache
def _bpe_file() -> str:
  """Returns the file of the byte-level tokenizer."""
  with tempfile.TemporaryDirectory() as directory:
    bpe().save(directory)
    return (pathlib.Path(directory) / 'tokenizer.json').read_text()


# By name, what makes a tokenizer.
PLAIN = {'phrases': phrases, 'bpe': bpe}
TAGGED = {
  'a token for each tag': lambda: with_added(text_lib.TAGS),
  'a special token for each tag': lambda: with_added(special=text_lib.TAGS),
  'Qwen3': lambda: with_added(['<think>', '</think>']),
  'Llama 2': llama,
  'Gemma': lambda: llama(strip=False),
}
