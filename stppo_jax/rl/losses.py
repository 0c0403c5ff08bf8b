"""The policy loss, built from the five axes, and the value loss.

B trajectories, L tokens. The policy loss of a microbatch, N the aggregate's
count of the whole minibatch:

  policy = sum_l a_l s_l term_l / N          a: aggregate weight, s: correction
  loss   = policy + kl_coefficient * kl - entropy_coefficient * entropy

kl (0 unless kl.where is 'loss') and entropy go through the same aggregate,
unscaled. All of it adds up over microbatches.

For norm='gradient' pull back `(policy, bias, other)`: the update's gradient is
g_policy / max(|c|, floor) + g_other, with c that of `bias`.
"""

import dataclasses
import typing

import chex
import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import aggregation
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import bounds as bounds_lib
from stppo_jax.rl import corrections
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import masking
from stppo_jax.rl import normalization
from stppo_jax.rl import objectives
from stppo_jax.rl import ratios

Array = jax.Array
Statistics = dict[str, typing.Any]
sg = jax.lax.stop_gradient


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyLoss:
  """The parts of the policy loss; scalars are divided by the global count.

  Attributes:
    loss: policy + other.
    policy: the policy terms, corrected unless norm is 'gradient'.
    bias: scalar whose gradient is c; 0 unless norm is 'gradient'.
    other: the KL term minus the entropy bonus, with their coefficients.
    entropy: without its coefficient.
    kl: without its coefficient; 0 unless it is in the loss.
    ratio_BL: at the level that is optimised, 1 off the mask.
    weights_BL: the corrections' multiplier of the policy terms.
    value_weights_BL: their multiplier of the value terms.
    cut_BL: bool, tokens whose gradient the objective cut.
    low, high: the bounds in force, scalars or [B, L].
  """

  loss: Array
  policy: Array
  bias: Array
  other: Array
  entropy: Array
  kl: Array
  ratio_BL: Array
  weights_BL: Array
  value_weights_BL: Array
  cut_BL: Array
  low: Array
  high: Array


def _normalized(algorithm, logprobs_BL, batch, statistics, **sums):
  """The token log-ratio as the row has it, and a multiplier of the terms."""
  log_ratio_BL = ratios.token_log_ratio(
    logprobs_BL, batch.old_logprobs_BL, batch.loss_mask_BL
  )
  normalize = normalization.NORMALIZATIONS[algorithm.ratio.normalize].function
  return normalize(log_ratio_BL, batch, statistics, **sums)


def _context(
  algorithm, log_ratio_BL, entropy_BL, batch, **sums
) -> loss_context_lib.LossContext:
  mask_BL = batch.loss_mask_BL

  def ratio_at(level):
    return jnp.exp(
      ratios.level_log_ratio(
        log_ratio_BL,
        batch,
        level=level,
        gradient=algorithm.ratio.gradient,
        reduce=algorithm.ratio.reduce,
        **sums,
      )
    )

  return loss_context_lib.LossContext(
    ratio_at,
    algorithm.ratio.level,
    # Advantages are data, whatever made them; the entropy only measures.
    sg(masking.select(batch.advantages_BL, mask_BL)),
    sg(masking.select(entropy_BL, mask_BL)),
    batch,
    **sums,
  )


def _trusted(algorithm, context, statistics) -> tuple[Array, Array]:
  """The absolute (low, high) in force."""
  options = algorithm.bounds.arguments()
  rule = bounds_lib.BOUNDS[options.pop('name')].function
  dtype = context.advantages_BL.dtype
  # An interval that moves is still not something to be learned.
  low, high = (
    sg(jnp.asarray(bound, dtype))
    for bound in rule(context, statistics, **options)
  )
  return low, high


def _corrections(algorithm):
  for name in algorithm.correction.names:
    options = getattr(algorithm.correction, name)
    yield name, corrections.CORRECTIONS[name], options


