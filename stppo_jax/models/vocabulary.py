"""What all words of the vocabulary say together about some tokens.

B rows, M tokens of each, C of them in a chunk, D width, V vocabulary. The
scores of a chunk are formed, used and dropped, and formed again in the backward
pass; what stays between the passes is a few numbers per token. With
z = hidden . output / temperature, p = softmax(z) and H its entropy,

    d log p_token / d z_v = [v = token] - p_v
    d H / d z_v = -p_v (log p_v + H)
    d KL(ref || p) / d z_v = p_v - ref_v

Everything is float32 from the scores on; a product of two matrices takes the
dtype of the hidden states and adds up in float32.
"""

import functools

import jax
import jax.numpy as jnp

from stppo_jax.models import chunks

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def logprobs_and_entropy(
  options: chunks.Options,
  hidden_BMD: Array,
  output_VD: Array,
  tokens_BM: Array,
) -> tuple[Array, Array]:
  """log p_token and H after each hidden state; float32, nats."""
  return _entropy_forward(options, hidden_BMD, output_VD, tokens_BM)[0]


def _entropy_forward(options, hidden_BMD, output_VD, tokens_BM):
  def about(words, hidden_BCD, tokens_BC):
    z_BCV = words.scores(hidden_BCD)
    top_BC1 = words.max(z_BCV)
    z_BCV -= top_BC1
    e_BCV = jnp.exp(z_BCV)
    total_BC, weighted_BC, chosen_BC = words.sum(
      e_BCV, e_BCV * z_BCV, jnp.where(words.are(tokens_BC), z_BCV, 0.0)
    )
    log_BC = jnp.log(total_BC)
    return (
      chosen_BC - log_BC,
      log_BC - weighted_BC / total_BC,
      top_BC1[..., 0] + log_BC,
    )

  matrices = (output_VD,)
  logprobs_BM, entropy_BM, normalizer_BM = chunks.forward(
    options, about, matrices, (hidden_BMD, tokens_BM)
  )
  about_tokens = tokens_BM, normalizer_BM, entropy_BM
  return (logprobs_BM, entropy_BM), (hidden_BMD, matrices, about_tokens)


def _entropy_backward(options, kept, gradients):
  hidden_BMD, matrices, about_tokens = kept

  def pull(words, hidden_BCD, tokens_BC, *numbers):
    normalizer_BC1, entropy_BC1, of_logprobs_BC1, of_entropy_BC1 = (
      x_BC[..., None] for x_BC in numbers
    )
    log_p_BCV = words.scores(hidden_BCD) - normalizer_BC1
    of_p_BCV = of_logprobs_BC1 + of_entropy_BC1 * (log_p_BCV + entropy_BC1)
    chosen_BCV = jnp.where(words.are(tokens_BC), of_logprobs_BC1, 0.0)
    return chosen_BCV - jnp.exp(log_p_BCV) * of_p_BCV

  gradient_BMD, gradient_VD = chunks.backward(
    options, pull, matrices, (hidden_BMD, *about_tokens, *gradients)
  )
  return gradient_BMD, gradient_VD, None


logprobs_and_entropy.defvjp(_entropy_forward, _entropy_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def divergence(
  options: chunks.Options,
  hidden_BMD: Array,
  output_VD: Array,
  ref_hidden_BMD: Array,
  ref_output_VD: Array,
  tokens_BM: Array,
) -> tuple[Array, Array, Array]:
  """log p_token, log ref_token and KL(ref || p); float32, nats.

  The reference is data: no gradient goes there.
  """
  return _divergence_forward(
    options, hidden_BMD, output_VD, ref_hidden_BMD, ref_output_VD, tokens_BM
  )[0]


def _divergence_forward(
  options, hidden_BMD, output_VD, ref_hidden_BMD, ref_output_VD, tokens_BM
):
  def about(words, hidden_BCD, ref_hidden_BCD, tokens_BC):
    z_BCV = words.scores(hidden_BCD)
    ref_z_BCV = words.scores(ref_hidden_BCD, 1)
    tops = words.max(z_BCV), words.max(ref_z_BCV)
    z_BCV, ref_z_BCV = z_BCV - tops[0], ref_z_BCV - tops[1]
    e_BCV, are_BCV = jnp.exp(ref_z_BCV), words.are(tokens_BC)
    total_BC, ref_total_BC, apart_BC, chosen_BC, ref_chosen_BC = words.sum(
      jnp.exp(z_BCV),
      e_BCV,
      e_BCV * (ref_z_BCV - z_BCV),
      jnp.where(are_BCV, z_BCV, 0.0),
      jnp.where(are_BCV, ref_z_BCV, 0.0),
    )
    log_BC, ref_log_BC = jnp.log(total_BC), jnp.log(ref_total_BC)
    return (
      chosen_BC - log_BC,
      ref_chosen_BC - ref_log_BC,
      apart_BC / ref_total_BC + log_BC - ref_log_BC,
      tops[0][..., 0] + log_BC,
      tops[1][..., 0] + ref_log_BC,
    )

  matrices = output_VD, ref_output_VD
  *found, normalizer_BM, ref_normalizer_BM = chunks.forward(
    options, about, matrices, (hidden_BMD, ref_hidden_BMD, tokens_BM)
  )
  about_tokens = ref_hidden_BMD, tokens_BM, normalizer_BM, ref_normalizer_BM
  return tuple(found), (hidden_BMD, matrices, about_tokens)


def _divergence_backward(options, kept, gradients):
  hidden_BMD, matrices, about_tokens = kept
  of_logprobs_BM, _, of_divergence_BM = gradients

  def pull(
    words,
    hidden_BCD,
    ref_hidden_BCD,
    tokens_BC,
    normalizer_BC,
    ref_normalizer_BC,
    of_logprobs_BC,
    of_divergence_BC,
  ):
    by_token = lambda x_BC: x_BC[..., None]
    p_BCV = jnp.exp(words.scores(hidden_BCD) - by_token(normalizer_BC))
    ref_BCV = jnp.exp(
      words.scores(ref_hidden_BCD, 1) - by_token(ref_normalizer_BC)
    )
    chosen_BCV = jnp.where(words.are(tokens_BC), by_token(of_logprobs_BC), 0.0)
    return (
      chosen_BCV
      + by_token(of_divergence_BC - of_logprobs_BC) * p_BCV
      - by_token(of_divergence_BC) * ref_BCV
    )

  gradient_BMD, gradient_VD = chunks.backward(
    options,
    pull,
    matrices,
    (hidden_BMD, *about_tokens, of_logprobs_BM, of_divergence_BM),
  )
  return gradient_BMD, gradient_VD, *(None,) * 3


divergence.defvjp(_divergence_forward, _divergence_backward)
