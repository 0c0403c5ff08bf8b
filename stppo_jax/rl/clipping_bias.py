"""The clipping-bias correction (arXiv 2511.20718).

B trajectories, L tokens, T turns. The PPO gradient is the off-policy gradient
minus the part that clipping removes, C = E[1{clipped} w A grad log pi]. Let w
be the ratio, A the advantage, and

  U = policy tokens with w outside the bounds, whatever the sign of A
  V = policy tokens with w inside the bounds
  N_U = rms over U of w A
  N_V = rms over V of w A

norm='coefficient':

  rho = N_U / (N_V + 1e-8),  s = 1 / rho if rho > tau else 1

  The factor s multiplies every term of the loss. The option `scope` says over
  which tokens rho is formed: 'minibatch' (all tokens of one optimiser step),
  'microbatch', 'sequence' (a row) or 'turn'. If U is empty, s = 1. If V is
  empty, N_V is 0 for minibatch and microbatch, and 1 for sequence and turn. In
  a sequence or a turn an empty V is common, and N_V = 0 would give every short
  clipped turn a gradient of almost zero.

norm='gradient' (known from the paper's public reviews only):

  g_policy <- g_policy / max(|c|_2, floor)

  where c is the gradient of the aggregate of w A log pi over U, with w and A
  detached. tau and scope are not used. The floor of the divisor is our choice:
  without a floor a small |c| would enlarge the step.

No gradient flows through rho, s or |c|.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import masking
from stppo_jax.rl import options as options_lib
from stppo_jax.rl import segments as segments_lib

Array = jax.Array
Tree = Any
Number = Array | float
LossContext = loss_context_lib.LossContext
sg = jax.lax.stop_gradient

RHO_EPSILON = 1e-8


class Sums(NamedTuple):
  """The four sums behind N_U and N_V; add them over microbatches and devices.

  Attributes:
    clipped_squares: sum over U of (w A)^2.
    clipped_count: size of U.
    kept_squares: sum over V of (w A)^2.
    kept_count: size of V.
  """

  clipped_squares: Array
  clipped_count: Array
  kept_squares: Array
  kept_count: Array


def _split(ratio_BL, advantages_BL, loss_mask_BL, low, high):
  """Returns w A, detached, and the masks of U and V: three arrays [B, L].

  w is the ratio and A the advantage of a token. U are the policy tokens with w
  outside the bounds, and V the other policy tokens.
  """
  # w and A are detached, so that no gradient flows through the norms.
  ratio_BL = sg(jnp.where(loss_mask_BL, ratio_BL, 1))
  weighted_BL = ratio_BL * sg(masking.select(advantages_BL, loss_mask_BL))
  inside_BL = (ratio_BL >= low) & (ratio_BL <= high)
  return weighted_BL, loss_mask_BL & ~inside_BL, loss_mask_BL & inside_BL


def batch_sums(
  ratio_BL: Array,
  advantages_BL: Array,
  loss_mask_BL: Array,
  low: Number,
  high: Number,
  *,
  axis: int | None = None,
) -> Sums:
  """Returns the `Sums` of the batch or, with `axis=1`, of each row."""
  weighted_BL, clipped_BL, kept_BL = _split(
    ratio_BL, advantages_BL, loss_mask_BL, low, high
  )
  squares_BL = jnp.square(weighted_BL)
  return Sums(
    *masking.masked_total(squares_BL, clipped_BL, axis=axis),
    *masking.masked_total(squares_BL, kept_BL, axis=axis),
  )


def _turn_sums(turns, *arguments) -> Sums:
  """Returns the `Sums` of each turn: arrays [B, T]."""
  weighted_BL, clipped_BL, kept_BL = _split(*arguments)
  squares_BL = jnp.square(weighted_BL)
  ones_BL = jnp.ones_like(squares_BL)
  return Sums(
    *(
      segments_lib.segment_totals(masking.select(x_BL, mask_BL), turns)
      for mask_BL in (clipped_BL, kept_BL)
      for x_BL in (squares_BL, ones_BL)
    )
  )


def scale_of(sums: Sums, *, tau: Number, kept_empty: float = 0.0) -> Array:
  """Returns the factor s of the loss terms, for each summed set of tokens.

  s is 1 / rho if rho > tau, else 1. rho is N_U / (N_V + 1e-8), with
  `kept_empty` in the place of N_V if V is empty. If U is empty, rho is 0.
  """
  clipped = jnp.sqrt(masking.divide(sums.clipped_squares, sums.clipped_count))
  kept = jnp.sqrt(masking.divide(sums.kept_squares, sums.kept_count))
  kept = jnp.where(sums.kept_count > 0, kept, kept_empty)
  rho = clipped / (kept + RHO_EPSILON)
  return sg(1 / jnp.where(rho > tau, rho, 1))


def _sum_arguments(context, level, low, high):
  """Returns the arguments of `batch_sums`: w, A, the mask and the bounds."""
  return (
    context.ratio_at(level),
    context.advantages_BL,
    context.mask_BL,
    low,
    high,
  )


SCOPES = ('minibatch', 'microbatch', 'sequence', 'turn')
RATIO_LEVELS = ('token', 'turn')  # the levels that the ratio w may have
LOSSES = ('policy', 'value')
NORMS = ('coefficient', 'gradient')


def _scale(context, sum_arguments, minibatch_sums, *, tau, scope):
  """Returns the factor s of the loss terms, with rho formed over a scope.

  s is a scalar, or an array that broadcasts to [B, L].
  """
  if scope == 'minibatch':
    return scale_of(minibatch_sums, tau=tau)
  if scope == 'microbatch':
    return scale_of(batch_sums(*sum_arguments), tau=tau)
  if scope == 'sequence':
    sums_B = batch_sums(*sum_arguments, axis=1)
    return scale_of(sums_B, tau=tau, kept_empty=1.0)[:, None]
  turns = context.segments('turn')
  sums_BT = _turn_sums(turns, *sum_arguments)
  return context.spread(scale_of(sums_BT, tau=tau, kept_empty=1.0), turns)


@options_lib.dataclass
class ClippingBias(options_lib.Options):
  """Options of `clipping_bias`.

  Attributes:
    norm: one of `NORMS`.
    tau: with norm='coefficient', the rho above which terms are scaled; with
      infinity no term is scaled.
    scope: with norm='coefficient', the tokens over which rho is formed, one
      of `SCOPES`.
    level: the level of the ratio w, one of `RATIO_LEVELS`.
    applies_to: the losses whose terms are scaled, some of `LOSSES`.
    floor: with norm='gradient', the smallest divisor.
  """

  norm: str = options_lib.one_of(NORMS)
  tau: float = options_lib.number(above=0.0, infinite=True)
  scope: str = options_lib.one_of(SCOPES)
  level: str = options_lib.one_of(RATIO_LEVELS)
  applies_to: tuple[str, ...] = options_lib.some_of(LOSSES, at_least=1)
  floor: float = options_lib.number(above=0.0)

  @staticmethod
  def conflicts(norm, applies_to, **_):
    if norm == 'gradient' and set(applies_to) != {'policy'}:
      yield 'applies_to', applies_to, "('policy',) when norm is 'gradient'"


def clipping_bias(
  context: LossContext,
  low: Number,
  high: Number,
  sums: Sums | tuple[()],
  *,
  norm: str,
  tau: Number,
  scope: str,
  level: str,
  applies_to: tuple[str, ...],
  floor: Number,
) -> loss_context_lib.TermWeights:
  """Returns the term weights of the clipping-bias correction.

  Args:
    context: the microbatch.
    low, high: the bounds of the ratio.
    sums: `minibatch_sums` of the whole minibatch, or () if
      `needs_minibatch_sums` is false.
    norm, tau, scope, level, applies_to, floor: see `ClippingBias`.
  """
  sum_arguments = _sum_arguments(context, level, low, high)
  ones_BL = jnp.ones_like(context.advantages_BL)
  if norm == 'gradient':
    # The terms keep their weights. The learner divides the gradient by the norm
    # of c, which is known only after the last microbatch.
    del floor
    weighted_BL, clipped_BL, _ = _split(*sum_arguments)
    bias_BL = masking.select(weighted_BL, clipped_BL)
    return loss_context_lib.TermWeights(ones_BL, ones_BL, bias_BL)
  mask_BL = context.mask_BL
  scale = _scale(context, sum_arguments, sums, tau=tau, scope=scope)
  scale_BL = jnp.where(mask_BL, jnp.broadcast_to(scale, mask_BL.shape), ones_BL)
  policy_BL, value_BL = (
    scale_BL if loss in applies_to else ones_BL for loss in LOSSES
  )
  zeros_BL = jnp.zeros_like(ones_BL)
  return loss_context_lib.TermWeights(policy_BL, value_BL, zeros_BL)


def needs_minibatch_sums(options: ClippingBias) -> bool:
  """Returns whether rho is formed over the whole minibatch."""
  return options.norm == 'coefficient' and options.scope == 'minibatch'


def minibatch_sums(
  context: LossContext, low: Number, high: Number, *, level: str, **options
) -> Sums:
  """Returns the `Sums` of a whole minibatch."""
  del options
  return batch_sums(*_sum_arguments(context, level, low, high))


# With `correction.clipping_bias.norm='gradient'` the policy gradient is divided
# by the L2 norm of c, the gradient of the clipped tokens' terms:
#
#   g = g_policy / max(|c|_2, floor) + g_other,    c = grad bias
#
# Each of the terms policy, bias and other needs its own gradient. So the
# functions below replace `jax.value_and_grad` of the loss, which all other
# algorithms use.


class LossTerms(NamedTuple):
  """The three terms of a loss, or the gradient of each term.

  Attributes:
    policy: the policy term.
    bias: the scalar whose gradient is c, see the module's docstring.
    other: the sum of all terms that the correction does not change.
  """

  policy: Tree
  bias: Tree
  other: Tree


def term_gradients(
  loss_terms: Callable[[Tree], tuple[LossTerms, Tree]], params: Tree
) -> tuple[LossTerms, Tree]:
  """Returns the gradient of each term, and the auxiliary output.

  The forward pass runs once, and each term has a backward pass of its own.

  Args:
    loss_terms: maps parameters to (scalar terms, auxiliary output).
    params: the parameters at which the gradients are taken.
  """
  terms, pull_back, outputs = jax.vjp(loss_terms, params, has_aux=True)

  def gradient(name: str) -> Tree:
    zeros = jax.tree.map(jnp.zeros_like, terms)
    one = jnp.ones_like(getattr(terms, name))
    return pull_back(zeros._replace(**{name: one}))[0]

  return LossTerms(*map(gradient, LossTerms._fields)), outputs


def divide_by_bias_norm(
  gradients: LossTerms, *, floor: Array | float
) -> tuple[Tree, Array]:
  """Divides the policy term's gradient; returns the whole gradient and |c|_2.

  The whole gradient is g_policy / max(|c|_2, floor) + g_other, where c is the
  gradient of the bias term.

  Args:
    gradients: the gradient of each term, summed over the microbatches; the
      three gradients have the same structure.
    floor: the smallest divisor. Without a floor a small c would enlarge the
      step.
  """
  squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradients.bias)]
  norm = jnp.sqrt(sum(squares))
  scale = 1 / jnp.maximum(norm, floor)
  gradient = jax.tree.map(
    lambda policy, other: scale * policy + other,
    gradients.policy,
    gradients.other,
  )
  return gradient, norm
