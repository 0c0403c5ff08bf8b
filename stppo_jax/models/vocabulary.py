"""What all words of the vocabulary say together about some tokens.

B rows, M tokens of each, N tokens of a chunk, D width, V vocabulary, W words of
one device, X some of them. The
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
  def about(words, hidden_ND, tokens_N):
    z_NW = words.scores(hidden_ND)
    top_N = words.top(z_NW)
    below_NW = z_NW - top_N[:, None]
    e_NW = jnp.exp(below_NW)
    total_N, weighted_N = words.sums(e_NW, e_NW * below_NW)
    log_N = jnp.log(total_N)
    normalizer_N = top_N + log_N
    return (
      words.chosen(z_NW, tokens_N) - normalizer_N,
      log_N - weighted_N / total_N,
      normalizer_N,
    )

  matrices = (output_VD,)
  logprobs_BM, entropy_BM, normalizer_BM = chunks.forward(
    options, about, matrices, (hidden_BMD, tokens_BM)
  )
  about_tokens = tokens_BM, logprobs_BM, entropy_BM, normalizer_BM
  return (logprobs_BM, entropy_BM), (hidden_BMD, matrices, about_tokens)


def _entropy_backward(options, kept, gradients):
  hidden_BMD, matrices, about_tokens = kept

  def pull(words, hidden_ND, tokens_N, logprobs_N, entropy_N, *others):
    normalizer_N, of_logprobs_N, of_entropy_N = others

    def rule(log_p_NX):
      """Of words that are not the token."""
      entropy_N1, of_logprobs_N1, of_entropy_N1 = (
        x_N[:, None] for x_N in (entropy_N, of_logprobs_N, of_entropy_N)
      )
      of_p_NX = of_logprobs_N1 + of_entropy_N1 * (log_p_NX + entropy_N1)
      return -jnp.exp(log_p_NX) * of_p_NX

    return words.pull(
      rule(words.scores(hidden_ND) - normalizer_N[:, None]),
      rule(logprobs_N[:, None])[:, 0] + of_logprobs_N,
      hidden_ND,
      tokens_N,
    )

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
  def about(words, hidden_ND, ref_hidden_ND, tokens_N):
    z_NW, ref_z_NW = words.scores(hidden_ND), words.scores(ref_hidden_ND, 1)
    top_N, ref_top_N = words.top(z_NW), words.top(ref_z_NW)
    below_NW, ref_below_NW = (
      z_NW - top_N[:, None],
      ref_z_NW - ref_top_N[:, None],
    )
    ref_e_NW = jnp.exp(ref_below_NW)
    total_N, ref_total_N, apart_N = words.sums(
      jnp.exp(below_NW), ref_e_NW, ref_e_NW * (ref_below_NW - below_NW)
    )
    log_N, ref_log_N = jnp.log(total_N), jnp.log(ref_total_N)
    normalizer_N, ref_normalizer_N = top_N + log_N, ref_top_N + ref_log_N
    return (
      words.chosen(z_NW, tokens_N) - normalizer_N,
      words.chosen(ref_z_NW, tokens_N) - ref_normalizer_N,
      apart_N / ref_total_N + log_N - ref_log_N,
      normalizer_N,
      ref_normalizer_N,
    )

  matrices = output_VD, ref_output_VD
  *found, normalizer_BM, ref_normalizer_BM = chunks.forward(
    options, about, matrices, (hidden_BMD, ref_hidden_BMD, tokens_BM)
  )
  logprobs_BM, ref_logprobs_BM, _ = found
  about_tokens = (
    ref_hidden_BMD,
    tokens_BM,
    logprobs_BM,
    ref_logprobs_BM,
    normalizer_BM,
    ref_normalizer_BM,
  )
  return tuple(found), (hidden_BMD, matrices, about_tokens)


def _divergence_backward(options, kept, gradients):
  hidden_BMD, matrices, about_tokens = kept
  of_logprobs_BM, _, of_divergence_BM = gradients

  def pull(words, hidden_ND, ref_hidden_ND, tokens_N, *numbers):
    logprobs_N, ref_logprobs_N, *numbers = numbers
    normalizer_N, ref_normalizer_N, of_logprobs_N, of_divergence_N = numbers

    def rule(log_p_NX, log_ref_NX):
      """Of words that are not the token."""
      return (of_divergence_N - of_logprobs_N)[:, None] * jnp.exp(
        log_p_NX
      ) - of_divergence_N[:, None] * jnp.exp(log_ref_NX)

    of_chosen_N1 = rule(logprobs_N[:, None], ref_logprobs_N[:, None])
    return words.pull(
      rule(
        words.scores(hidden_ND) - normalizer_N[:, None],
        words.scores(ref_hidden_ND, 1) - ref_normalizer_N[:, None],
      ),
      of_chosen_N1[:, 0] + of_logprobs_N,
      hidden_ND,
      tokens_N,
    )

  gradient_BMD, gradient_VD = chunks.backward(
    options,
    pull,
    matrices,
    (hidden_BMD, *about_tokens, of_logprobs_BM, of_divergence_BM),
  )
  return gradient_BMD, gradient_VD, *(None,) * 3


divergence.defvjp(_divergence_forward, _divergence_backward)
