"""Log-probabilities in chunks: a float64 loop, gradients, poison, memory."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import heads
from tests.models import shapes

_B, _L, _D, _V = 3, 9, 4, 10
_TEMPERATURE = 0.7
# Row 1 has no loss position, row 2 only the last token; 0 and L are filler.
_POSITIONS = np.array(
  [[2, 3, 5, 8, 1], [9, 9, 9, 9, 0], [8, 9, 9, 9, 9]], np.int32
)
_ASKED = np.zeros((_B, _L), bool)
_ASKED[0, [1, 2, 3, 5, 8]] = _ASKED[2, 8] = True


def _arguments():
  """Returns hidden states, output matrix, tokens and two cotangents."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  tokens = rng.integers(0, _V, (_B, _L)).astype(np.int32)
  return draw(_B, _L, _D), draw(_V, _D), tokens, draw(_B, _L), draw(_B, _L)


def _asked(asks):
  """Returns at which tokens there are results; without positions at most."""
  return _ASKED if asks else np.tile(np.arange(_L) > 0, (_B, 1))


def _twin(hidden, output, tokens, asked):
  """Returns the results by loops over tokens, in float64."""
  logprobs, entropy = np.zeros((2, _B, _L))
  for b, token in np.argwhere(asked):
    z = np.float64(output) @ np.float64(hidden[b, token - 1]) / _TEMPERATURE
    log_p = z - z.max() - math.log(np.exp(z - z.max()).sum())
    logprobs[b, token] = log_p[tokens[b, token]]
    entropy[b, token] = -(np.exp(log_p) * log_p).sum()
  return logprobs, entropy


@functools.cache
def _value_and_gradient(chunk, asks):
  def total(hidden, output, tokens, of_logprobs, of_entropy, positions):
    found = heads.token_logprobs_and_entropy(
      hidden,
      output,
      tokens,
      loss_positions_BM=positions if asks else None,
      temperature=_TEMPERATURE,
      chunk=chunk,
    )
    of = of_logprobs, of_entropy
    weighted = [jnp.where(x != 0, o * x, 0.0) for o, x in zip(of, found)]
    return sum(jnp.sum(x) for x in weighted), found

  return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))


@functools.cache
def _differences(asks):
  """Returns places and the twin's differences, of states and of the matrix."""
  hidden, output, tokens, *of = _arguments()

  def total(*arrays):
    found = _twin(*arrays, tokens, _asked(asks))
    return sum(np.sum(o * x) for o, x in zip(of, found, strict=True))

  def differences(arrays, number, places):
    by = []
    for slot in places:
      up, down = (list(map(np.float64, arrays)) for _ in range(2))
      up[number][slot] += 1e-6
      down[number][slot] -= 1e-6
      by.append((total(*up) - total(*down)) / 2e-6)
    return tuple(np.transpose(places)), by

  places = [(0, 0, 1), (0, 4, 3), (0, 7, 0), (2, 7, 2), (1, 3, 0)]
  of_matrix = list(np.ndindex(_V, _D))
  arrays = hidden, output
  return differences(arrays, 0, places), differences(arrays, 1, of_matrix)


# All tokens at once, one of a row, chunks that do and do not fill the last one,
# and more than there are; at loss positions and everywhere.
@pytest.mark.parametrize(
  ('chunk', 'asks'),
  [
    (0, True),
    (6, True),
    (11, False),
    (192, False),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in ((1, False), (15, True))
    ),
  ],
)
def test_results_and_gradients_equal_a_float64_loop(chunk, asks):
  arguments = _arguments()
  (_, found), gradients = jax.device_get(
    _value_and_gradient(chunk, asks)(*arguments, _POSITIONS)
  )
  expected = _twin(*arguments[:3], _asked(asks))
  for x, e in zip(found, expected, strict=True):
    assert x.dtype == jnp.float32
    np.testing.assert_allclose(x, e, atol=2e-6)
    assert not np.any(x[~_asked(asks)])
  for gradient, (places, differences) in zip(gradients, _differences(asks)):
    np.testing.assert_allclose(gradient[places], differences, atol=1e-5)


@pytest.mark.parametrize('chunk', [0, 2 * _B])
@pytest.mark.parametrize('poison', [np.nan, np.inf])
def test_tokens_outside_loss_positions_have_no_influence(chunk, poison):
  hidden, output, tokens, *of = _arguments()
  run = _value_and_gradient(chunk, True)
  clean = run(hidden, output, tokens, *of, _POSITIONS)
  before = np.roll(_ASKED, -1, axis=1)  # states before loss positions
  hidden = np.where(before[..., None], hidden, np.float32(poison))
  tokens = np.where(_ASKED, tokens, np.int32(2**31 - 1))
  of = [np.where(_ASKED, o, np.float32(poison)) for o in of]
  found = run(hidden, output, tokens, *of, _POSITIONS)
  jax.tree.map(np.testing.assert_array_equal, found, clean)
  assert not np.any(np.asarray(found[1][0])[~before])


def test_results_at_an_extreme_temperature_are_finite():
  hidden, output, tokens, *of = _arguments()
  arguments = (1e4 * hidden, output, tokens, *of, _POSITIONS)
  # Tests compile with fewer passes, which cost the last bits.
  run = _value_and_gradient(2 * _B, True).lower(*arguments)
  run = run.compile({'xla_backend_optimization_level': 3})
  (_, (logprobs, entropy)), gradients = jax.device_get(run(*arguments))
  jax.tree.map(lambda x: np.testing.assert_(np.isfinite(x).all()), gradients)
  assert np.max(np.abs(entropy)) < 1e-6
  assert np.all(logprobs < 1e-6)


def test_products_take_the_dtype_of_the_states():
  hidden, output, tokens, *of = _arguments()
  rounded = hidden.astype(jnp.bfloat16)
  run = _value_and_gradient(2 * _B, True)
  (_, found), gradients = run(rounded, output, tokens, *of, _POSITIONS)
  assert [x.dtype.name for x in found] == ['float32'] * 2
  assert [x.dtype.name for x in gradients] == ['bfloat16', 'float32']
  (_, expected), exact = run(
    rounded.astype(np.float32),
    output.astype(jnp.bfloat16).astype(np.float32),
    tokens,
    *of,
    _POSITIONS,
  )
  for x, e in zip(found, expected, strict=True):
    np.testing.assert_allclose(x, e, atol=2e-6)
  for x, e in zip(gradients, exact, strict=True):
    np.testing.assert_allclose(np.float32(x), e, atol=2e-2 * np.abs(e).max())


@pytest.mark.parametrize('kind', ['entropy', 'divergence'])
def test_logits_of_all_tokens_are_never_formed(kind):
  B, L, M, D, V, chunk = 4, 64, 32, 8, 512, 16
  draw = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  function, models = {
    'entropy': (heads.token_logprobs_and_entropy, 1),
    'divergence': (heads.token_divergence, 2),
  }[kind]

  def total(hidden, output, *rest):
    *rest, positions = rest
    options = dict(temperature=1.0, chunk=chunk, loss_positions_BM=positions)
    return sum(map(jnp.sum, function(hidden, output, *rest, **options)))

  arrays = (draw(B, L, D), draw(V, D)) * models
  gradient = jax.jit(jax.grad(total, (0, 1)))
  program = gradient.lower(*arrays, ints(B, L), ints(B, M)).compile()
  assert shapes.largest(program) == chunk * V  # one chunk and no more
