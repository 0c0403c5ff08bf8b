"""Computes log-probabilities, entropy and divergence over the vocabulary.

Shape letters: B rows, M tokens of a row, C tokens of a chunk, D width, V
vocabulary entries, W vocabulary entries on one device.

The logits of a chunk of tokens are formed, used and dropped. The backward pass
forms them again, see `chunks`. As residuals, the forward pass saves its inputs
and a few numbers per token: the log-probability, the entropy and
log Σ_v exp(z_v). With the last number, the backward pass gets probabilities
from logits without another reduction. With z = hidden . output / temperature,
p = softmax(z) and H the entropy of p,

    d log p_token / d z_v = [v = token] - p_v
    d H / d z_v = -p_v (log p_v + H)
    d KL(ref || p) / d z_v = p_v - ref_v

In the first line, the term [v = token] is 1 at one entry per token and 0
elsewhere. The gradient of the logit of this entry is computed separately and
written into the array of gradients, so that no one-hot array is formed.

All arrays from the logits on are float32. The operands of matrix products have
the dtype of the hidden states, and products add up in float32.
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
  """Returns log p_token and H of the distribution after each hidden state.

  Args:
    options: see `chunks.Options`.
    hidden_BMD: hidden states, differentiable.
    output_VD: output matrix, differentiable.
    tokens_BM: the token after each hidden state.

  Returns:
    Two arrays [B, M], float32, in nats.
  """
  return _entropy_forward(options, hidden_BMD, output_VD, tokens_BM)[0]


def _entropy_forward(options, hidden_BMD, output_VD, tokens_BM):
  def per_token(shard, hidden_CD, tokens_C):
    z_CW = shard.logits(hidden_CD)
    max_C = shard.max(z_CW)
    # With x = logit - largest logit, the entropy is
    # log Σ e^x - Σ x e^x / Σ e^x. This form needs two sums over the vocabulary,
    # which devices can add up, and no stored probabilities.
    below_CW = z_CW - max_C[:, None]
    e_CW = jnp.exp(below_CW)
    total_C, weighted_C = shard.sums(e_CW, e_CW * below_CW)
    log_C = jnp.log(total_C)
    normalizer_C = max_C + log_C
    return (
      shard.chosen(z_CW, tokens_C) - normalizer_C,
      log_C - weighted_C / total_C,
      normalizer_C,
    )

  matrices = (output_VD,)
  logprobs_BM, entropy_BM, normalizer_BM = chunks.forward(
    options, per_token, matrices, (hidden_BMD, tokens_BM)
  )
  per_token_BM = tokens_BM, logprobs_BM, entropy_BM, normalizer_BM
  return (logprobs_BM, entropy_BM), (hidden_BMD, matrices, per_token_BM)


def _entropy_backward(options, residuals, gradients):
  hidden_BMD, matrices, per_token_BM = residuals

  def pull_back(shard, hidden_CD, tokens_C, logprobs_C, entropy_C, *others):
    normalizer_C, d_logprobs_C, d_entropy_C = others

    def rule(log_p):
      """Returns the gradient of logits, from their log-probabilities.

      The term [v = token] is left out, see the docstring of the module.
      """
      entropy_C1, d_logprobs_C1, d_entropy_C1 = (
        x_C[:, None] for x_C in (entropy_C, d_logprobs_C, d_entropy_C)
      )
      d_p = d_logprobs_C1 + d_entropy_C1 * (log_p + entropy_C1)
      return -jnp.exp(log_p) * d_p

    return shard.pull_back(
      rule(shard.logits(hidden_CD) - normalizer_C[:, None]),
      rule(logprobs_C[:, None])[:, 0] + d_logprobs_C,
      hidden_CD,
      tokens_C,
    )

  gradient_BMD, gradient_VD = chunks.backward(
    options, pull_back, matrices, (hidden_BMD, *per_token_BM, *gradients)
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
  """Returns log p_token, log ref_token and KL(ref || p) per hidden state.

  The reference gets no gradient.

  Args:
    options: see `chunks.Options`.
    hidden_BMD, output_VD: hidden states and output matrix of the policy,
      differentiable.
    ref_hidden_BMD, ref_output_VD: hidden states and output matrix of the
      reference.
    tokens_BM: the token after each hidden state.

  Returns:
    Three arrays [B, M], float32, in nats.
  """
  return _divergence_forward(
    options, hidden_BMD, output_VD, ref_hidden_BMD, ref_output_VD, tokens_BM
  )[0]


def _divergence_forward(
  options, hidden_BMD, output_VD, ref_hidden_BMD, ref_output_VD, tokens_BM
):
  def per_token(shard, hidden_CD, ref_hidden_CD, tokens_C):
    z_CW, ref_z_CW = shard.logits(hidden_CD), shard.logits(ref_hidden_CD, 1)
    max_C, ref_max_C = shard.max(z_CW), shard.max(ref_z_CW)
    below_CW, ref_below_CW = (
      z_CW - max_C[:, None],
      ref_z_CW - ref_max_C[:, None],
    )
    ref_e_CW = jnp.exp(ref_below_CW)
    total_C, ref_total_C, weighted_C = shard.sums(
      jnp.exp(below_CW), ref_e_CW, ref_e_CW * (ref_below_CW - below_CW)
    )
    log_C, ref_log_C = jnp.log(total_C), jnp.log(ref_total_C)
    normalizer_C, ref_normalizer_C = max_C + log_C, ref_max_C + ref_log_C
    return (
      shard.chosen(z_CW, tokens_C) - normalizer_C,
      shard.chosen(ref_z_CW, tokens_C) - ref_normalizer_C,
      weighted_C / ref_total_C + log_C - ref_log_C,
      normalizer_C,
      ref_normalizer_C,
    )

  matrices = output_VD, ref_output_VD
  logprobs_BM, ref_logprobs_BM, divergence_BM, *normalizers = chunks.forward(
    options, per_token, matrices, (hidden_BMD, ref_hidden_BMD, tokens_BM)
  )
  per_token_BM = (
    ref_hidden_BMD,
    tokens_BM,
    logprobs_BM,
    ref_logprobs_BM,
    *normalizers,
  )
  results = logprobs_BM, ref_logprobs_BM, divergence_BM
  return results, (hidden_BMD, matrices, per_token_BM)


def _divergence_backward(options, residuals, gradients):
  hidden_BMD, matrices, per_token_BM = residuals
  d_logprobs_BM, _, d_divergence_BM = gradients

  def pull_back(shard, hidden_CD, ref_hidden_CD, tokens_C, *numbers):
    logprobs_C, ref_logprobs_C, *numbers = numbers
    normalizer_C, ref_normalizer_C, d_logprobs_C, d_divergence_C = numbers

    def rule(log_p, log_ref):
      """Returns the gradient of logits, from their log-probabilities.

      `log_ref` are the reference's log-probabilities of the same entries. The
      term [v = token] is left out, see the docstring of the module.
      """
      return (d_divergence_C - d_logprobs_C)[:, None] * jnp.exp(
        log_p
      ) - d_divergence_C[:, None] * jnp.exp(log_ref)

    d_chosen_C1 = rule(logprobs_C[:, None], ref_logprobs_C[:, None])
    return shard.pull_back(
      rule(
        shard.logits(hidden_CD) - normalizer_C[:, None],
        shard.logits(ref_hidden_CD, 1) - ref_normalizer_C[:, None],
      ),
      d_chosen_C1[:, 0] + d_logprobs_C,
      hidden_CD,
      tokens_C,
    )

  gradient_BMD, gradient_VD = chunks.backward(
    options,
    pull_back,
    matrices,
    (hidden_BMD, *per_token_BM, d_logprobs_BM, d_divergence_BM),
  )
  return gradient_BMD, gradient_VD, *(None,) * 3


divergence.defvjp(_divergence_forward, _divergence_backward)
