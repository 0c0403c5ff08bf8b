"""Turns text into token ids, and ids into text and bytes.

No other module of the package uses a tokenizer of `transformers`. What a model
wrote is never decoded and encoded again: text is for environments and readers.

L tokens of a text.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import json
import pathlib

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers
import transformers

END_OF_TEXT = '<|endoftext|>'

# One of these is inserted into the literal of an added token to break it up.
_GAPS = ' .-_~^'


class Tokenizer:
  """A fast Hugging Face tokenizer.

  Args:
    fast: the tokenizer; it must have an end-of-sequence token.

  Attributes:
    eos_id: the id of the end-of-sequence token.
    vocab_size: the number of ids, which are 0 to vocab_size - 1.
    added_literals: the texts of the added tokens, special or not.
  """

  def __init__(self, fast: transformers.PreTrainedTokenizerFast):
    self._fast = fast
    assert isinstance(fast.eos_token_id, int)
    self.eos_id = fast.eos_token_id
    self.vocab_size = len(fast)
    backend = fast.backend_tokenizer
    self._added = backend.get_added_tokens_decoder()
    self.added_literals = tuple(t.content for t in self._added.values())

  @classmethod
  def load(cls, directory: str | pathlib.Path) -> 'Tokenizer':
    """Returns the tokenizer in a directory, from `tokenizer.json` and so on.

    Raises:
      ValueError: if there is no such file or no end-of-sequence token.
    """
    directory = pathlib.Path(directory)
    if not (directory / 'tokenizer.json').is_file():
      raise ValueError(f'no tokenizer.json in {directory}')
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    if fast.eos_token_id is None:
      raise ValueError(f'the tokenizer in {directory} names no eos_token')
    return cls(fast)

  def save(self, directory: str | pathlib.Path) -> None:
    """Writes the files that `load` and `transformers` read."""
    self._fast.save_pretrained(directory)

  def encode_prompt(self, text: str) -> np.ndarray:
    """Returns the ids of a user message, in the chat template if there is one.

    Returns:
      int32 [L].
    """
    if self._fast.chat_template:
      message = [{'role': 'user', 'content': text}]
      templated = self._fast.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
      )
      assert isinstance(templated, str)  # a list only for several dialogues
      text = templated
    ids = self._fast.encode(text, add_special_tokens=False)
    return np.asarray(ids, np.int32)

  def encode_text(self, text: str) -> np.ndarray:
    """Returns the ids of foreign text, none of which is an added token.

    A passage that could spell a special token could end a message. Literals of
    added tokens in the text are broken up first, and the result is checked.

    Returns:
      int32 [L].

    Raises:
      ValueError: if there is an added token all the same, or no character to
        break literals up with.
    """
    text = _without_literals(text, self.added_literals)
    ids = self._fast.encode(
      text, add_special_tokens=False, split_special_tokens=True
    )
    forged = set(ids) & set(self._added)
    if forged:
      raise ValueError(f'added token ids {sorted(forged)} from plain text')
    return np.asarray(ids, np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of ids, with special tokens."""
    text = self._fast.decode(
      list(map(int, ids)),
      skip_special_tokens=False,
      clean_up_tokenization_spaces=False,
    )
    assert isinstance(text, str)  # a list only for several sequences
    return text

  def token_bytes(self) -> list[bytes]:
    """Returns the bytes that each id contributes to the text of `decode`.

    Raises:
      ValueError: if the tokenizer's decoder does more than join tokens.
    """
    spec = json.loads(self._fast.backend_tokenizer.to_str())
    decoder = (spec['decoder'] or {}).get('type')
    if decoder not in ('ByteLevel', 'Fuse'):
      raise ValueError(
        f'unsupported decoder {decoder!r} of the tokenizer; '
        'supported: ByteLevel, Fuse'
      )
    table = _byte_level_alphabet()
    result = []
    for token_id in range(self.vocab_size):
      if token_id in self._added:
        result.append(self._added[token_id].content.encode())
        continue
      token = self._fast.convert_ids_to_tokens(token_id)
      assert isinstance(token, str)  # a list only for several ids
      if decoder == 'ByteLevel':
        result.append(bytes(table[char] for char in token))
      else:
        result.append(token.encode())
    return result


def phrase_tokenizer(phrases: Iterable[str]) -> Tokenizer:
  """Returns a tokenizer with a token for each phrase and each ASCII character.

  It is a Unigram model. A character that no phrase covers costs as much as ten
  phrases, so that a text becomes the fewest characters and, among these, the
  fewest phrases. The tags of a dialogue are phrases, not added tokens.

  Args:
    phrases: see `protocol.Environment.phrases`.
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

  Any text is the same after it has been encoded and decoded.

  Args:
    texts: what to train on.
    vocab_size: most tokens.
  """
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size - 1,  # END_OF_TEXT is one more
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(texts, trainer)
  return _wrap(backend)


def _wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
  )
  return Tokenizer(fast)


def _without_literals(text: str, literals: Sequence[str]) -> str:
  """Returns the text with every literal broken behind its first character.

  The gap is a character that no literal contains, so that a replacement makes
  no new literal; it can only leave others, which the next round finds. A
  literal of one character becomes a gap.

  Raises:
    ValueError: if every gap is a character of some literal.
  """
  literals = [literal for literal in literals if literal]
  free = [gap for gap in _GAPS if not any(gap in one for one in literals)]
  if not free:
    raise ValueError(f'every one of {_GAPS!r} is in some added token')
  gap = free[0]
  while found := [literal for literal in literals if literal in text]:
    for literal in found:
      head, tail = literal[0], literal[1:]
      text = text.replace(literal, head + gap + tail if tail else gap)
  return text


def _byte_level_alphabet() -> dict[str, int]:
  """Returns the byte behind each character of a byte-level BPE vocabulary."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  table = {chr(byte): byte for byte in printable}
  table.update({chr(256 + n): byte for n, byte in enumerate(others)})
  return table
