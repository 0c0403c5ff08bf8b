"""From hidden states to numbers about tokens: the one next-token shift.

B rows, L tokens, D width, V vocabulary. The hidden state at l - 1 speaks about
token l. Nobody else shifts. From the logits on, everything is float32.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def logits(hidden: Array, output_VD: Array) -> Array:
  """[..., V] float32 scores of the token that follows each hidden state."""
  return jnp.einsum(
    '...d,vd->...v',
    hidden,
    output_VD.astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )


def token_logprobs_and_entropy(
  hidden_BLD: Array, output_VD: Array, tokens_BL: Array, *, temperature: float
) -> tuple[Array, Array]:
  """log π(token l | tokens before l) and the entropy of that distribution.

  Both are of softmax(logits / temperature), untruncated, in nats; the first
  token, which nothing predicts, gets 0 in both.

  Returns:
    logprobs_BL, entropy_BL float32.
  """
  scores_BLV = logits(hidden_BLD[:, :-1], output_VD) / temperature
  log_all_BLV = jax.nn.log_softmax(scores_BLV, axis=-1)
  chosen = jnp.take_along_axis(log_all_BLV, tokens_BL[:, 1:, None], axis=-1)
  entropy = -jnp.sum(jnp.exp(log_all_BLV) * log_all_BLV, axis=-1)
  return _shifted(chosen[..., 0]), _shifted(entropy)


def token_values(hidden_BLD: Array, scalar_D1: Array) -> Array:
  """values_BL float32: V before token l is known; 0 at the first token."""
  product = hidden_BLD[:, :-1] @ scalar_D1.astype(hidden_BLD.dtype)
  return _shifted(product[..., 0].astype(jnp.float32))


def _shifted(about_next: Array) -> Array:
  return jnp.pad(about_next, ((0, 0), (1, 0)))
