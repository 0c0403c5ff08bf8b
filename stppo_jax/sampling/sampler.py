"""Drawing one token per row.

S rows, V vocabulary. A draw is the argmax of scores plus Gumbel noise (which
is a draw from their softmax); the noise of a row depends on its key and on the
token's position in the row alone, so that neither the slot, nor the batch, nor
the order of events changes what is drawn.

Truncation leaves only some tokens to be drawn: the `top_k` most probable; the
fewest most probable ones that hold `top_p` of the mass; those at least `min_p`
times as probable as the most probable one. Each is taken of what the one
before left.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn; static.

  Attributes:
    temperature: scores are logits divided by it.
    top_k: 0 = all.
    top_p: 1 = all.
    min_p: 0 = all.
  """

  temperature: float
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0


class SampledTokens(typing.NamedTuple):
  """One token per row.

  Attributes:
    tokens_S: int32.
    logprobs_S: float32, under softmax(logits / temperature), untruncated: what
      the trainer computes.
    truncated_logprobs_S: float32, under the distribution that was drawn from.
  """

  tokens_S: Array
  logprobs_S: Array
  truncated_logprobs_S: Array


def sample(
  logits_SV: Array,
  keys_S: Array,
  positions_S: Array,
  sampling: Sampling,
  greedy: Array | bool,
) -> SampledTokens:
  """The next token of every row.

  Args:
    logits_SV: float32.
    keys_S: typed keys.
    positions_S: int32, of the token that is drawn.
    sampling: temperature and truncation.
    greedy: take the likeliest token instead of drawing.
  """
  scores_SV = logits_SV / sampling.temperature
  left_SV = truncate(scores_SV, sampling)
  noisy_SV = jax.lax.cond(
    greedy,
    lambda: left_SV,
    lambda: left_SV + _gumbel(keys_S, positions_S, scores_SV.shape[1]),
  )
  tokens_S = jnp.argmax(noisy_SV, axis=-1).astype(jnp.int32)
  logprobs_S = _logprobs(scores_SV, tokens_S)
  if left_SV is scores_SV:
    return SampledTokens(tokens_S, logprobs_S, logprobs_S)
  return SampledTokens(tokens_S, logprobs_S, _logprobs(left_SV, tokens_S))


def truncate(scores_SV: Array, sampling: Sampling) -> Array:
  """The scores, -inf where a token may not be drawn.

  Equal scores share their fate, so that a few more than top_k may be left.
  """
  if 0 < sampling.top_k < scores_SV.shape[1]:
    kept_SK, _ = jax.lax.top_k(scores_SV, sampling.top_k)
    scores_SV = _at_least(scores_SV, kept_SK[:, -1:])
  if sampling.top_p < 1:
    sorted_SV = jnp.sort(scores_SV, axis=-1, descending=True)
    mass_SV = jnp.cumsum(jax.nn.softmax(sorted_SV, axis=-1), axis=-1)
    # Those that come before the mass is reached, and the one that reaches it.
    before_SV = jnp.pad(mass_SV[:, :-1], ((0, 0), (1, 0)))
    needed_SV = before_SV < sampling.top_p
    least_S1 = jnp.min(
      jnp.where(needed_SV, sorted_SV, jnp.inf), axis=-1, keepdims=True
    )
    scores_SV = _at_least(scores_SV, least_S1)
  if sampling.min_p > 0:
    most_S1 = jnp.max(scores_SV, axis=-1, keepdims=True)
    scores_SV = _at_least(scores_SV, most_S1 + jnp.log(sampling.min_p))
  return scores_SV


def _at_least(scores_SV, least_S1):
  enough_SV = scores_SV >= jnp.broadcast_to(least_S1, scores_SV.shape)
  return jnp.where(enough_SV, scores_SV, -jnp.inf)


def _logprobs(scores_SV, tokens_S):
  chosen_S1 = jnp.take_along_axis(scores_SV, tokens_S[:, None], axis=1)
  return chosen_S1[:, 0] - jax.nn.logsumexp(scores_SV, axis=-1)


def _gumbel(keys_S: Array, positions_S: Array, vocab_size: int) -> Array:
  """[S, V] noise that depends on each row's key and position alone."""

  def row(key, position):
    key = jax.random.fold_in(key, position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)

  return jax.vmap(row)(keys_S, positions_S)
