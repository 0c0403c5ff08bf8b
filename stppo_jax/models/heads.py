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


def token_divergence(
  hidden_BLD: Array,
  output_VD: Array,
  ref_hidden_BLD: Array,
  ref_output_VD: Array,
  tokens_BL: Array,
  *,
  temperature: float,
  chunk: int,
) -> tuple[Array, Array, Array]:
  """A policy beside its reference at every token, over the whole vocabulary.

      divergence_l = KL(reference || pi) = sum_v ref_v (log ref_v - log pi_v)

  of the two distributions of token l, softmax(logits / temperature); in nats,
  and 0 at the first token. Scores live for one chunk at a time, also in the
  backward pass, which computes them again: [B, L, V] is never held.

  Args:
    hidden_BLD, output_VD: of the policy; differentiable.
    ref_hidden_BLD, ref_output_VD: of the reference, which is data.
    tokens_BL: the sequences.
    temperature: of both.
    chunk: tokens of each row at a time.

  Returns:
    logprobs_BL, ref_logprobs_BL, divergence_BL float32.
  """
  ref_hidden_BLD, ref_output_VD = jax.lax.stop_gradient(
    (ref_hidden_BLD, ref_output_VD)
  )

  def about_next(_, part):
    hidden_BCD, ref_hidden_BCD, next_BC = part
    log_all_BCV, ref_log_all_BCV = (
      jax.nn.log_softmax(logits(hidden, output) / temperature, axis=-1)
      for hidden, output in (
        (hidden_BCD, output_VD),
        (ref_hidden_BCD, ref_output_VD),
      )
    )
    logprobs_BC, ref_logprobs_BC = (
      jnp.take_along_axis(x_BCV, next_BC[..., None], axis=-1)[..., 0]
      for x_BCV in (log_all_BCV, ref_log_all_BCV)
    )
    divergence_BC = jnp.sum(
      jnp.exp(ref_log_all_BCV) * (ref_log_all_BCV - log_all_BCV), axis=-1
    )
    return None, (logprobs_BC, ref_logprobs_BC, divergence_BC)

  parts = (hidden_BLD[:, :-1], ref_hidden_BLD[:, :-1], tokens_BL[:, 1:])
  _, stacked = jax.lax.scan(
    jax.checkpoint(about_next, prevent_cse=False),  # not needed in a scan
    None,
    tuple(_chunks(x, chunk) for x in parts),
  )
  size = tokens_BL.shape[1] - 1
  return tuple(_shifted(_whole(x)[:, :size]) for x in stacked)


def token_values(hidden_BLD: Array, scalar_D1: Array) -> Array:
  """values_BL float32: V before token l is known; 0 at the first token."""
  product = hidden_BLD[:, :-1] @ scalar_D1.astype(hidden_BLD.dtype)
  return _shifted(product[..., 0].astype(jnp.float32))


def _shifted(about_next: Array) -> Array:
  return jnp.pad(about_next, ((0, 0), (1, 0)))


def _chunks(x_BL: Array, chunk: int) -> Array:
  """[B, L, ...] -> [n, B, chunk, ...], padded with zeros; rows stay whole."""
  rows, size, *rest = x_BL.shape
  count = -(-size // chunk)
  padding = [(0, 0)] * x_BL.ndim
  padding[1] = (0, count * chunk - size)
  cut = jnp.pad(x_BL, padding).reshape(rows, count, chunk, *rest)
  return cut.swapaxes(0, 1)


def _whole(x_nBC: Array) -> Array:
  """[n, B, C] -> [B, n C]."""
  return x_nBC.swapaxes(0, 1).reshape(x_nBC.shape[1], -1)
