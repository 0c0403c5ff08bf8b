"""The policy loss, built from an algorithm.

B trajectories, L tokens. The policy loss of a microbatch, where count is the
aggregate's divisor for the whole minibatch:

  policy = sum_l a_l s_l term_l / count
  loss   = policy + kl_coefficient * kl - entropy_coefficient * entropy

term_l is the objective at token l, a_l the token's weight in the aggregate, and
s_l the product of the corrections' weights and the normalisation's multiplier.
kl and entropy go through the same aggregate, without s_l. If kl.where is not
'loss', kl is 0. The losses of the microbatches of a minibatch add up to the
minibatch's loss.

If the clipping-bias correction divides the gradient (norm='gradient'), each of
the three terms in `clipping_bias.LossTerms` is differentiated separately, see
`clipping_bias.term_gradients`.
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
from stppo_jax.rl import kl as kl_lib
from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import masking
from stppo_jax.rl import objectives
from stppo_jax.rl import ratios

Array = jax.Array
sg = jax.lax.stop_gradient


class Statistics(typing.NamedTuple):
  """The numbers of a whole minibatch that the loss of each microbatch reads.

  Attributes:
    normalize: the numbers that the normalisation reads, or ().
    bounds: the numbers that the bounds read, or ().
    objective: the numbers that the objective reads, or ().
    corrections: name of a correction -> the numbers that it reads, or ().
  """

  normalize: typing.Any
  bounds: typing.Any
  objective: typing.Any
  corrections: dict[str, typing.Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyLoss:
  """The policy loss and its terms, divided by the count of the minibatch.

  Attributes:
    loss: policy + other.
    policy: the policy term.
    bias: a scalar whose gradient is the bias c, see `clipping_bias`; 0 if that
      correction does not divide the gradient.
    other: the KL term minus the entropy bonus, with their coefficients.
    entropy: the aggregated entropy in nats, without its coefficient.
    kl: the aggregated divergence in nats, without its coefficient; 0 if the
      loss has no KL term.
    ratio_BL: the ratio at the optimised level, 1 off the mask.
    weights_BL: the multiplier of the policy terms, s_l.
    value_weights_BL: the corrections' multiplier of the value terms.
    cut_BL: bool, the tokens whose gradient the objective cut.
    low, high: the bounds of the ratio, scalars or [B, L].
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


def _context(
  algorithm, logprobs_BL, entropy_BL, batch, statistics, num_turns
) -> tuple[loss_context_lib.LossContext, Array]:
  """Returns a `LossContext`, and the normalisation's factor of each term.

  The argument `statistics` holds the minibatch statistics of the normalisation
  only.
  """
  mask_BL = batch.loss_mask_BL
  log_ratio_BL = ratios.token_log_ratio(
    logprobs_BL, batch.old_logprobs_BL, mask_BL
  )
  normalize = ratios.NORMALIZATIONS[algorithm.ratio.normalize].function
  log_ratio_BL, scale_BL = normalize(
    log_ratio_BL, batch, statistics, num_turns=num_turns
  )

  def ratio_at(level):
    return jnp.exp(
      ratios.level_log_ratio(
        log_ratio_BL,
        batch,
        level=level,
        gradient=algorithm.ratio.gradient,
        reduce=algorithm.ratio.reduce,
        num_turns=num_turns,
      )
    )

  context = loss_context_lib.LossContext(
    ratio_at,
    algorithm.ratio.level,
    # Advantages are data, and the context's entropy only scales bounds, so no
    # gradient flows into either array.
    sg(masking.select(batch.advantages_BL, mask_BL)),
    sg(masking.select(entropy_BL, mask_BL)),
    logprobs_BL,
    batch,
    num_turns=num_turns,
  )
  return context, scale_BL


def _bounds(algorithm, context, statistics) -> tuple[Array, Array]:
  """Returns the absolute bounds (low, high) of the ratio."""
  rule = bounds_lib.BOUNDS[algorithm.bounds.name].function
  dtype = context.advantages_BL.dtype
  # Adaptive bounds depend on the policy. They are detached, so that they are
  # constants in the gradient.
  low, high = (
    sg(jnp.asarray(bound, dtype))
    for bound in rule(context, statistics, **algorithm.bounds.arguments())
  )
  return low, high


