"""The sentences of tokens are those of the text that they spell."""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from stppo_jax.rollout import pack
from tests.sampling import vocabularies


def test_sentences_equal_those_by_hand():
  pieces = [
    b'Yes',
    b'.',
    b' No',
    b'?! So',
    b'\n',
    b'3.14',
    b' \xe3\x80',
    b'\x82',
  ]
  split = pack.SentenceSplitter(pieces)
  # Yes. | No?! So | 3.14 | a full stop of another alphabet, in two tokens
  ids = np.array([0, 1, 2, 3, 5, 6, 7, 0])
  assert split(ids).tolist() == [1, 1, 2, 2, 3, 4, 4, 4]
  assert split(np.array([4, 4, 0])).tolist() == [1, 2, 3]
  assert split(ids).dtype == np.int32
  assert split(np.zeros(0, np.int32)).tolist() == []


def test_ids_beyond_the_tokenizer_end_no_sentence():
  split = pack.SentenceSplitter([b'a', b'.'])
  assert split(np.array([0, 2, 99, 1, 2])).tolist() == [1, 1, 1, 1, 2]


def _slow(token_bytes, ids):
  """Finds the ends in the whole text, then the tokens that contain them."""
  owners = [n for n, i in enumerate(ids) for _ in token_bytes[i]]
  text = b''.join(token_bytes[i] for i in ids).decode()
  closed, place = set(), 0
  for character in text:
    if character in '.?!\n':
      closed.add(owners[place])
    place += len(character.encode())
  assert place == len(owners)
  numbers, number = [], 1
  for n in range(len(ids)):
    numbers.append(number)
    if n in closed:
      number += 1
  return numbers


@functools.cache
def _splitter(name):
  """Returns the bytes of tokens, and what splits their ids."""
  pieces = vocabularies.PLAIN[name]().token_bytes()
  return pieces, pack.SentenceSplitter(pieces)


@settings(max_examples=60)
@given(
  text=st.lists(
    st.one_of(
      st.sampled_from(
        ['.', '?', '!', '\n', '...', '</think>', 'é', '。', '😀']
      ),
      st.text(st.characters(codec='utf-8'), max_size=4),
    ),
    max_size=12,
  ).map(''.join)
)
@pytest.mark.parametrize('name', vocabularies.PLAIN)
def test_sentences_of_tokens_are_those_of_the_text(name, text):
  tokenizer = vocabularies.PLAIN[name]()
  ids = tokenizer.encode_text(text)
  pieces, split = _splitter(name)
  assert split(ids).tolist() == _slow(pieces, ids)