def _statistics(choice, options, *arrays, **arguments):
  """The statistics of a choice, () where it needs none."""
  if not choice.uses_statistics(options):
    return ()
  return choice.statistics(*arrays, **arguments)


def minibatch_statistics(
  algorithm: algorithm_lib.Algorithm,
  logprobs_BL: Array,
  entropy_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  num_turns: int,
  implementation: str = 'auto',
) -> Statistics:
  """What the loss must know of the whole minibatch, without gradient.

  Args:
    algorithm: the row.
    logprobs_BL, entropy_BL: of the policy, for every row of the minibatch.
    batch: the minibatch.
    num_turns: static, the most turns a row can have.
    implementation: of the segment sums.

  Returns:
    A tree for `policy_loss`; it has no leaves where the row needs nothing.
  """
  sums = {'num_turns': num_turns, 'implementation': implementation}
  logprobs_BL = sg(masking.select(logprobs_BL, batch.loss_mask_BL))
  log_ratio_BL = ratios.token_log_ratio(
    logprobs_BL, batch.old_logprobs_BL, batch.loss_mask_BL
  )
  normal = _statistics(
    normalization.NORMALIZATIONS[algorithm.ratio.normalize],
    algorithm.ratio,
    log_ratio_BL,
    batch,
    **sums,
  )
  log_ratio_BL, _ = _normalized(algorithm, logprobs_BL, batch, normal, **sums)
  context = _context(algorithm, log_ratio_BL, entropy_BL, batch, **sums)
  options = algorithm.bounds.arguments()
  bounds = _statistics(
    bounds_lib.BOUNDS[options.pop('name')],
    algorithm.bounds,
    context,
    **options,
  )
  low, high = _trusted(algorithm, context, bounds)
  return {
    'normalize': normal,
    'bounds': bounds,
    'corrections': {
      name: _statistics(
        choice, options, context, low, high, **options.arguments()
      )
      for name, choice, options in _corrections(algorithm)
    },
  }


def policy_loss(
  algorithm: algorithm_lib.Algorithm,
  logprobs_BL: Array,
  entropy_BL: Array,
  batch: batch_lib.TokenBatch,
  *,
  statistics: Statistics | None,
  count: Array | None,
  entropy_coefficient: Array | float,
  num_turns: int,
  implementation: str = 'auto',
) -> PolicyLoss:
  """The loss of one microbatch; see the module's docstring.

  Args:
    algorithm: the row.
    logprobs_BL: log pi_theta of the tokens, differentiable; anything off the
      loss mask.
    entropy_BL: of the policy at each token, differentiable.
    batch: with old log-probabilities and advantages; with reference
      log-probabilities where the KL is in the loss, the sampler's where a
      mismatch is corrected, sentence ids where the level is 'sentence'.
    statistics: `minibatch_statistics` of the minibatch; None forms them from
      this microbatch.
    count: `aggregation.aggregate_count` of the minibatch; None counts this
      microbatch.
    entropy_coefficient: of the entropy bonus.
    num_turns: static, the most turns a row can have.
    implementation: of the segment sums.
  """
  sums = {'num_turns': num_turns, 'implementation': implementation}
  mask_BL = batch.loss_mask_BL
  chex.assert_equal_shape(
    [logprobs_BL, entropy_BL, mask_BL, batch.old_logprobs_BL]
  )
  chex.assert_equal_shape([mask_BL, batch.advantages_BL])
  logprobs_BL = masking.select(logprobs_BL, mask_BL)
  if statistics is None:
    statistics = minibatch_statistics(
      algorithm, logprobs_BL, entropy_BL, batch, **sums
    )

  log_ratio_BL, scale_BL = _normalized(
    algorithm, logprobs_BL, batch, statistics['normalize'], **sums
  )
  context = _context(algorithm, log_ratio_BL, entropy_BL, batch, **sums)
  low, high = _trusted(algorithm, context, statistics['bounds'])
  ratio_BL = context.ratio_at(algorithm.ratio.level)
  objective = algorithm.objective.arguments()
  term_BL, cut_BL = objectives.OBJECTIVES[objective.pop('name')].function(
    ratio_BL, logprobs_BL, context.advantages_BL, low, high, **objective
  )

  value_scale_BL = jnp.ones_like(term_BL)
  bias_BL = jnp.zeros_like(term_BL)
  for name, choice, options in _corrections(algorithm):
    weights = choice.function(
      context,
      low,
      high,
      statistics['corrections'][name],
      **options.arguments(),
    )
    scale_BL = scale_BL * weights.policy_BL
    value_scale_BL = value_scale_BL * weights.value_BL
    bias_BL = bias_BL + weights.bias_BL

  weights_BL, own_count = aggregation.aggregate_weights(
    batch, logprobs_BL.dtype, **algorithm.aggregate.arguments(), **sums
  )
  count = own_count if count is None else count

  def aggregate(x_BL):
    return masking.divide(
      jnp.sum(weights_BL * masking.select(x_BL, mask_BL)), count
    )

  policy = aggregate(scale_BL * term_BL)
  entropy = aggregate(entropy_BL)
  kl = jnp.zeros_like(policy)
  if algorithm.kl.where == 'loss':
    estimator = algorithm.kl.estimator
    kl_BL = kl_lib.kl_estimate(
      logprobs_BL, batch.ref_logprobs_BL, mask_BL, estimator=estimator
    )
    kl = aggregate(kl_BL)
  other = algorithm.kl.coefficient * kl - entropy_coefficient * entropy
  return PolicyLoss(
    loss=policy + other,
    policy=policy,
    bias=aggregate(bias_BL * logprobs_BL),
    other=other,
    entropy=entropy,
    kl=kl,
    ratio_BL=sg(ratio_BL),
    weights_BL=scale_BL,
    value_weights_BL=value_scale_BL,
    cut_BL=cut_BL & mask_BL,
    low=low,
    high=high,
  )


