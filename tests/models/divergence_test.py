"""The divergence of two policies: a float64 loop, its gradient, its memory."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import heads
from tests.models import tiny

_B, _L, _D, _V = 3, 7, 4, 9


def _arguments(seed=0, spread=0.5):
  """Returns the arguments of a divergence, the reference `spread` away."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  hidden, output = draw(_B, _L, _D), draw(_V, _D)
  near = lambda x: x + spread * draw(*x.shape)
  tokens = rng.integers(0, _V, (_B, _L)).astype(np.int32)
  return hidden, output, near(hidden), near(output), tokens


def _log_softmax(scores):
  scores = scores - scores.max()
  return scores - math.log(np.exp(scores).sum())


def _twin(hidden, output, ref_hidden, ref_output, tokens, temperature):
  """Returns the divergence by loops over the vocabulary, in float64."""
  hidden, output, ref_hidden, ref_output = (
    np.asarray(x, np.float64) for x in (hidden, output, ref_hidden, ref_output)
  )
  logprobs, ref_logprobs, divergence = np.zeros((3, *tokens.shape))
  for b in range(tokens.shape[0]):
    for i in range(1, tokens.shape[1]):
      log_pi = _log_softmax(output @ hidden[b, i - 1] / temperature)
      log_ref = _log_softmax(ref_output @ ref_hidden[b, i - 1] / temperature)
      logprobs[b, i] = log_pi[tokens[b, i]]
      ref_logprobs[b, i] = log_ref[tokens[b, i]]
      divergence[b, i] = sum(
        math.exp(r) * (r - p) for r, p in zip(log_ref, log_pi, strict=True)
      )
  return logprobs, ref_logprobs, divergence


@pytest.mark.parametrize(
  ('temperature', 'chunk'),
  [
    pytest.param(1.0, 1, marks=pytest.mark.slow),
    (0.7, 4 * _B),
    (1.0, 64 * _B),
  ],
)
def test_divergence_equals_a_float64_loop(temperature, chunk):
  arguments = _arguments()
  options = {'temperature': temperature, 'chunk': chunk}
  divergence = functools.partial(heads.token_divergence, **options)
  found = jax.jit(divergence)(*arguments)
  for x, expected in zip(found, _twin(*arguments, temperature), strict=True):
    assert x.dtype == jnp.float32
    np.testing.assert_allclose(x, expected, rtol=2e-6, atol=2e-6)


def test_chunks_do_not_change_the_gradient_and_the_reference_has_none():
  weights = np.random.default_rng(1).normal(size=(3, _B, _L))
  weights = weights.astype(np.float32)

  def total(chunk, *parts):
    found = heads.token_divergence(
      *parts, _arguments()[4], temperature=0.7, chunk=chunk
    )
    return sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True))

  gradient = lambda chunk: jax.jit(
    jax.grad(functools.partial(total, chunk), (0, 1, 2, 3))
  )(*_arguments()[:4])
  cut, whole = jax.device_get((gradient(4 * _B), gradient(0)))
  for c, w in zip(cut, whole, strict=True):
    np.testing.assert_allclose(c, w, rtol=1e-5, atol=1e-5)
  assert not np.any(cut[2]) and not np.any(cut[3])
  # d divergence / d log pi = -ref: finite differences of the twin.
  hidden, output, ref_hidden, ref_output, tokens = _arguments()

  def twin(hidden):
    found = _twin(hidden, output, ref_hidden, ref_output, tokens, 0.7)
    return sum(np.sum(w * x) for w, x in zip(weights, found, strict=True))

  for slot in ((0, 0, 1), (1, 3, 2), (2, 5, 0), (2, 6, 0)):
    step = np.zeros(hidden.shape)
    step[slot] = 1e-5
    difference = (twin(hidden + step) - twin(hidden - step)) / 2e-5
    assert cut[0][slot] == pytest.approx(difference, rel=1e-4, abs=1e-4)


def test_the_divergence_of_models_is_that_of_their_heads():
  model = dataclasses.replace(tiny.model(), chunk=8)
  both = tiny.params(model, 1), tiny.params(model, 2)
  tokens = np.random.default_rng(0).integers(0, 11, (2, 8)).astype(np.int32)
  divergence = jax.jit(functools.partial(model.divergence, temperature=0.7))
  positions = np.array([[1, 2, 3, 4, 5, 6, 7]] * 2, np.int32)
  found = divergence(*both, tokens, loss_positions_BM=positions)
  parts = [(tiny.hidden(model)(x, tokens), x['lm_head']) for x in both]
  expected = _twin(*parts[0], *parts[1], tokens, 0.7)
  for x, e in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, e, rtol=1e-5, atol=1e-5)
  assert np.all(np.asarray(found[2])[:, 1:] > 0)
  # With some loss positions only, the results at other tokens are 0.
  positions = np.array([[2, 5] + 5 * [8], [7] + 6 * [9]], np.int32)
  few = divergence(*both, tokens, loss_positions_BM=positions)
  asked = np.zeros(tokens.shape, bool)
  asked[[0, 0, 1], [2, 5, 7]] = True
  for x, e in zip(few, expected, strict=True):
    np.testing.assert_allclose(x, np.where(asked, e, 0), rtol=1e-5, atol=1e-5)
