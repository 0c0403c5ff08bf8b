"""Turns text into token ids, and token ids into text and bytes.

Only this module and `chat_template` use a tokenizer of `transformers`. Token
ids that a model generated are never decoded and encoded again: their text is
only for environments and for people.

L tokens of a text.
"""

from collections.abc import Iterable, Mapping, Sequence
import copy
import json
import pathlib
import re
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

# The class is imported from its own module. With an import from `transformers`
# itself, the type checker would first read the names of all models, which takes
# a third of its time.
import transformers.tokenization_utils_tokenizers as fast_tokenizers

from stppo_jax.sampling import chat_template

END_OF_TEXT = '<|endoftext|>'

# `neutralise` inserts one of these characters into the text of an added token,
# so that the text no longer spells the token.
_GAPS = ' .-_~^'
# The code that `AutoTokenizer` runs if it trusts remote code, see
# `Tokenizer.save`.
_CODE = '''"""Reads the tokenizer of this folder by the rules of its file."""

from transformers import PreTrainedTokenizerFast


class TokenizerAsWritten(PreTrainedTokenizerFast):
  """Reads tokenizer.json as it is."""
'''
_MODULE, _CLASS = 'tokenizer_as_written', 'TokenizerAsWritten'
_BYTE = re.compile('<0x([0-9A-F]{2})>')  # a token that stands for one byte
_DECODERS = 'ByteLevel, Fuse, Sequence of Replace, ByteFallback, Fuse, Strip'