class ValueLoss(typing.NamedTuple):
  """Sums of the value loss; the loss is total / (global) count.

  Attributes:
    total: sum of the terms.
    count: steps at which the critic is trained.
    clipped: steps where the clipped error was the larger one.
  """

  total: Array
  count: Array
  clipped: Array


def value_loss(
  values_BL: Array,
  old_values_BL: Array,
  returns_BL: Array,
  value_mask_BL: Array,
  *,
  clip: Array | float,
  weights_BL: Array | None = None,
) -> ValueLoss:
  """0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2).

  Args:
    values_BL: V of the value model in training, differentiable.
    old_values_BL: V before the first update.
    returns_BL: the targets.
    value_mask_BL: bool, the steps at which the critic is trained.
    clip: distance from the old value that is trusted.
    weights_BL: multiplier of the terms, `PolicyLoss.value_weights_BL`; the
      count is unchanged. None: 1.
  """
  chex.assert_equal_shape([values_BL, old_values_BL, returns_BL, value_mask_BL])
  values_BL = masking.select(values_BL, value_mask_BL)
  # Old values and targets are data.
  old_BL = sg(masking.select(old_values_BL, value_mask_BL))
  returns_BL = sg(masking.select(returns_BL, value_mask_BL))
  near_BL = jnp.clip(values_BL, old_BL - clip, old_BL + clip)
  plain_BL = jnp.square(values_BL - returns_BL)
  clipped_BL = jnp.square(near_BL - returns_BL)
  # A selection: at a tie, max() would halve the gradient of both.
  larger_BL = clipped_BL > plain_BL
  term_BL = 0.5 * jnp.where(larger_BL, clipped_BL, plain_BL)
  if weights_BL is not None:
    term_BL = sg(weights_BL) * term_BL
  total, count = masking.masked_total(term_BL, value_mask_BL)
  clipped, _ = masking.masked_total(
    larger_BL.astype(values_BL.dtype), value_mask_BL
  )
  return ValueLoss(total, count, clipped)
