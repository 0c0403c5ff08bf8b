"""How much each term of the loss is believed.

B trajectories, L tokens, T turns. The clipping-bias correction (arXiv
2511.20718): the PPO gradient is the off-policy gradient minus the part that
clipping removed, C = E[1{clipped} w A grad log pi]. With the ratio w and the
band [low, high], the sign of A ignored,

  U = policy tokens with w outside the band,  V = those inside
  N_U = rms over U of w A                     N_V = rms over V of w A

norm='coefficient':

  rho = N_U / (N_V + 1e-8),  s = 1 / rho if rho > tau else 1

  and s multiplies every term of the loss. Formed over one `scope`:
  'minibatch' (all of one optimiser step), 'microbatch' (what is handed in),
  'sequence' (a row) or 'turn'. U empty: s = 1. V empty: N_V = 0 for
  minibatch and microbatch, and 1 for sequence and turn, where it is common
  and would silence every short clipped turn.

norm='gradient' (known from the paper's reviews only):

  g_policy <- g_policy / max(|c|_2, floor), c the gradient of the aggregate of
  w A log pi over U, w and A detached. tau and scope do not apply. The least
  divisor is our choice: without it small |c| would enlarge steps.

All of this is data to the gradient.
"""

from collections.abc import Callable
import dataclasses
import typing

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.rl import masking
from stppo_jax.rl import segments as segments_lib

Array = jax.Array
sg = jax.lax.stop_gradient

RHO_EPSILON = 1e-8


