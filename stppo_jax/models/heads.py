"""From hidden states to numbers about tokens: the one next-token shift.

B rows, L tokens, M asked-for tokens of a row, D width, V vocabulary. The hidden
state at l - 1 speaks about token l. Nobody else shifts. From the logits on,
everything is float32.
"""

import jax
import jax.numpy as jnp

from stppo_jax.models import chunks
from stppo_jax.models import transformer
from stppo_jax.models import vocabulary

Array = jax.Array
logits = chunks.logits


def token_logprobs_and_entropy(
  hidden_BLD: Array,
  output_VD: Array,
  tokens_BL: Array,
  positions_BM: Array | None = None,
  *,
  temperature: float,
  chunk: int = 0,
  mesh: jax.sharding.Mesh | None = None,
  narrowed: bool = False,
) -> tuple[Array, Array]:
  """log π(token l | tokens before l) and the entropy of that distribution.

  Both are of softmax(logits / temperature), untruncated, in nats. Scores live
  for one chunk at a time, also in the backward pass, which computes them again:
  [B, L, V] is never held. What is not asked for has no say, in the gradient
  neither.

  Args:
    hidden_BLD, output_VD: differentiable.
    tokens_BL: the sequences.
    positions_BM: int32, distinct l of the tokens asked for; what is not in
      1..L - 1 is none. None: all tokens.
    temperature: of the distribution.
    chunk: asked-for tokens of a device at a time; 0 = all.
    mesh: that the arrays are laid out on; None: one device.
    narrowed: the hidden states are [B, M, D], those at `before` the tokens.

  Returns:
    logprobs_BL, entropy_BL float32; 0 at tokens not asked for and at the first
    token, which nothing predicts.
  """
  found = vocabulary.logprobs_and_entropy(
    chunks.Options(temperature, chunk, mesh),
    hidden_BLD if narrowed else _before(hidden_BLD, positions_BM),
    output_VD,
    _at(tokens_BL, positions_BM),
  )
  return tuple(_back(x, tokens_BL, positions_BM) for x in found)


def token_divergence(
  hidden_BLD: Array,
  output_VD: Array,
  ref_hidden_BLD: Array,
  ref_output_VD: Array,
  tokens_BL: Array,
  positions_BM: Array | None = None,
  *,
  temperature: float,
  chunk: int,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Array, Array]:
  """A policy beside its reference, over the whole vocabulary.

      divergence_l = KL(reference || pi) = sum_v ref_v (log ref_v - log pi_v)

  of the two distributions of token l, softmax(logits / temperature); in nats.

  Args:
    hidden_BLD, output_VD: of the policy; differentiable.
    ref_hidden_BLD, ref_output_VD: of the reference, which is data.
    tokens_BL, positions_BM, temperature, chunk, mesh: see
      `token_logprobs_and_entropy`.

  Returns:
    logprobs_BL, ref_logprobs_BL, divergence_BL float32; 0 where not asked for
    and at the first token.
  """
  found = vocabulary.divergence(
    chunks.Options(temperature, chunk, mesh),
    _before(hidden_BLD, positions_BM),
    output_VD,
    jax.lax.stop_gradient(_before(ref_hidden_BLD, positions_BM)),
    jax.lax.stop_gradient(ref_output_VD),
    _at(tokens_BL, positions_BM),
  )
  return tuple(_back(x, tokens_BL, positions_BM) for x in found)


def token_values(hidden_BLD: Array, scalar_D1: Array) -> Array:
  """values_BL float32: V before token l is known; 0 at the first token."""
  return _shifted(_values(hidden_BLD[:, :-1], scalar_D1))


def token_values_at(
  hidden_BMD: Array, scalar_D1: Array, tokens_BL: Array, positions_BM: Array
) -> Array:
  """values_BL of some tokens, from the states `before` them; 0 elsewhere."""
  values_BM = _values(hidden_BMD, scalar_D1)
  return _back(values_BM, tokens_BL, positions_BM)


def before(positions_BM: Array, length: int) -> Array:
  """Places of the states that speak about the tokens; see `transformer.at`."""
  return _places(positions_BM, length) - 1


def _values(hidden_BMD: Array, scalar_D1: Array) -> Array:
  values_BM1 = jnp.matmul(
    hidden_BMD,
    scalar_D1.astype(hidden_BMD.dtype),
    preferred_element_type=jnp.float32,
  )
  return values_BM1[..., 0]


def _shifted(about_next: Array) -> Array:
  return jnp.pad(about_next, ((0, 0), (1, 0)))


def _before(hidden_BLD: Array, positions_BM: Array | None) -> Array:
  """[B, M, D]: the states that speak about the tokens; 0 about none."""
  if positions_BM is None:
    return hidden_BLD[:, :-1]
  places_BM = before(positions_BM, hidden_BLD.shape[1])
  return transformer.at(hidden_BLD, places_BM)


def _at(tokens_BL: Array, positions_BM: Array | None) -> Array:
  """[B, M]: the tokens; any about none."""
  if positions_BM is None:
    return tokens_BL[:, 1:]
  return jnp.take_along_axis(tokens_BL, positions_BM, axis=1, mode='clip')


def _back(
  about_BM: Array, tokens_BL: Array, positions_BM: Array | None
) -> Array:
  """[B, L]: each number at its token."""
  if positions_BM is None:
    return _shifted(about_BM)
  length = tokens_BL.shape[1]
  put = lambda x_M, places_M: (
    jnp.zeros(length, x_M.dtype)
    .at[places_M]
    .set(x_M, mode='drop', unique_indices=True)
  )
  return jax.vmap(put)(about_BM, _places(positions_BM, length))


def _places(positions_BM: Array, length: int) -> Array:
  """The positions; those of no token lie outside, each in another place.

  The place before is outside, too.
  """
  outside_M = length + 1 + jnp.arange(positions_BM.shape[1])
  real_BM = (positions_BM > 0) & (positions_BM < length)
  return jnp.where(real_BM, positions_BM, outside_M[None])
