"""The losses of a minibatch and their gradients, in however many parts.

M minibatch rows, cut into n microbatches of M / n rows; L tokens. Everything is
divided by counts of the whole minibatch and every statistic the loss needs is
formed over the whole minibatch, so that cutting it changes nothing.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.learner import load_balance
from stppo_jax.learner import microbatches as microbatches_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.rl import aggregation
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import diagnostics as diagnostics_lib
from stppo_jax.rl import gradients as gradients_lib
from stppo_jax.rl import losses

Array = jax.Array
Tree = Any


class Gradients(NamedTuple):
  """Of one minibatch; float32, laid out as the parameters.

  Attributes:
    policy: of the policy's loss, corrected.
    value: of the value loss; None without a value model.
    metrics: scalars, the losses among them.
    diagnostics: mergeable, of the ratios.
  """

  policy: functional.Params
  value: functional.Params | None
  metrics: dict[str, Array]
  diagnostics: diagnostics_lib.Diagnostics


class Weights(NamedTuple):
  """What losses are computed with, in the dtype of the activations.

  Attributes:
    policy, value: what is trained; the latter None without a value model.
    frozen: the base under adapters; None without.
  """

  policy: functional.Params
  value: functional.Params | None
  frozen: functional.Params | None


class Whole(NamedTuple):
  """What a microbatch must know of its minibatch.

  Attributes:
    batch: the minibatch.
    count: see `aggregation.aggregate_count`.
    value_count: tokens with a value that is learned, at least 1.
    statistics: see `losses.minibatch_statistics`; None: the microbatch is all
      of it, and forms its own.
  """

  batch: batch_lib.TokenBatch
  count: Array
  value_count: Array
  statistics: losses.Statistics | None


class Sums(NamedTuple):
  """Over microbatches; they add up over parts of a minibatch.

  Attributes:
    parts: gradients of the policy's losses, by name, see
      `gradients.pull_backs`.
    value: gradient of the value loss; None without a value model.
    metrics: scalars, losses among them.
  """

  parts: dict[str, functional.Params]
  value: functional.Params | None
  metrics: dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Losses:
  """Of policy and value model.

  Attributes:
    policy, value: models; the value model is None where the row has none, and
      where the policy has the value head.
    temperature: of sampling.
    num_turns: the most turns of a row.
  """

  policy: functional.Model
  value: functional.Model | None
  temperature: float
  num_turns: int

  def weights(
    self, state: state_lib.TrainState, frozen: functional.Params | None
  ) -> Weights:
    """Those of a state, cast once for all microbatches."""
    value = None if self.value is None else state.value.params
    return Weights(
      *(
        precision.cast(params, self.policy.config.dtype)
        for params in (state.policy.params, value, frozen)
      )
    )

  def score(
    self,
    weights: Weights,
    part: batch_lib.TokenBatch,
    params: functional.Params | None = None,
  ) -> functional.TokenOutputs:
    """What the policy says of some rows; `params` in place of its weights."""
    params = weights.policy if params is None else params
    return self.policy.token_outputs(
      state_lib.join_frozen(self.policy, weights.frozen, params),
      part.tokens_BL,
      lengths_B=part.lengths_B,
      loss_positions_BM=part.loss_positions_BM,
      expert_ids=part.expert_ids,
      temperature=self.temperature,
      values_everywhere=False,  # values are trained at loss positions only
    )

  def looks_first(
    self, algorithm: algorithm_lib.Algorithm, batch: batch_lib.TokenBatch
  ) -> bool:
    """Whether parts of a minibatch need `scores` of all of it."""
    zeros_BL = jnp.zeros(batch.loss_mask_BL.shape, jnp.float32)
    found = jax.eval_shape(
      self._statistics, algorithm, zeros_BL, zeros_BL, batch
    )
    return bool(jax.tree.leaves(found))

  def scores(
    self, weights: Weights, microbatches: batch_lib.TokenBatch
  ) -> tuple[Array, Array]:
    """Log-probabilities and entropy of each microbatch, without gradient."""
    _, found = jax.lax.scan(
      lambda _, part: (None, self.score(weights, part)[:2]), None, microbatches
    )
    return found

  def whole(
    self,
    algorithm: algorithm_lib.Algorithm,
    batch: batch_lib.TokenBatch,
    scores: tuple[Array, Array] | None,
    *,
    cut: bool,
  ) -> Whole:
    """What microbatches must know.

    Args:
      algorithm: the row.
      batch: the minibatch.
      scores: of all its microbatches; None where `looks_first` is False.
      cut: whether there are several.
    """
    statistics = None
    if cut:
      if scores is None:
        zeros_BL = jnp.zeros(batch.loss_mask_BL.shape, jnp.float32)
        found = zeros_BL, zeros_BL
      else:
        found = microbatches_lib.joined(scores)
      statistics = self._statistics(algorithm, *found, batch)
    count = aggregation.aggregate_count(
      batch, num_turns=self.num_turns, **algorithm.aggregate.arguments()
    )
    value_count = jnp.maximum(jnp.sum(batch.value_mask_BL), 1)
    return Whole(batch, count, value_count, statistics)

  def sums(
    self,
    weights: Weights,
    whole: Whole,
    algorithm: algorithm_lib.Algorithm,
    numbers: Mapping[str, Any],
    microbatches: batch_lib.TokenBatch,
  ) -> tuple[Sums, diagnostics_lib.Diagnostics]:
    """Over microbatches, and the stacked diagnostics of each.

    Args:
      weights, whole: from the methods of those names.
      algorithm, numbers: see `step.update`.
      microbatches: from `accumulation.cut`; all of the minibatch, or some.
    """
    return microbatches_lib.summed(
      functools.partial(self._measure, weights, whole, algorithm, numbers),
      microbatches,
    )

  def _measure(self, weights, whole, algorithm, numbers, part):
    policy_parts = functools.partial(
      self._policy_parts, weights, whole, algorithm, numbers, part
    )
    heads, pull, (scalars, weights_BL, diagnostics) = jax.vjp(
      policy_parts, weights.policy, has_aux=True
    )
    parts = {
      name: pull({head: jnp.float32(head in cotangent) for head in heads})[0]
      for name, cotangent in gradients_lib.pull_backs(algorithm).items()
    }
    value_gradient = None
    if self.value is not None:

      def value_part(params):
        values_BL = self.value.values(
          state_lib.join_frozen(self.value, weights.frozen, params),
          part.tokens_BL,
          lengths_B=part.lengths_B,
          loss_positions_BM=part.loss_positions_BM,
        )
        return _value_part(values_BL, part, weights_BL, whole, numbers)

      (value_loss, clipped), value_gradient = jax.value_and_grad(
        value_part, has_aux=True
      )(weights.value)
      scalars |= {'critic/vf_loss': value_loss, 'critic/vf_clipfrac': clipped}
    parts, value_gradient = microbatches_lib.summand(
      (parts, value_gradient), self.policy.mesh
    )
    return Sums(parts, value_gradient, scalars), diagnostics

  def _policy_parts(self, weights, whole, algorithm, numbers, part, params):
    logprobs_BL, entropy_BL, values_BL, routing = self.score(
      weights, part, params
    )
    loss = losses.policy_loss(
      algorithm,
      logprobs_BL,
      entropy_BL,
      part,
      statistics=whole.statistics,
      count=whole.count,
      entropy_coefficient=numbers['entropy_coefficient'],
      num_turns=self.num_turns,
    )
    diagnostics = diagnostics_lib.policy_diagnostics(
      algorithm, loss, logprobs_BL, entropy_BL, part, num_turns=self.num_turns
    )
    heads = {'policy': loss.policy, 'bias': loss.bias, 'other': loss.other}
    scalars = {'actor/pg_loss': loss.policy, 'actor/kl_loss': loss.kl}
    if self.policy.head == 'both':
      value_loss, clipped = _value_part(
        values_BL, part, loss.value_weights_BL, whole, numbers
      )
      # Among the rest: a correction of the policy's gradient leaves it alone.
      heads['other'] += numbers['value_coefficient'] * value_loss
      scalars |= {'critic/vf_loss': value_loss, 'critic/vf_clipfrac': clipped}
    if routing is not None:
      balance = load_balance.loss(
        routing.probs_BX,
        part,
        of=whole.batch,
        visited=self.policy.config.num_experts_per_tok,
      )
      heads['other'] += numbers['load_balance_coefficient'] * balance
      scalars['actor/load_balance'] = balance
    return heads, (scalars, loss.value_weights_BL, diagnostics)

  def _statistics(self, algorithm, logprobs_BL, entropy_BL, batch):
    return losses.minibatch_statistics(
      algorithm, logprobs_BL, entropy_BL, batch, num_turns=self.num_turns
    )


def combined(
  algorithm: algorithm_lib.Algorithm,
  sums: Sums,
  stacked: diagnostics_lib.Diagnostics,
) -> Gradients:
  """What an update follows, of the sums over the whole minibatch."""
  policy_gradient, corrected = gradients_lib.combine(algorithm, sums.parts)
  return Gradients(
    policy_gradient,
    sums.value,
    sums.metrics | corrected,
    diagnostics_lib.merge_stacked(stacked),
  )


def _value_part(values_BL, part, weights_BL, whole, numbers):
  """Shares of the value loss and of what it clips."""
  loss = losses.value_loss(
    values_BL,
    part.values_BL,
    part.returns_BL,
    part.value_mask_BL,
    clip=numbers['value_clip'],
    weights_BL=weights_BL,
  )
  return loss.total / whole.value_count, loss.clipped / whole.value_count