def _statistics(choice, options, *arrays, **arguments):
  """Returns the statistics that a table entry needs, or ()."""
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
) -> Statistics:
  """Returns the detached numbers of the whole minibatch that the loss reads.

  Args:
    algorithm: the algorithm, whose numbers may be traced.
    logprobs_BL: log pi_theta of the tokens, for every row of the minibatch.
    entropy_BL: the policy's entropy at each token in nats.
    batch: the minibatch, with the arrays that `policy_loss` reads.
    num_turns: static, the largest number of turns of a row.

  Returns:
    The statistics for `policy_loss`. They have no leaves if
    `algorithm.uses_minibatch_statistics` is false.
  """
  logprobs_BL = sg(masking.select(logprobs_BL, batch.loss_mask_BL))
  log_ratio_BL = ratios.token_log_ratio(
    logprobs_BL, batch.old_logprobs_BL, batch.loss_mask_BL
  )
  normalize = _statistics(
    ratios.NORMALIZATIONS[algorithm.ratio.normalize],
    algorithm.ratio,
    log_ratio_BL,
    batch,
    num_turns=num_turns,
  )
  # The statistics are formed in the order of the loss: bounds read the
  # normalised ratio, and objective and corrections read the bounds.
  context, _ = _context(
    algorithm, logprobs_BL, entropy_BL, batch, normalize, num_turns
  )
  bounds = _statistics(
    bounds_lib.BOUNDS[algorithm.bounds.name],
    algorithm.bounds,
    context,
    **algorithm.bounds.arguments(),
  )
  low, high = _bounds(algorithm, context, bounds)
  return Statistics(
    normalize,
    bounds,
    _statistics(
      objectives.OBJECTIVES[algorithm.objective.name],
      algorithm.objective,
      context,
      low,
      high,
      **algorithm.objective.arguments(),
    ),
    {
      name: _statistics(
        choice, options, context, low, high, **options.arguments()
      )
      for name, choice, options in algorithm.selected_corrections()
    },
  )


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
) -> PolicyLoss:
  """Returns the loss of one microbatch; see the module's docstring.

  Args:
    algorithm: the algorithm, whose numbers may be traced.
    logprobs_BL: log pi_theta of the tokens, differentiable; off the loss mask
      any number is allowed.
    entropy_BL: the policy's entropy at each token in nats, differentiable.
    batch: old log-probabilities and advantages, and the arrays that
      `algorithm.needs` names.
    statistics: `minibatch_statistics` of the minibatch; if None, statistics are
      formed from this microbatch.
    count: the count from `aggregation.aggregate_weights` for the minibatch; if
      None, the count of this microbatch is used.
    entropy_coefficient: weight of the entropy bonus.
    num_turns: static, the largest number of turns of a row.
  """
  mask_BL = batch.loss_mask_BL
  chex.assert_equal_shape(
    [logprobs_BL, entropy_BL, mask_BL, batch.old_logprobs_BL]
  )
  chex.assert_equal_shape([mask_BL, batch.advantages_BL])
  logprobs_BL = masking.select(logprobs_BL, mask_BL)
  if statistics is None:
    statistics = minibatch_statistics(
      algorithm, logprobs_BL, entropy_BL, batch, num_turns=num_turns
    )

  context, scale_BL = _context(
    algorithm, logprobs_BL, entropy_BL, batch, statistics.normalize, num_turns
  )
  low, high = _bounds(algorithm, context, statistics.bounds)
  term_BL, cut_BL = objectives.OBJECTIVES[algorithm.objective.name].function(
    context,
    low,
    high,
    statistics.objective,
    **algorithm.objective.arguments(),
  )

  # The terms are complete, and the corrections only weigh them. No correction
  # reads the weights of another one, so their order does not matter.
  value_scale_BL = jnp.ones_like(term_BL)
  bias_BL = jnp.zeros_like(term_BL)
  for name, choice, options in algorithm.selected_corrections():
    factors = choice.function(
      context,
      low,
      high,
      statistics.corrections[name],
      **options.arguments(),
    )
    scale_BL = scale_BL * factors.policy_BL
    value_scale_BL = value_scale_BL * factors.value_BL
    bias_BL = bias_BL + factors.bias_BL

  aggregate_BL, own_count = aggregation.aggregate_weights(
    batch,
    logprobs_BL.dtype,
    name=algorithm.aggregate.name,
    **algorithm.aggregate.arguments(),
    num_turns=num_turns,
  )
  count = own_count if count is None else count

  def aggregate(x_BL):
    return masking.divide(
      jnp.sum(aggregate_BL * masking.select(x_BL, mask_BL)), count
    )

  # The count does not depend on the corrections' weights. A term of weight 0
  # still counts, and the other terms do not grow in its place.
  policy = aggregate(scale_BL * term_BL)
  entropy = aggregate(entropy_BL)
  kl = jnp.zeros_like(policy)
  if algorithm.kl.where == 'loss':
    kl = aggregate(
      kl_lib.kl_estimate(
        logprobs_BL,
        batch.ref_logprobs_BL,
        mask_BL,
        estimator=algorithm.kl.estimator,
      )
    )
  other = algorithm.kl.coefficient * kl - entropy_coefficient * entropy
  return PolicyLoss(
    loss=policy + other,
    policy=policy,
    bias=aggregate(bias_BL * logprobs_BL),
    other=other,
    entropy=entropy,
    kl=kl,
    ratio_BL=sg(context.ratio_BL),
    weights_BL=scale_BL,
    value_weights_BL=value_scale_BL,
    cut_BL=cut_BL & mask_BL,
    low=low,
    high=high,
  )
