"""Rotary frequencies, scaled and not, against numbers computed by hand."""

import math

import numpy as np
import pytest

from stppo_jax.models import config as model_config
from stppo_jax.models import rotary
from tests.models import tiny

# Heads of 8 at base 16: radians per token of the four pairs.
_PLAIN = np.array([1.0, 0.5, 0.25, 0.125])
# In 8 pi tokens the pairs turn 4 times as often: 4, 2, 1, 1/2.
_ORIGINAL = 8 * math.pi
_LLAMA3 = {
  'low_freq_factor': 1.0,
  'high_freq_factor': 3.0,
  'original_max_position_embeddings': _ORIGINAL,
}


def _frequencies(scaling):
  model = tiny.model(rope_theta=16.0, rope_scaling=scaling)
  return rotary.frequencies(model.config)


@pytest.mark.parametrize(
  ('scaling', 'expected'),
  [
    (None, _PLAIN),
    (model_config.RopeScaling('linear', 4.0), _PLAIN / 4),
    # Fast; half way down the ramp (1 / 2 + 1 / 2 / 4); slow; slow.
    (
      model_config.RopeScaling('llama3', 4.0, **_LLAMA3),
      _PLAIN * [1.0, 0.625, 0.25, 0.25],
    ),
  ],
)
def test_frequencies(scaling, expected):
  np.testing.assert_allclose(_frequencies(scaling), expected, rtol=1e-6)


def test_pairs_turn_by_position_times_frequency():
  model = tiny.model(
    rope_theta=16.0, rope_scaling=model_config.RopeScaling('linear', 2.0)
  )
  positions_BL = np.array([[0, 3, 7]], np.int32)
  x_BLNH = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
  rotation = rotary.rotation(model.config, positions_BL)
  turned = np.asarray(rotary.rotate(x_BLNH, rotation))
  # The pairs are (0, 4), (1, 5), ...: complex numbers that turn.
  pairs = x_BLNH[..., :4] + 1j * x_BLNH[..., 4:]
  angles = positions_BL[:, :, None, None] * (_PLAIN / 2)
  expected = pairs * np.exp(1j * angles)
  np.testing.assert_allclose(turned[..., :4], expected.real, atol=1e-5)
  np.testing.assert_allclose(turned[..., 4:], expected.imag, atol=1e-5)
