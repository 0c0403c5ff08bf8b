"""Samples one token for each row.

S rows, V vocabulary. A sample is the argmax of the logits plus Gumbel noise.
Its distribution is the softmax of the logits (the Gumbel-max trick). The noise
of a row depends only on the row's key and on the token's position in the row.
So neither the slot, nor the batch, nor the order of events changes the token.

Truncation limits the tokens to sample from. `top_k` is the number of most
probable tokens that are kept. With `top_p`, the smallest set of most probable
tokens is kept that has a total probability of at least `top_p`. With `min_p`, a
token is kept if its probability is at least `min_p` times the largest
probability. The three rules apply in this order, each to the tokens that the
previous rule has kept. Sources: top_p, arXiv 1904.09751; min_p, arXiv
2407.01082.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Holds the options of sampling, which are static in compiled programs.

  Attributes:
    temperature: the number that the logits are divided by.
    top_k: see the module; 0 keeps all tokens.
    top_p: see the module; 1 keeps all tokens.
    min_p: see the module; 0 keeps all tokens.
  """

  temperature: float
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0


class SampledTokens(typing.NamedTuple):
  """Holds one token for each row.

  Attributes:
    tokens_S: int32, the token ids.
    logprobs_S: float32, the log-probabilities under softmax(logits /
      temperature) without truncation, as the trainer computes them.
    truncated_logprobs_S: float32, the log-probabilities under the truncated
      distribution from which the tokens were sampled.
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
  *,
  branches: bool,
) -> SampledTokens:
  """Samples the next token of every row.

  Args:
    logits_SV: float32, before the temperature.
    keys_S: the typed key of each row.
    positions_S: int32, the position of the next token in its row.
    sampling: temperature and truncation.
    greedy: whether to take the most probable token instead of sampling.
    branches: whether the program branches on `greedy`, so that it makes noise
      only if it samples.
  """
  scaled_SV = logits_SV / sampling.temperature
  left_SV = truncate(scaled_SV, sampling)
  # A token that truncation removes has the logit -inf, which noise does not
  # change.
  noisy = lambda: left_SV + _gumbel(keys_S, positions_S, left_SV.shape[1])
  if branches:
    noisy_SV = jax.lax.cond(greedy, lambda: left_SV, noisy)
  else:
    noisy_SV = jnp.where(greedy, left_SV, noisy())
  tokens_S = _first_of_largest(noisy_SV)
  logprobs_S = _logprobs(scaled_SV, tokens_S)
  if left_SV is scaled_SV:
    return SampledTokens(tokens_S, logprobs_S, logprobs_S)
  return SampledTokens(tokens_S, logprobs_S, _logprobs(left_SV, tokens_S))


def truncate(logits_SV: Array, sampling: Sampling) -> Array:
  """Returns the logits, with -inf for the tokens that truncation removes.

  Tokens with equal logits are kept or removed together, so slightly more than
  `top_k` tokens may be kept.

  Args:
    logits_SV: float32, divided by the temperature.
    sampling: the options of truncation.
  """
  if 0 < sampling.top_k < logits_SV.shape[1]:
    largest, _ = jax.lax.top_k(logits_SV, sampling.top_k)
    logits_SV = _at_least(logits_SV, largest[:, -1:])
  if sampling.top_p < 1:
    sorted_SV = jnp.sort(logits_SV, axis=-1, descending=True)
    mass_SV = jnp.cumsum(jax.nn.softmax(sorted_SV, axis=-1), axis=-1)
    # The most probable tokens, up to and including the token at which their
    # total probability reaches top_p.
    before_SV = jnp.pad(mass_SV[:, :-1], ((0, 0), (1, 0)))
    needed_SV = before_SV < sampling.top_p
    least_S1 = jnp.min(
      jnp.where(needed_SV, sorted_SV, jnp.inf), axis=-1, keepdims=True
    )
    logits_SV = _at_least(logits_SV, least_S1)
  if sampling.min_p > 0:
    most_S1 = jnp.max(logits_SV, axis=-1, keepdims=True)
    logits_SV = _at_least(logits_SV, most_S1 + jnp.log(sampling.min_p))
  return logits_SV


def _first_of_largest(logits_SV: Array) -> Array:
  """Returns the argmax, several times faster than `jnp.argmax` on a CPU."""
  ids_1V = jnp.arange(logits_SV.shape[1], dtype=jnp.int32)[None]
  is_largest_SV = logits_SV == jnp.max(logits_SV, axis=-1, keepdims=True)
  # A nan is equal to nothing, so if the maximum is nan, the result is the last
  # id.
  return jnp.min(jnp.where(is_largest_SV, ids_1V, ids_1V[0, -1]), axis=-1)


def _at_least(logits_SV, least_S1):
  enough_SV = logits_SV >= jnp.broadcast_to(least_S1, logits_SV.shape)
  return jnp.where(enough_SV, logits_SV, -jnp.inf)


def _logprobs(logits_SV, tokens_S):
  chosen_S1 = jnp.take_along_axis(logits_SV, tokens_S[:, None], axis=1)
  return chosen_S1[:, 0] - jax.nn.logsumexp(logits_SV, axis=-1)


def _gumbel(keys_S: Array, positions_S: Array, vocab_size: int) -> Array:
  """Returns Gumbel noise [S, V], which depends only on keys and positions."""

  def row(key, position):
    key = jax.random.fold_in(key, position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)

  return jax.vmap(row)(keys_S, positions_S)
