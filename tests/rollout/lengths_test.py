"""How many lengths batches can have."""

import math

import pytest

from stppo_jax.rollout import pack


@pytest.mark.parametrize(
  ('bucket', 'max_length', 'expected'),
  [
    (256, 4096, 512),  # not 16 lengths, but 8
    (256, 4097, 768),
    (32, 192, 32),
    (128, 640, 128),
    (500, 100, 500),
    (1, 8, 1),
  ],
)
def test_there_are_at_most_eight_lengths(bucket, max_length, expected):
  unit = pack.unit(bucket, max_length=max_length)
  assert unit == expected and unit % bucket == 0
  assert math.ceil(max_length / unit) <= pack.MAX_LENGTHS
