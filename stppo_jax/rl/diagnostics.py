"""Measures of an update: the ratios at every level, clipping and values.

B trajectories, L tokens, T turns. A `Diagnostics` is a pytree of sums, minima
and maxima. `merge` combines the diagnostics of several microbatches, updates
and hosts, and `summarize` turns them into metrics. All means are over tokens:
the ratio of a turn counts once for each of its policy tokens.

These are the metrics. {level} is token, turn or sequence, and also sentence if
the batch has sentence ids. Ratios are measured at all these levels, whichever
level is optimised, and before any normalisation:

  ratio/{level}/{mean,std,min,max}
  ratio/{level}/std/turn_{k}   the standard deviation in turn k = 1, 2, ...;
                               absent if no row has a turn k
  ratio/{level}/ess            (sum r)^2 / (n sum r^2), 1 if all r are equal
  clipfrac/{level}/{low,high}  share of tokens whose ratio is below or above the
                               bounds, whatever the sign of A
  clipfrac/{level}/{low,high}/turn_{k}  the same share in turn k; absent if no
                               row has a turn k
  actor/pg_clipfrac            share of tokens whose gradient was cut
  actor/ppo_kl                 mean of log pi_old - log pi
  actor/entropy                mean entropy in nats
  stab/norm_clipped, stab/norm_unclipped, stab/rho
                               N_U, N_V and rho, see `clipping_bias`
  stab/scale                   mean multiplier of the policy terms
  stab/rejected                share of tokens whose multiplier is 0
  bounds/low, bounds/high      mean lower and upper bound of the ratio
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import clipping_bias
from stppo_jax.rl import losses
from stppo_jax.rl import masking
from stppo_jax.rl import ratios
from stppo_jax.rl import segments as segments_lib

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Diagnostics:
  """Sums, minima and maxima over tokens, by name.

  `merge` combines the diagnostics of two sets of tokens.
  """

  sums: dict[str, Array]
  minima: dict[str, Array]
  maxima: dict[str, Array]


def merge(a: Diagnostics, b: Diagnostics) -> Diagnostics:
  """Returns the diagnostics of the tokens of both arguments together."""
  return Diagnostics(
    jax.tree.map(jnp.add, a.sums, b.sums),
    jax.tree.map(jnp.minimum, a.minima, b.minima),
    jax.tree.map(jnp.maximum, a.maxima, b.maxima),
  )


def merge_stacked(stacked: Diagnostics) -> Diagnostics:
  """Merges diagnostics along the leading axis, such as the axis of a scan."""
  return Diagnostics(
    jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked.sums),
    jax.tree.map(lambda x: jnp.min(x, axis=0), stacked.minima),
    jax.tree.map(lambda x: jnp.max(x, axis=0), stacked.maxima),
  )


def _levels(batch):
  """Returns the levels for which the batch has segment ids."""
  lacking = {'sentence'} if batch.sentence_ids_BL is None else set()
  return [level for level in segments_lib.LEVELS if level not in lacking]


def policy_diagnostics(
  algorithm: algorithm_lib.Algorithm,
  loss: losses.PolicyLoss,
  logprobs_BL: Array,
  entropy_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  num_turns: int,
) -> Diagnostics:
  """Returns the diagnostics of one microbatch.

  Args:
    algorithm: the algorithm.
    loss: the result of `losses.policy_loss` for the same arrays.
    logprobs_BL: log pi_theta of the tokens.
    entropy_BL: the policy's entropy at each token in nats.
    batch: the microbatch, with old log-probabilities and advantages.
    num_turns: static, the most turns a row can have.
  """
  assert batch.old_logprobs_BL is not None
  assert batch.advantages_BL is not None
  mask_BL = batch.loss_mask_BL
  log_ratio_BL = ratios.token_log_ratio(
    logprobs_BL, batch.old_logprobs_BL, mask_BL
  )
  low, high = loss.low, loss.high
  turns = segments_lib.level_segments('turn', batch, num_turns=num_turns)

  def total(x_BL):
    return jnp.sum(masking.select(x_BL, mask_BL))

  def by_turn(event_BL):
    counted_BL = masking.select(event_BL.astype(log_ratio_BL.dtype), mask_BL)
    return jnp.sum(segments_lib.segment_totals(counted_BL, turns), axis=0)

  sums = {
    'tokens': jnp.sum(mask_BL, dtype=log_ratio_BL.dtype),
    'tokens_T': by_turn(mask_BL),
    'cut': total(loss.cut_BL.astype(log_ratio_BL.dtype)),
    'log_ratio': total(log_ratio_BL),
    'entropy': total(entropy_BL),
    'scale': total(loss.weights_BL),
    'rejected': total((loss.weights_BL == 0).astype(log_ratio_BL.dtype)),
    'low': total(jnp.broadcast_to(low, mask_BL.shape)),
    'high': total(jnp.broadcast_to(high, mask_BL.shape)),
  }
  # Off the mask, ratios are replaced by infinities, so that a microbatch
  # without tokens leaves the merged extrema as they are. `summarize` shows 0 if
  # there is no token at all.
  minima, maxima, ratio_by_level = {}, {}, {}
  for level in _levels(batch):
    ratio_BL = ratio_by_level[level] = jnp.exp(
      ratios.level_log_ratio(
        log_ratio_BL,
        batch,
        level=level,
        gradient='segment',
        reduce=algorithm.ratio.reduce,
        num_turns=num_turns,
      )
    )
    # The sums are of r - 1. With sums of r, cancellation in float32 would lose
    # the variance of ratios near 1.
    excess_BL = ratio_BL - 1
    sums[f'{level}/excess_T'] = by_turn(excess_BL)
    sums[f'{level}/excess_squared_T'] = by_turn(jnp.square(excess_BL))
    sums[f'{level}/excess'] = total(excess_BL)
    sums[f'{level}/excess_squared'] = total(jnp.square(excess_BL))
    minima[level] = jnp.min(jnp.where(mask_BL, ratio_BL, jnp.inf))
    maxima[level] = jnp.max(jnp.where(mask_BL, ratio_BL, -jnp.inf))
    outside = {'low': ratio_BL < low, 'high': ratio_BL > high}
    for side, event_BL in outside.items():
      event_BL = event_BL & mask_BL
      sums[f'{level}/{side}'] = jnp.sum(event_BL, dtype=log_ratio_BL.dtype)
      sums[f'{level}/{side}_T'] = by_turn(event_BL)
  bias = clipping_bias.batch_sums(
    ratio_by_level[algorithm.correction.clipping_bias.level],
    batch.advantages_BL,
    mask_BL,
    low,
    high,
  )
  sums.update(bias._asdict())
  return Diagnostics(
    sums=jax.lax.stop_gradient(sums),  # metrics are not differentiated
    minima=jax.lax.stop_gradient(minima),
    maxima=jax.lax.stop_gradient(maxima),
  )


def _share(total: float, count: float) -> float:
  return float(total / count) if count else 0.0


def _moments(total: float, squares: float, count: float) -> tuple[float, float]:
  """Returns mean and variance from sums of x and x^2; 0 if the count is 0."""
  mean = _share(total, count)
  return mean, max(_share(squares, count) - mean**2, 0.0)


def summarize(diagnostics: Diagnostics) -> dict[str, float]:
  """Returns the metrics as Python numbers; all are 0 if there is no token."""
  # Computed in float64, because a variance is the small difference of two large
  # numbers.
  sums, minima, maxima = jax.tree.map(
    lambda x: np.asarray(x, np.float64),
    (diagnostics.sums, diagnostics.minima, diagnostics.maxima),
  )
  tokens, tokens_T = float(sums['tokens']), sums['tokens_T']
  metrics = {}
  # Turns that no row has are left out; the index of turn 1 is 0.
  turns = [(turn, count) for turn, count in enumerate(tokens_T) if count]
  for level in minima:
    excess, variance = _moments(
      sums[f'{level}/excess'], sums[f'{level}/excess_squared'], tokens
    )
    mean = 1 + excess if tokens else 0.0
    name = f'ratio/{level}'
    metrics[f'{name}/mean'] = mean
    metrics[f'{name}/std'] = float(np.sqrt(variance))
    metrics[f'{name}/min'] = float(minima[level]) if tokens else 0.0
    metrics[f'{name}/max'] = float(maxima[level]) if tokens else 0.0
    metrics[f'{name}/ess'] = _share(mean**2, mean**2 + variance)
    excess_T, squares_T = (
      sums[f'{level}/{moment}_T'] for moment in ('excess', 'excess_squared')
    )
    for turn, count in turns:
      _, own = _moments(excess_T[turn], squares_T[turn], count)
      metrics[f'{name}/std/turn_{turn + 1}'] = float(np.sqrt(own))
    for side in ('low', 'high'):
      name = f'clipfrac/{level}/{side}'
      metrics[name] = _share(sums[f'{level}/{side}'], tokens)
      for turn, count in turns:
        outside = sums[f'{level}/{side}_T'][turn]
        metrics[f'{name}/turn_{turn + 1}'] = _share(outside, count)
  clipped = np.sqrt(_share(sums['clipped_squares'], sums['clipped_count']))
  kept = np.sqrt(_share(sums['kept_squares'], sums['kept_count']))
  return metrics | {
    'actor/pg_clipfrac': _share(sums['cut'], tokens),
    'actor/ppo_kl': -_share(sums['log_ratio'], tokens),
    'actor/entropy': _share(sums['entropy'], tokens),
    'stab/rho': float(clipped / (kept + clipping_bias.RHO_EPSILON)),
    'stab/scale': _share(sums['scale'], tokens),
    'stab/norm_clipped': float(clipped),
    'stab/norm_unclipped': float(kept),
    'stab/rejected': _share(sums['rejected'], tokens),
    'bounds/low': _share(sums['low'], tokens),
    'bounds/high': _share(sums['high'], tokens),
  }


def describe(name: str, x: Array, mask: Array) -> dict[str, Array]:
  """Returns {name}/{mean,min,max} of x over the mask; 0 for an empty mask."""
  some = jnp.any(mask)
  least = jnp.min(jnp.where(mask, x, jnp.inf))
  most = jnp.max(jnp.where(mask, x, -jnp.inf))
  return {
    f'{name}/mean': masking.masked_mean(x, mask),
    f'{name}/min': jnp.where(some, least, 0),
    f'{name}/max': jnp.where(some, most, 0),
  }


def critic_diagnostics(batch: batch_lib.TokenBatch) -> dict[str, Array]:
  """Returns metrics of the critic's values and of its targets, the returns.

  Only tokens of `value_mask_BL`, where the value model is trained, are read.
  `critic/vf_explained_var` is 1 - var(returns - values) / var(returns), and 0
  if the returns do not vary.

  Returns:
    The scalars critic/vf_explained_var and
    critic/{values,returns}/{mean,min,max}; all are 0 if `value_mask_BL` is
    false everywhere.
  """
  value_mask_BL = batch.value_mask_BL
  assert value_mask_BL is not None
  assert batch.values_BL is not None and batch.returns_BL is not None
  values_BL = masking.select(batch.values_BL, value_mask_BL)
  returns_BL = masking.select(batch.returns_BL, value_mask_BL)
  _, variance = masking.masked_moments(returns_BL, value_mask_BL)
  _, missed = masking.masked_moments(returns_BL - values_BL, value_mask_BL)
  return {
    'critic/vf_explained_var': masking.divide(variance - missed, variance),
    **describe('critic/values', values_BL, value_mask_BL),
    **describe('critic/returns', returns_BL, value_mask_BL),
  }


# e^60 is 1e26: a sum over 1e12 such tokens is finite in float32.
LOG_WEIGHT_LIMIT = 60.0


def mismatch(
  old_logprobs_BL: Array, sampler_logprobs_BL: Array, loss_mask_BL: Array
) -> dict[str, Array]:
  """Returns scalar metrics of how much sampler and trainer differ.

  k = pi_old (trainer) / mu (sampler) is the ratio of a token, before
  `rl/corrections.py` truncates it. The metrics are

    mismatch/logprob_abs_diff             max |log k|
    mismatch/logprob_abs_diff_{mean,p99}  mean and 99th percentile of |log k|
    mismatch/k3                           mean of k - 1 - log k, an estimate of
                                          KL(mu || pi_old)
    mismatch/weight_raw_{mean,max}        mean and maximum of k
    mismatch/sequence_log_weight_raw_max  max over rows of |sum log k|
    mismatch/ess                          (sum k)^2 / (n sum k^2)

  The product of k over a long row overflows in every dtype, so the logarithm of
  the product is measured. If log k of a token is above 60, then k, k3 and ess
  are computed with log k = 60, so that no sum over tokens overflows. (e^60 is
  large enough to show in the metrics that something is wrong.) All metrics are
  0 if the loss mask is false everywhere.

  Args:
    old_logprobs_BL: log pi_old of the tokens, by the trainer.
    sampler_logprobs_BL: log mu of the tokens, as the sampler reported them.
    loss_mask_BL: bool, the tokens that are measured.
  """
  chex.assert_equal_shape([old_logprobs_BL, sampler_logprobs_BL, loss_mask_BL])
  log_k_BL = masking.select(old_logprobs_BL - sampler_logprobs_BL, loss_mask_BL)
  bounded_BL = jnp.minimum(log_k_BL, LOG_WEIGHT_LIMIT)
  k_BL = masking.select(jnp.exp(bounded_BL), loss_mask_BL)
  # k and k / max k have the same effective sample size. It is computed from
  # k / max k, because squares of k could overflow or all become 0.
  top = jnp.max(bounded_BL, where=loss_mask_BL, initial=-jnp.inf)
  share_BL = masking.select(jnp.exp(bounded_BL - top), loss_mask_BL)
  mean_share = masking.masked_mean(share_BL, loss_mask_BL)
  return {
    'mismatch/logprob_abs_diff': jnp.max(jnp.abs(log_k_BL)),
    'mismatch/logprob_abs_diff_mean': masking.masked_mean(
      jnp.abs(log_k_BL), loss_mask_BL
    ),
    'mismatch/logprob_abs_diff_p99': _percentile_99(
      jnp.abs(log_k_BL), loss_mask_BL
    ),
    'mismatch/k3': masking.masked_mean(
      jnp.expm1(bounded_BL) - bounded_BL, loss_mask_BL
    ),
    'mismatch/weight_raw_mean': masking.masked_mean(k_BL, loss_mask_BL),
    'mismatch/weight_raw_max': jnp.max(k_BL),
    'mismatch/sequence_log_weight_raw_max': jnp.max(
      jnp.abs(jnp.sum(log_k_BL, axis=1))
    ),
    'mismatch/ess': masking.divide(
      jnp.square(mean_share),
      masking.masked_mean(jnp.square(share_BL), loss_mask_BL),
    ),
  }


def mismatch_of_segments(
  batch: batch_lib.TokenBatch, *, num_turns: int
) -> dict[str, Array]:
  """Returns scalar metrics of k = pi_old / mu for turns and trajectories.

  `mismatch` defines the k of a token. The k of a segment is the geometric mean
  ('mean') or the product ('sum') of the k of its tokens. The metrics are the
  mean and the maximum of the segments' k over policy tokens, before any
  truncation:

    mismatch/{turn,sequence}/{mean,sum}/weight_raw_mean
    mismatch/{turn,sequence}/{mean,sum}/weight_raw_max

  If log k is above 60, k is computed with log k = 60. All metrics are 0 if the
  loss mask is false everywhere.

  Args:
    batch: the batch, with the log-probabilities of trainer and sampler.
    num_turns: static, the most turns a row can have.
  """
  old_BL, sampler_BL = batch.old_logprobs_BL, batch.sampler_logprobs_BL
  assert old_BL is not None and sampler_BL is not None
  return weights_of_segments(
    'mismatch', old_BL - sampler_BL, batch, num_turns=num_turns
  )


def weights_of_segments(
  name: str, log_k_BL: Array, batch: batch_lib.TokenBatch, *, num_turns: int
) -> dict[str, Array]:
  """Returns the metrics of `mismatch_of_segments` for ratios of any kind.

  Args:
    name: the prefix of the metrics, in the place of 'mismatch'.
    log_k_BL: the logarithm of the tokens' ratios.
    batch, num_turns: see `mismatch_of_segments`.
  """
  mask_BL = batch.loss_mask_BL
  log_k_BL = masking.select(log_k_BL, mask_BL)
  metrics = {}
  for level in ('turn', 'sequence'):
    segments = segments_lib.level_segments(level, batch, num_turns=num_turns)
    totals_BT = segments_lib.segment_totals(log_k_BL, segments)
    counts_BT = segments_lib.segment_counts(segments, log_k_BL.dtype)
    means_BT = masking.divide(totals_BT, counts_BT)
    # `ratios.level_log_ratio` is not used here, because it clips log k.
    for reduce, log_BT in {'mean': means_BT, 'sum': totals_BT}.items():
      k_BL = segments_lib.segment_spread(
        jnp.exp(jnp.minimum(log_BT, LOG_WEIGHT_LIMIT)),
        segments,
      )
      which = f'{name}/{level}/{reduce}/weight_raw'
      metrics[f'{which}_mean'] = masking.masked_mean(k_BL, mask_BL)
      metrics[f'{which}_max'] = jnp.max(masking.select(k_BL, mask_BL))
  return metrics


def _percentile_99(x_BL: Array, mask_BL: Array) -> Array:
  """Returns the 99th percentile of x over the mask; 0 for an empty mask."""
  # Off the mask x is replaced by inf, which is sorted behind the selected x.
  ordered = jnp.sort(jnp.where(mask_BL, x_BL, jnp.inf), axis=None)
  count = jnp.sum(mask_BL)
  index = count - count // 100 - 1
  return jnp.where(count > 0, ordered[jnp.maximum(index, 0)], 0.0)
