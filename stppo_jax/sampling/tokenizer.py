"""Tokenizers: Hugging Face directories in, token ids and byte strings out.

The one home of `transformers` tokenizers. Model output is never decoded and
encoded again: decoding serves the environment and the reader only.
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

_GAPS = ' .-_~^'  # put into a literal to break it


class Tokenizer:
  """A fast Hugging Face tokenizer behind three verbs.

  Attributes:
    eos_id: id of the end-of-sequence token.
    vocab_size: ids lie in [0, vocab_size).
  """

  def __init__(self, fast: transformers.PreTrainedTokenizerFast):
    self._fast = fast
    self.eos_id = int(fast.eos_token_id)
    self.vocab_size = len(fast)
    backend = fast.backend_tokenizer
    self._added = backend.get_added_tokens_decoder()
    self.added_literals = tuple(t.content for t in self._added.values())

  @classmethod
  def load(cls, directory: str | pathlib.Path) -> 'Tokenizer':
    """Reads `tokenizer.json` and its companions.

    Raises:
      ValueError: no such files, or no end-of-sequence token.
    """
    directory = pathlib.Path(directory)
    if not (directory / 'tokenizer.json').is_file():
      raise ValueError(f'no tokenizer.json in {directory}')
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    if fast.eos_token_id is None:
      raise ValueError(f'the tokenizer in {directory} names no eos_token')
    return cls(fast)

  def save(self, directory: str | pathlib.Path) -> None:
    """Writes files that `load` and `transformers` read."""
    self._fast.save_pretrained(directory)

  def encode_prompt(self, text: str) -> np.ndarray:
    """[N] int32 ids of a user message, in the model's chat template if any."""
    if self._fast.chat_template:
      message = [{'role': 'user', 'content': text}]
      text = self._fast.apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
      )
    ids = self._fast.encode(text, add_special_tokens=False)
    return np.asarray(ids, np.int32)

  def encode_text(self, text: str) -> np.ndarray:
    """[N] int32 ids of foreign text: never an added or special token.

    Literals of added tokens in the text are broken up first; that none is
    left is checked, since a passage must not be able to end a message.

    Raises:
      ValueError: an added token came out all the same.
    """
    text = _without_literals(text, self.added_literals)
    ids = self._fast.encode(
      text, add_special_tokens=False, split_special_tokens=True
    )
    forged = set(ids) & set(self._added)
    if forged:
      raise ValueError(f'added token ids {sorted(forged)} from plain text')
    return np.asarray(ids, np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    """The text of ids, special tokens included."""
    return self._fast.decode(
      list(map(int, ids)),
      skip_special_tokens=False,
      clean_up_tokenization_spaces=False,
    )

  def token_bytes(self) -> list[bytes]:
    """The bytes each id contributes to `decode`'s text.

    Raises:
      ValueError: the tokenizer's decoder does more than join its tokens.
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
      if decoder == 'ByteLevel':
        result.append(bytes(table[char] for char in token))
      else:
        result.append(token.encode())
    return result


def phrase_tokenizer(phrases: Iterable[str]) -> Tokenizer:
  """One token per phrase, printable ASCII for the rest (a Unigram model).

  Segmentation spells out the fewest characters with the fewest phrases (one
  character costs as much as ten). Tags of a dialogue are phrases, not added
  tokens: an environment lists them in `phrases`.
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
  """A byte-level BPE of at most vocab_size tokens; any text round-trips."""
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size - 1,  # one more is added below
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
  """Breaks every literal behind its first character, to a fixed point.

  The gap is a character that no literal contains: each round breaks what is
  there and makes nothing new. A literal of one character becomes a gap.

  Raises:
    ValueError: the literals leave no character to break them with.
  """
  literals = [literal for literal in literals if literal]
  free = [gap for gap in _GAPS if not any(gap in one for one in literals)]
  if not free:
    raise ValueError(f'every one of {_GAPS!r} stands in some added token')
  gap = free[0]
  while found := [literal for literal in literals if literal in text]:
    for literal in found:
      head, tail = literal[0], literal[1:]
      text = text.replace(literal, head + gap + tail if tail else gap)
  return text


def _byte_level_alphabet() -> dict[str, int]:
  """The printable stand-in of each byte in byte-level BPE vocabularies."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  table = {chr(byte): byte for byte in printable}
  table.update({chr(256 + n): byte for n, byte in enumerate(others)})
  return table
