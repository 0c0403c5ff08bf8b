"""Aggregates, which turn the tokens' loss terms into a scalar.

B trajectories, L tokens, T turns. Every aggregate is a weighted sum over the
loss mask, divided by a count. Weights and count depend on the masks only. Rows
and turns without a token in the loss mask are not counted. These are the weight
of each token, and the count:

                   weight                     count
  token_mean       1                          tokens  (arXiv 2503.14476)
  turn_mean        1 / tokens of the turn     turns
  sequence_mean    1 / tokens of the row      rows    (arXiv 2402.03300)
  sequence_sum     1                          rows
  constant_length  1 / max_response_tokens    rows    (arXiv 2503.20783)

Weighted sums and counts add up over microbatches and devices. The sum is
divided once, by the count of the whole minibatch, so cutting the minibatch into
microbatches does not change the result.
"""

import functools

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib
from stppo_jax.rl import segments as segments_lib

Array = jax.Array


def _ones(batch, dtype):
  return batch.loss_mask_BL.astype(dtype)


def _valid_rows(batch, dtype):
  return jnp.sum(jnp.any(batch.loss_mask_BL, axis=1), dtype=dtype)


def segment_weights(
  level: str,
  batch: batch_lib.TokenBatch,
  dtype=jnp.float32,
  *,
  num_turns: int,
) -> tuple[Array, Array]:
  """Returns token weights with the sum 1 in each segment, and a segment count.

  Args:
    level: the kind of segments, one of `segments.LEVELS`, such as 'turn'.
    batch: the batch, whose loss mask and ids of the level are read.
    dtype: the dtype of weights and count.
    num_turns: static, the most turns a row can have.

  Returns:
    The weights [B, L], which are 1 / (tokens of the segment) on the mask and 0
    off the mask, and the number of segments that have a token in the mask.
  """
  if level == 'token':  # each token is a segment, so no segment sums are needed
    return _ones(batch, dtype), jnp.sum(batch.loss_mask_BL, dtype=dtype)
  segments = segments_lib.level_segments(level, batch, num_turns=num_turns)
  counts_BT = segments_lib.segment_counts(segments, dtype)
  # `divide` gives a segment without tokens the weight 0. The count leaves such
  # segments out, too.
  weights_BL = segments_lib.segment_spread(
    masking.divide(jnp.ones_like(counts_BT), counts_BT),
    segments,
  )
  return weights_BL, jnp.sum(counts_BT > 0, dtype=dtype)


def _sequence_sum(batch, dtype, *, num_turns):
  del num_turns
  return _ones(batch, dtype), _valid_rows(batch, dtype)


@options_lib.dataclass
class ConstantLength(options_lib.Named):
  """Options of the aggregate constant_length.

  Attributes:
    max_response_tokens: the length that divides the sum of every row.
  """

  max_response_tokens: float = options_lib.number(above=0.0)


def _constant_length(batch, dtype, *, num_turns, max_response_tokens):
  del num_turns
  return _ones(batch, dtype) / max_response_tokens, _valid_rows(batch, dtype)


AGGREGATES = {
  'token_mean': options_lib.Choice(functools.partial(segment_weights, 'token')),
  'turn_mean': options_lib.Choice(functools.partial(segment_weights, 'turn')),
  'sequence_mean': options_lib.Choice(
    functools.partial(segment_weights, 'sequence')
  ),
  'sequence_sum': options_lib.Choice(_sequence_sum),
  'constant_length': options_lib.Choice(_constant_length, ConstantLength),
}


def aggregate_weights(
  batch: batch_lib.TokenBatch,
  dtype=jnp.float32,
  *,
  name: str,
  num_turns: int,
  **options: Array | float,
) -> tuple[Array, Array]:
  """Returns the weight of every token [B, L], 0 off the mask, and the count.

  The aggregate of terms x is sum(weights * x) / count.

  Args:
    batch: the batch, whose loss mask and turn ids are read.
    dtype: the dtype of weights and count.
    name: a key of `AGGREGATES`.
    num_turns: static, the most turns a row can have.
    **options: the options of the aggregate, such as max_response_tokens.
  """
  return AGGREGATES[name].function(batch, dtype, num_turns=num_turns, **options)