class ClippingBiasSums(typing.NamedTuple):
  """Four sums that add up over microbatches and devices.

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


@dataclasses.dataclass(frozen=True)
class Evidence:
  """What a correction may look at.

  Attributes:
    ratio_at: gives the ratio [B, L] at a level, 1 off the mask.
    advantages_BL: 0 off the mask.
    low, high: the bounds in force.
    batch: the masks, the old and the sampler's log-probabilities.
    num_turns: static, the most turns a row can have.
    implementation: of the segment sums.
  """

  ratio_at: Callable[[str], Array]
  advantages_BL: Array
  low: Array | float
  high: Array | float
  batch: batch_lib.TokenBatch
  num_turns: int
  implementation: str = 'auto'


class Correction(typing.NamedTuple):
  """What one correction asks for.

  Attributes:
    weights_BL: multiplier of the policy terms, detached.
    value_weights_BL: multiplier of the value terms, detached.
    bias_BL: detached factor of log pi in the bias whose gradient is c.
  """

  weights_BL: Array
  value_weights_BL: Array
  bias_BL: Array


def _split(ratio_BL, advantages_BL, loss_mask_BL, low, high):
  """w A [B, L] and the masks of U and V, all detached."""
  # rho measures the batch; nothing is learned by changing the measure.
  ratio_BL = sg(jnp.where(loss_mask_BL, ratio_BL, 1))
  weighted_BL = ratio_BL * sg(masking.select(advantages_BL, loss_mask_BL))
  inside_BL = (ratio_BL >= low) & (ratio_BL <= high)
  return weighted_BL, loss_mask_BL & ~inside_BL, loss_mask_BL & inside_BL


def clipping_bias_sums(
  ratio_BL: Array,
  advantages_BL: Array,
  loss_mask_BL: Array,
  low: Array | float,
  high: Array | float,
  *,
  axis: int | None = None,
) -> ClippingBiasSums:
  """The four sums over the batch, or over each row with `axis=1`."""
  weighted_BL, clipped_BL, kept_BL = _split(
    ratio_BL, advantages_BL, loss_mask_BL, low, high
  )
  squares_BL = jnp.square(weighted_BL)
  return ClippingBiasSums(
    *masking.masked_total(squares_BL, clipped_BL, axis=axis),
    *masking.masked_total(squares_BL, kept_BL, axis=axis),
  )


def clipping_bias_turn_sums(
  ratio_BL: Array,
  advantages_BL: Array,
  loss_mask_BL: Array,
  low: Array | float,
  high: Array | float,
  *,
  turns: segments_lib.Segments,
  implementation: str = 'auto',
) -> ClippingBiasSums:
  """The four sums over each turn: arrays [B, T]."""
  weighted_BL, clipped_BL, kept_BL = _split(
    ratio_BL, advantages_BL, loss_mask_BL, low, high
  )
  squares_BL = jnp.square(weighted_BL)

  def total(x_BL, mask_BL):
    return segments_lib.segment_totals(
      masking.select(x_BL, mask_BL), turns, implementation=implementation
    )

  ones_BL = jnp.ones_like(squares_BL)
  return ClippingBiasSums(
    total(squares_BL, clipped_BL),
    total(ones_BL, clipped_BL),
    total(squares_BL, kept_BL),
    total(ones_BL, kept_BL),
  )


def clipping_bias_norms(
  sums: ClippingBiasSums, *, kept_empty: float = 0.0
) -> tuple[Array, Array]:
  """(N_U, N_V); N_V is `kept_empty` where V is empty, N_U is 0 where U is."""
  clipped = jnp.sqrt(masking.divide(sums.clipped_squares, sums.clipped_count))
  kept = jnp.sqrt(masking.divide(sums.kept_squares, sums.kept_count))
  return clipped, jnp.where(sums.kept_count > 0, kept, kept_empty)


def clipping_bias_rho(
  sums: ClippingBiasSums, *, kept_empty: float = 0.0
) -> Array:
  """N_U / (N_V + 1e-8); 0 where U is empty."""
  clipped, kept = clipping_bias_norms(sums, kept_empty=kept_empty)
  return clipped / (kept + RHO_EPSILON)


def clipping_bias_scale(
  sums: ClippingBiasSums, *, tau: Array | float, kept_empty: float = 0.0
) -> Array:
  """s = 1 / rho where rho > tau, else 1; the shape of the sums."""
  rho = clipping_bias_rho(sums, kept_empty=kept_empty)
  large = rho > tau
  return sg(1 / jnp.where(large, rho, 1))


def gradient_scale(bias_grad_norm: Array, *, floor: Array | float) -> Array:
  """1 / max(|c|_2, floor): the factor of g_policy for norm='gradient'."""
  return 1 / jnp.maximum(bias_grad_norm, floor)


def _split_arguments(evidence, level):
  return (
    evidence.ratio_at(level),
    evidence.advantages_BL,
    evidence.batch.loss_mask_BL,
    evidence.low,
    evidence.high,
  )


def _minibatch_scale(evidence, sums, level, tau):
  del evidence, level
  return clipping_bias_scale(sums, tau=tau)


def _microbatch_scale(evidence, sums, level, tau):
  del sums
  own = clipping_bias_sums(*_split_arguments(evidence, level))
  return clipping_bias_scale(own, tau=tau)


def _sequence_scale(evidence, sums, level, tau):
  del sums
  sums_B = clipping_bias_sums(*_split_arguments(evidence, level), axis=1)
  return clipping_bias_scale(sums_B, tau=tau, kept_empty=1.0)[:, None]


def _turn_scale(evidence, sums, level, tau):
  del sums
  turns = segments_lib.segment_ids(
    'turn',
    evidence.batch.turn_ids_BL,
    evidence.batch.loss_mask_BL,
    num_turns=evidence.num_turns,
  )
  sums_BT = clipping_bias_turn_sums(
    *_split_arguments(evidence, level),
    turns=turns,
    implementation=evidence.implementation,
  )
  scale_BT = clipping_bias_scale(sums_BT, tau=tau, kept_empty=1.0)
  return segments_lib.segment_spread(
    scale_BT, turns, implementation=evidence.implementation
  )


SCOPES = {
  'minibatch': _minibatch_scale,
  'microbatch': _microbatch_scale,
  'sequence': _sequence_scale,
  'turn': _turn_scale,
}
RATIO_LEVELS = ('token', 'turn')  # of the ratio w in U, V and w A
LOSSES = ('policy', 'value')


def _coefficient(evidence, sums, *, tau, scope, level, applies_to):
  mask_BL = evidence.batch.loss_mask_BL
  ones_BL = jnp.ones_like(evidence.advantages_BL)
  scale = SCOPES[scope](evidence, sums, level, tau)
  scale_BL = jnp.where(mask_BL, jnp.broadcast_to(scale, mask_BL.shape), ones_BL)
  weights = {
    name: scale_BL if name in applies_to else ones_BL for name in LOSSES
  }
  return Correction(
    weights['policy'], weights['value'], jnp.zeros_like(ones_BL)
  )


def _gradient(evidence, sums, *, tau, scope, level, applies_to):
  del sums, tau, scope, applies_to  # the caller divides by the norm of c
  weighted_BL, clipped_BL, _ = _split(*_split_arguments(evidence, level))
  ones_BL = jnp.ones_like(weighted_BL)
  return Correction(ones_BL, ones_BL, masking.select(weighted_BL, clipped_BL))


NORMS = {'coefficient': _coefficient, 'gradient': _gradient}


def clipping_bias(
  evidence: Evidence, sums: ClippingBiasSums, *, norm: str, floor, **options
) -> Correction:
  """The correction of this module's docstring.

  Args:
    evidence: what the loss knows of every token of this microbatch.
    sums: over the whole minibatch; used by its scope only.
    norm: a key of `NORMS`.
    floor: of norm='gradient', for the caller (see `gradient_scale`).
    **options: tau, scope, level and applies_to.
  """
  del floor
  return NORMS[norm](evidence, sums, **options)


def _clipping_bias_evidence_sums(evidence, *, level, **options):
  del options
  return clipping_bias_sums(*_split_arguments(evidence, level))


# A correction is called `correction(evidence, sums, **options)`. Its sums are
# formed by `sums(evidence, **options)` and add up over a minibatch.
CORRECTIONS = {'clipping_bias': clipping_bias}
CORRECTION_SUMS = {'clipping_bias': _clipping_bias_evidence_sums}