class Tokenizer:
  """Wraps a fast Hugging Face tokenizer.

  Args:
    fast: the tokenizer; it must have an end-of-sequence token.

  Attributes:
    eos_id: the id of the end-of-sequence token.
    vocab_size: the number of token ids, which are 0 to vocab_size - 1.
    added_literals: the texts of the added tokens, special or not.
    prompts: makes prompts, with the options that `with_prompts` was given.
  """

  def __init__(self, fast: fast_tokenizers.PreTrainedTokenizerFast):
    self._fast = fast
    assert isinstance(fast.eos_token_id, int)
    self.eos_id = fast.eos_token_id
    self.vocab_size = max(fast.get_vocab().values()) + 1
    backend = fast.backend_tokenizer
    self._added = backend.get_added_tokens_decoder()
    self.added_literals = tuple(t.content for t in self._added.values())
    self._inside = _without_prefix_space(backend)
    self.prompts = chat_template.Prompts(fast, chat_template.Options())
    self._bytes: list[bytes] | None = None

  @classmethod
  def load(cls, directory: str | pathlib.Path) -> 'Tokenizer':
    """Loads the tokenizer from `tokenizer.json` and other files of a directory.

    Raises:
      ValueError: if the directory has no `tokenizer.json`, or the tokenizer has
        no end-of-sequence token.
    """
    directory = pathlib.Path(directory)
    if not (directory / 'tokenizer.json').is_file():
      raise ValueError(f'no tokenizer.json in {directory}')
    fast = fast_tokenizers.PreTrainedTokenizerFast.from_pretrained(directory)
    if fast.eos_token_id is None:
      raise ValueError(f'the tokenizer in {directory} names no eos_token')
    return cls(fast)

  def save(self, directory: str | pathlib.Path) -> None:
    """Writes the files that `load` and `transformers` read.

    For a model of type qwen2, `AutoTokenizer` ignores the class that the files
    name if the files have no `auto_map`. It then applies the rules of Qwen2's
    own tokenizer, which would give other token ids. With an `auto_map` it uses
    the class that the files name or, if its caller trusts remote code, the
    class that `auto_map` names in a Python file of the same directory. So this
    method writes both the `auto_map` and the Python file.
    """
    self._fast.save_pretrained(directory)
    path = pathlib.Path(directory) / 'tokenizer_config.json'
    path.with_name(f'{_MODULE}.py').write_text(_CODE, encoding='utf-8')
    content = json.loads(path.read_text(encoding='utf-8'))
    content |= {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'auto_map': {'AutoTokenizer': [None, f'{_MODULE}.{_CLASS}']},
    }
    text = json.dumps(content, indent=2, ensure_ascii=False) + '\n'
    path.write_text(text, encoding='utf-8')

  def with_prompts(self, options: chat_template.Options) -> 'Tokenizer':
    """Returns a copy of this tokenizer with other options for prompts."""
    other = copy.copy(self)
    other.prompts = chat_template.Prompts(self._fast, options)
    return other

  def encode_prompt(
    self, text: str, *, tools: chat_template.Tools = ()
  ) -> np.ndarray:
    """Returns the token ids of a prompt, see `chat_template.Prompts.encode`."""
    return self.prompts.encode(text, tools)

  def encode_text(self, text: str, *, tags: Sequence[str] = ()) -> np.ndarray:
    """Returns the token ids of a text that continues a dialogue.

    Text that spells a special token could end a message. So this method first
    breaks up the text of all added tokens with `neutralise`. Added tokens in
    the tags are kept: the tokenizer encodes the tags by its own rules.

    Args:
      text: the continuation of the dialogue; no space is put in front of it.
      tags: strings that may contain added tokens; () for untrusted text.

    Returns:
      int32 [L].

    Raises:
      ValueError: if `neutralise` finds no character to break up added tokens
        with.
    """
    parts = [text]
    if tags:
      longest_first = sorted(tags, key=len, reverse=True)
      parts = re.split(f'({"|".join(map(re.escape, longest_first))})', text)
    text = ''.join(
      part if n % 2 else self.neutralise(part) for n, part in enumerate(parts)
    )
    ids = self._inside.encode(text, add_special_tokens=False).ids
    # The normaliser of the tokenizer may have turned similar characters into
    # the text of an added token. Such tokens are removed here.
    kept = [i for i in ids if i not in self._added or self._allowed(i, tags)]
    return np.asarray(kept, np.int32)

  def _allowed(self, token_id: int, tags: Sequence[str]) -> bool:
    """Returns whether an added token may occur in a text with these tags."""
    content = self._added[token_id].content
    # The unknown token stands for characters that the vocabulary lacks.
    unknown = token_id == self._fast.unk_token_id
    return unknown or any(content in tag for tag in tags)

  def neutralise(self, text: str) -> str:
    """Returns the text, changed so that it spells no added token.

    The literal of an added token is the text that spells it. A gap character is
    inserted after the first character of each literal that is found. No literal
    contains the gap character, so an insertion makes no new literal. A literal
    of one character is replaced by the gap character. The text is searched
    again after these changes, because a literal that overlapped with a changed
    literal may remain.

    Raises:
      ValueError: if every possible gap character is in some literal.
    """
    literals = [literal for literal in self.added_literals if literal]
    gap = next((c for c in _GAPS if not any(c in x for x in literals)), None)
    if gap is None:
      raise ValueError(
        f'each of the characters {_GAPS!r} occurs in an added token, so none '
        'of them can be inserted into a text to break up an added token'
      )
    while found := [literal for literal in literals if literal in text]:
      for literal in found:
        head, tail = literal[0], literal[1:]
        text = text.replace(literal, head + gap + tail if tail else gap)
    return text

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of token ids, including the text of special tokens.

    The text is decoded from the bytes of the tokens, so it contains a stop
    string if and only if the bytes do. Bytes that are not UTF-8 become
    replacement characters. Ids beyond the vocabulary, which a padded embedding
    has, add no text.
    """
    # The tokenizer's own decoder is not used: it may strip spaces and repair
    # bytes at the ends of the text, but the stop automaton reads all bytes
    # unchanged.
    pieces = self.token_bytes()
    joined = b''.join(pieces[i] for i in ids if i < len(pieces))
    return joined.decode(errors='replace')

  def kind(self, token_id: int) -> str:
    """Returns 'special' or 'added' for an added token, else ''."""
    if token_id not in self._added:
      return ''
    return 'special' if self._added[token_id].special else 'added'

  def token_bytes(self) -> list[bytes]:
    """Returns the bytes that each token id adds to a text.

    The bytes follow the rules of the tokenizer's decoder. Rules for only the
    first token of a text, such as the removal of its leading space, are left
    out, because the text of a turn follows other text.

    Raises:
      ValueError: if the decoder has a step that is not supported, or a token
        has a character that no byte-level vocabulary has; the message is one
        line.
    """
    if self._bytes is None:
      steps = _decoder_steps(self._fast.backend_tokenizer)
      tokens = self._fast.convert_ids_to_tokens(list(range(self.vocab_size)))
      self._bytes = [
        _bytes_of(token or '', token_id, steps, added=token_id in self._added)
        for token_id, token in enumerate(tokens)
      ]
    return self._bytes


def phrase_tokenizer(phrases: Iterable[str]) -> Tokenizer:
  """Returns a tokenizer with a token for each phrase and each ASCII character.

  The tokenizer is a Unigram model, which splits a text at the least total cost.
  A single character costs as much as ten phrases, so a text is split into few
  phrases and very few single characters. The tags of a dialogue are phrases,
  not added tokens.

  Args:
    phrases: the strings that get a token, see `protocol.Environment.phrases`.
  """
  characters = [chr(c) for c in range(32, 127)] + ['\n']
  vocab = [('<unk>', 0.0)]
  vocab += [(phrase, -1.0) for phrase in dict.fromkeys(phrases)]
  known = {phrase for phrase, _ in vocab}
  vocab += [(c, -10.0) for c in characters if c not in known]
  backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
  backend.decoder = decoders.Fuse()
  return _wrap(backend)


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
  """Returns a byte-level BPE tokenizer trained on texts.

  Decoding the ids of any text returns the same text.

  Args:
    texts: the texts to train on.
    vocab_size: the most tokens of the vocabulary.
  """
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size - 1,  # one id is left for END_OF_TEXT
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(texts, trainer)
  return _wrap(backend)


def _wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
  fast = fast_tokenizers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
  )
  return Tokenizer(fast)


def _without_prefix_space(
  backend: tokenizers.Tokenizer,
) -> tokenizers.Tokenizer:
  """Returns a tokenizer that puts no space in front of the text.

  SentencePiece tokenizers put a space in front of every text that they encode.
  In a dialogue, this space would come before every observation.
  """
  text = backend.to_str()
  spec = json.loads(text)
  normalizer = spec['normalizer'] or {}
  parts = normalizer.get('normalizers', [normalizer])
  kept = [part for part in parts if part.get('type') != 'Prepend']
  if len(kept) < len(parts):
    spec['normalizer'] = {'type': 'Sequence', 'normalizers': kept}
  splitter = spec['pre_tokenizer'] or {}
  for part in splitter.get('pretokenizers', [splitter]):
    if part.get('type') == 'Metaspace':
      part['prepend_scheme'] = 'never'
    if part.get('type') == 'ByteLevel':
      part['add_prefix_space'] = False
  spec['truncation'] = spec['padding'] = None
  if spec == json.loads(text):
    return backend
  return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[Mapping[str, Any]]:
  """Returns the steps by which the decoder changes each token, in order.

  Raises:
    ValueError: if the decoder has a step that is not supported.
  """
  decoder = json.loads(backend.to_str())['decoder'] or {}
  steps, joined = [], False
  for step in decoder.get('decoders', [decoder]):
    kind = step.get('type')
    if kind == 'Fuse':
      joined = True
    elif joined and kind == 'Strip' and not step['stop']:
      pass  # this step changes only the beginning of the whole text
    elif not joined and (
      kind in ('ByteLevel', 'ByteFallback')
      or kind == 'Replace'
      and 'String' in step['pattern']
    ):
      steps.append(step)
    else:
      raise ValueError(
        f'unsupported decoder {kind!r} of the tokenizer; supported: {_DECODERS}'
      )
  return steps


def _bytes_of(
  token: str, token_id: int, steps: Sequence[Mapping[str, Any]], *, added: bool
) -> bytes:
  """Returns the bytes of a token after the decoder's steps."""
  for step in steps:
    if step['type'] == 'Replace':
      token = token.replace(step['pattern']['String'], step['content'])
    elif step['type'] == 'ByteLevel':
      if set(token) <= _BYTE_LEVEL.keys():
        return bytes(_BYTE_LEVEL[char] for char in token)
      if not added:
        raise ValueError(
          f'token {token_id}, {token!r}, has a character that no byte-level '
          'vocabulary has'
        )
    elif match := _BYTE.fullmatch(token):
      return bytes([int(match[1], 16)])
  return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
  """Returns the byte that each character of a byte-level token stands for."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  table = {chr(byte): byte for byte in printable}
  table.update({chr(256 + n): byte for n, byte in enumerate(others)})
  return table


_BYTE_LEVEL = _byte_level_alphabet()
