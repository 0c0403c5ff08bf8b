"""Computes log-probabilities, entropies and values of tokens from states.

Shape letters: B rows, L tokens of a row, M loss positions of a row, D width, V
vocabulary entries, Y outputs of a value head.

The hidden state at position l - 1 predicts token l, and the results for token l
stand at index l. Only this module shifts by one position. All arrays from the
logits on are float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.models import chunks
from stppo_jax.models import transformer
from stppo_jax.models import vocabulary

Array = jax.Array
logits = chunks.logits


class Values(NamedTuple):
  """The values of tokens.

  Attributes:
    values_BL: float32, the value of the state before each token.
    logprobs_BLY: float32, the logarithm of the probability of each bin; None if
      the value head has a single output.
  """

  values_BL: Array
  logprobs_BLY: Array | None


def token_logprobs_and_entropy(
  hidden_BLD: Array,
  output_VD: Array,
  tokens_BL: Array,
  *,
  loss_positions_BM: Array | None = None,
  temperature: float,
  chunk: int = 0,
  mesh: jax.sharding.Mesh | None = None,
  narrowed: bool = False,
) -> tuple[Array, Array]:
  """Returns log π(token l | tokens before l) and the entropy of π.

  The distribution π is softmax(logits / temperature) over the whole vocabulary,
  without truncation. Both results are in nats. Logits exist for one chunk of
  tokens at a time, and the backward pass computes them again, so the array
  [B, L, V] is never formed. Tokens outside the loss positions have no influence
  on the results or their gradients.

  Args:
    hidden_BLD, output_VD: final hidden states and output matrix;
      differentiable.
    tokens_BL: token ids.
    loss_positions_BM: int32, the positions l of the tokens whose results the
      caller wants, distinct within a row. Positions outside 1..L - 1 are
      filler and are ignored. None: all tokens.
    temperature: the number that divides the logits.
    chunk: see `chunks.Options`.
    mesh: mesh that the arrays are laid out on; None: one device.
    narrowed: whether `hidden_BLD` is [B, M, D] and holds only the states that
      predict the tokens at the loss positions, see `state_positions`.

  Returns:
    logprobs_BL and entropy_BL, float32; 0 outside the loss positions and at the
    first token, which no state predicts.
  """
  outputs: Any = vocabulary.logprobs_and_entropy(
    chunks.Options(temperature, chunk, mesh),
    hidden_BLD if narrowed else _gather_before(hidden_BLD, loss_positions_BM),
    output_VD,
    _gather_tokens(tokens_BL, loss_positions_BM),
  )
  logprobs_BL, entropy_BL = (
    _scatter(x, tokens_BL, loss_positions_BM) for x in outputs
  )
  return logprobs_BL, entropy_BL


def token_divergence(
  hidden_BLD: Array,
  output_VD: Array,
  ref_hidden_BLD: Array,
  ref_output_VD: Array,
  tokens_BL: Array,
  *,
  loss_positions_BM: Array | None = None,
  temperature: float,
  chunk: int,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Array, Array]:
  """Returns log-probabilities under policy and reference, and their KL.

      divergence_l = KL(ref || π) = Σ_v ref_v (log ref_v - log π_v)

  in nats. The sum runs over the whole vocabulary, and ref and π are the
  distributions softmax(logits / temperature) of token l.

  Args:
    hidden_BLD, output_VD: hidden states and output matrix of the policy;
      differentiable.
    ref_hidden_BLD, ref_output_VD: hidden states and output matrix of the
      reference; they get no gradient.
    tokens_BL, loss_positions_BM, temperature, chunk, mesh: see
      `token_logprobs_and_entropy`.

  Returns:
    logprobs_BL, ref_logprobs_BL, divergence_BL, float32; 0 outside the loss
    positions and at the first token.
  """
  outputs: Any = vocabulary.divergence(
    chunks.Options(temperature, chunk, mesh),
    _gather_before(hidden_BLD, loss_positions_BM),
    output_VD,
    jax.lax.stop_gradient(_gather_before(ref_hidden_BLD, loss_positions_BM)),
    jax.lax.stop_gradient(ref_output_VD),
    _gather_tokens(tokens_BL, loss_positions_BM),
  )
  logprobs_BL, ref_logprobs_BL, divergence_BL = (
    _scatter(x, tokens_BL, loss_positions_BM) for x in outputs
  )
  return logprobs_BL, ref_logprobs_BL, divergence_BL


def token_values(
  hidden_BLD: Array,
  head_DY: Array,
  tokens_BL: Array,
  *,
  loss_positions_BM: Array | None = None,
  bounds: tuple[float, float] | None = None,
) -> Values:
  """Returns the value of the state before each token.

  With Y = 1 the value is the output of the head or, with bounds, a sigmoid of
  the output, scaled to the bounds. With more outputs, the value is the mean of
  a distribution over Y bins, softmax(outputs). The first bin stands for the
  smallest value, the last one for the largest, and the others for values at
  equal distances between them.

  All results are 0 outside the loss positions and at the first token.

  Args:
    hidden_BLD: final hidden states. If loss positions are given, this is
      [B, M, D] and holds only the states that predict the tokens at the loss
      positions, see `state_positions`.
    head_DY: the value head.
    tokens_BL: token ids.
    loss_positions_BM: positions of the tokens whose values the caller wants,
      see `token_logprobs_and_entropy`; None: all tokens except the first.
    bounds: the smallest and the largest possible value; None: no limits, which
      needs Y = 1.
  """
  if loss_positions_BM is None:
    hidden_BLD = hidden_BLD[:, :-1]
  outputs_BMY = jnp.matmul(
    hidden_BLD,
    head_DY.astype(hidden_BLD.dtype),
    preferred_element_type=jnp.float32,
  )
  scatter = lambda x_BM: _scatter(x_BM, tokens_BL, loss_positions_BM)
  Y = outputs_BMY.shape[-1]
  if Y == 1:
    values_BM = outputs_BMY[..., 0]
    if bounds is not None:
      low, high = bounds
      values_BM = low + (high - low) * jax.nn.sigmoid(values_BM)
    return Values(scatter(values_BM), None)
  assert bounds is not None
  logprobs_BMY = jax.nn.log_softmax(outputs_BMY)
  bins_11Y = jnp.linspace(*bounds, Y)[None, None]
  values_BM = jnp.sum(jnp.exp(logprobs_BMY) * bins_11Y, axis=-1)
  return Values(scatter(values_BM), scatter(logprobs_BMY))


def state_positions(loss_positions_BM: Array, length: int) -> Array:
  """Returns the positions of the states that predict the loss positions.

  The state at position l - 1 predicts token l. Loss positions outside 1..L - 1
  are filler. For filler, the returned positions lie outside 0..L - 1, where
  `transformer.gather_states` gives zeros.

  Args:
    loss_positions_BM: the loss positions.
    length: L, the number of tokens of a row.
  """
  return _distinct_positions(loss_positions_BM, length) - 1


def _gather_before(hidden_BLD: Array, loss_positions_BM: Array | None) -> Array:
  """Returns the state at l - 1 for each loss position l [B, M, D].

  The state is 0 for filler, which is a loss position outside 1..L - 1.
  """
  if loss_positions_BM is None:
    return hidden_BLD[:, :-1]
  positions_BM = state_positions(loss_positions_BM, hidden_BLD.shape[1])
  return transformer.gather_states(hidden_BLD, positions_BM)


def _gather_tokens(tokens_BL: Array, loss_positions_BM: Array | None) -> Array:
  """Returns the tokens at the loss positions [B, M].

  For filler, which is a loss position outside 1..L - 1, the token is arbitrary.
  """
  if loss_positions_BM is None:
    return tokens_BL[:, 1:]
  return jnp.take_along_axis(tokens_BL, loss_positions_BM, axis=1, mode='clip')


def _scatter(
  x_BM: Array, tokens_BL: Array, loss_positions_BM: Array | None
) -> Array:
  """Returns x at the loss positions and 0 at all other positions.

  Args:
    x_BM: [B, M] or [B, M, Y]; the result is [B, L] or [B, L, Y].
    tokens_BL, loss_positions_BM: see `token_logprobs_and_entropy`.
  """
  if loss_positions_BM is None:
    return jnp.pad(x_BM, ((0, 0), (1, 0), (0, 0))[: x_BM.ndim])
  length = tokens_BL.shape[1]
  put = lambda x_M, places_M: (
    jnp.zeros((length, *x_M.shape[1:]), x_M.dtype)
    .at[places_M]
    .set(x_M, mode='drop', unique_indices=True)
  )
  return jax.vmap(put)(x_BM, _distinct_positions(loss_positions_BM, length))


def _distinct_positions(loss_positions_BM: Array, length: int) -> Array:
  """Returns the loss positions, with distinct filler outside of the row.

  Loss positions outside 1..L - 1 are filler. `_scatter` promises JAX, with
  `unique_indices=True`, that no index of a row occurs twice. So the filler of a
  row is replaced by L + 1, L + 2 and so on. The first is L + 1 and not L, so
  that filler - 1, the position of a state, is outside of the row too.
  """
  outside_M = length + 1 + jnp.arange(loss_positions_BM.shape[1])
  real_BM = (loss_positions_BM > 0) & (loss_positions_BM < length)
  return jnp.where(real_BM, loss_positions_BM, outside_M[None])
