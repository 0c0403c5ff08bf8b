"""Records of tokens: characters, numbers by hand, turns without training."""

import json

import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax import types
from stppo_jax.records import token_records
from stppo_jax.records import trajectory_metrics
from stppo_jax.sampling import tokenizer as tokenizer_lib

# Prompt of 2 tokens, a turn of 3, an observation of 1, a turn of 2.
_MASK = [False, False, True, True, True, False, True, True]


class _Bytes:
  """A tokenizer with a token for each byte."""

  def token_bytes(self):
    return [bytes([n]) for n in range(256)]

  def decode(self, ids):
    return bytes(bytearray(ids)).decode(errors='replace')


def _trajectory(status=types.TrajectoryStatus.COMPLETED):
  def ids(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def turn(text, observation):
    return types.Turn(
      ids(text), np.zeros(len(ids(text))), ids(observation), 'search'
    )

  return types.Trajectory(
    question=types.Question('q', 'why?', ('x',), 'nq'),
    prompt_ids=ids('ab'),
    turns=(turn('abc', 'o'), turn('yz', '')),
    rewards={'em': 1.0},
    status=status,
  )


def _details(mask=_MASK, values=True, weights=None):
  def row(x):
    return np.array([[0.0] * 8, x], np.float32)

  numbers = np.arange(8) / 3
  return batch_lib.TokenDetails(
    loss_mask_BL=np.array([[False] * 8, mask]),
    old_logprobs_BL=row(-numbers),
    ratio_BL=row(1 + numbers),
    turn_ratio_BL=row([1, 1, 1.25, 1.25, 1.25, 1, 0.5, 0.5]),
    entropy_BL=row(numbers),
    advantages_BL=row([0, 0, 1, 1, np.inf, 0, -1, -1]),
    values_BL=row(numbers) if values else None,
    cut_BL=np.array([[False] * 8, [False] * 3 + [True] * 2 + [False] * 3]),
    weights_BL=row([1] * 8 if weights is None else weights),
  )


def test_numbers_stand_at_the_tokens_of_their_turn():
  first, second = token_records.turn_records(
    _trajectory(), _details(), 1, _Bytes()
  )
  assert first == {
    'characters': [1, 1, 1],
    'old_logprob': [-0.6667, -1.0, -1.333],
    'ratio': [1.667, 2.0, 2.333],
    'entropy': [0.6667, 1.0, 1.333],
    'advantage': [1.0, 1.0, None],  # JSON has no infinity
    'value': [0.6667, 1.0, 1.333],
    'turn_ratio': 1.25,
    'clipped': [1, 2],
  }
  assert second['turn_ratio'] == 0.5 and second['clipped'] == []
  assert second['ratio'] == [3.0, 3.333]


def test_what_is_not_there_is_absent():
  weights = [1, 1, 1, 0, 1, 1, 1, 1]
  first, second = token_records.turn_records(
    _trajectory(), _details(values=False, weights=weights), 1, _Bytes()
  )
  assert 'value' not in first
  assert first['weight'] == [1.0, 0.0, 1.0] and 'weight' not in second


def test_the_first_rows_of_a_step_have_numbers():
  records = trajectory_metrics.records(
    [_trajectory()] * 3, _Bytes(), _details()
  )
  have = [['tokens' in turn for turn in record['turns']] for record in records]
  assert have == [[False, False], [True, True], [False, False]]
  json.dumps(records, allow_nan=False)
  # What is not trained on has none.
  details = _details(mask=[False] * 8)
  none = token_records.turn_records(_trajectory(), details, 1, _Bytes())
  assert none == [None, None]


@pytest.mark.parametrize(
  'text', ['plain', 'h\u00e9llo \u20ac', '\U0001f600 x', '', '\u202eabc']
)
def test_characters_of_tokens_add_up_to_the_text(text):
  tokenizer = tokenizer_lib.train_byte_level_bpe(['some words'], 300)
  ids = tokenizer.encode_text(text)
  # Also if a turn ends within a character.
  for end in range(len(ids) + 1):
    counts = token_records.character_counts(ids[:end], tokenizer)
    assert len(counts) == end
    assert sum(counts) == len(tokenizer.decode(ids[:end]))
