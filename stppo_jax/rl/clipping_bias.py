"""The clipping-bias correction (arXiv 2511.20718).

B trajectories, L tokens, T turns. The PPO gradient is the off-policy gradient
minus the part that clipping removed, C = E[1{clipped} w A grad log pi]. With
the ratio w and the band [low, high], the sign of A ignored,

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

import typing

import jax
import jax.numpy as jnp

from stppo_jax.rl import loss_context as loss_context_lib
from stppo_jax.rl import masking
from stppo_jax.rl import segments as segments_lib

Array = jax.Array
sg = jax.lax.stop_gradient

RHO_EPSILON = 1e-8


class Sums(typing.NamedTuple):
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


def _split(ratio_BL, advantages_BL, loss_mask_BL, low, high):
  """w A [B, L] and the masks of U and V, all detached."""
  # rho measures the batch; nothing is learned by changing the measure.
  ratio_BL = sg(jnp.where(loss_mask_BL, ratio_BL, 1))
  weighted_BL = ratio_BL * sg(masking.select(advantages_BL, loss_mask_BL))
  inside_BL = (ratio_BL >= low) & (ratio_BL <= high)
  return weighted_BL, loss_mask_BL & ~inside_BL, loss_mask_BL & inside_BL


def batch_sums(
  ratio_BL: Array,
  advantages_BL: Array,
  loss_mask_BL: Array,
  low: Array | float,
  high: Array | float,
  *,
  axis: int | None = None,
) -> Sums:
  """The four sums over the batch, or over each row with `axis=1`."""
  weighted_BL, clipped_BL, kept_BL = _split(
    ratio_BL, advantages_BL, loss_mask_BL, low, high
  )
  squares_BL = jnp.square(weighted_BL)
  return Sums(
    *masking.masked_total(squares_BL, clipped_BL, axis=axis),
    *masking.masked_total(squares_BL, kept_BL, axis=axis),
  )


def turn_sums(
  ratio_BL: Array,
  advantages_BL: Array,
  loss_mask_BL: Array,
  low: Array | float,
  high: Array | float,
  *,
  turns: segments_lib.Segments,
  implementation: str = 'auto',
) -> Sums:
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
  return Sums(
    total(squares_BL, clipped_BL),
    total(ones_BL, clipped_BL),
    total(squares_BL, kept_BL),
    total(ones_BL, kept_BL),
  )


def norms(sums: Sums, *, kept_empty: float = 0.0) -> tuple[Array, Array]:
  """(N_U, N_V); N_V is `kept_empty` where V is empty, N_U is 0 where U is."""
  clipped = jnp.sqrt(masking.divide(sums.clipped_squares, sums.clipped_count))
  kept = jnp.sqrt(masking.divide(sums.kept_squares, sums.kept_count))
  return clipped, jnp.where(sums.kept_count > 0, kept, kept_empty)


def rho_of(sums: Sums, *, kept_empty: float = 0.0) -> Array:
  """N_U / (N_V + 1e-8); 0 where U is empty."""
  clipped, kept = norms(sums, kept_empty=kept_empty)
  return clipped / (kept + RHO_EPSILON)


def scale_of(
  sums: Sums, *, tau: Array | float, kept_empty: float = 0.0
) -> Array:
  """s = 1 / rho where rho > tau, else 1; the shape of the sums."""
  rho = rho_of(sums, kept_empty=kept_empty)
  large = rho > tau
  return sg(1 / jnp.where(large, rho, 1))


def gradient_scale(bias_grad_norm: Array, *, floor: Array | float) -> Array:
  """1 / max(|c|_2, floor): the factor of g_policy for norm='gradient'."""
  return 1 / jnp.maximum(bias_grad_norm, floor)


def _weighed(evidence, level, low, high):
  """The arguments of the sums, but for the set they are formed over."""
  return (
    evidence.ratio_at(level),
    evidence.advantages_BL,
    evidence.mask_BL,
    low,
    high,
  )


def _minibatch_scale(evidence, weighed, minibatch_sums, tau):
  del evidence, weighed
  return scale_of(minibatch_sums, tau=tau)


def _microbatch_scale(evidence, weighed, minibatch_sums, tau):
  del evidence, minibatch_sums
  return scale_of(batch_sums(*weighed), tau=tau)


def _sequence_scale(evidence, weighed, minibatch_sums, tau):
  del evidence, minibatch_sums
  sums_B = batch_sums(*weighed, axis=1)
  return scale_of(sums_B, tau=tau, kept_empty=1.0)[:, None]


def _turn_scale(evidence, weighed, minibatch_sums, tau):
  del minibatch_sums
  turns = evidence.segments('turn')
  sums_BT = turn_sums(
    *weighed, turns=turns, implementation=evidence.implementation
  )
  return evidence.spread(scale_of(sums_BT, tau=tau, kept_empty=1.0), turns)


SCOPES = {
  'minibatch': _minibatch_scale,
  'microbatch': _microbatch_scale,
  'sequence': _sequence_scale,
  'turn': _turn_scale,
}
RATIO_LEVELS = ('token', 'turn')  # of the ratio w in U, V and w A
LOSSES = ('policy', 'value')


def _coefficient(evidence, weighed, minibatch_sums, *, tau, scope, applies_to):
  mask_BL = evidence.mask_BL
  ones_BL = jnp.ones_like(evidence.advantages_BL)
  scale = SCOPES[scope](evidence, weighed, minibatch_sums, tau)
  scale_BL = jnp.where(mask_BL, jnp.broadcast_to(scale, mask_BL.shape), ones_BL)
  weights = {
    name: scale_BL if name in applies_to else ones_BL for name in LOSSES
  }
  return loss_context_lib.Correction(
    weights['policy'], weights['value'], jnp.zeros_like(ones_BL)
  )


def _gradient(evidence, weighed, minibatch_sums, *, tau, scope, applies_to):
  # The caller divides by the norm of c.
  del evidence, minibatch_sums, tau, scope, applies_to
  weighted_BL, clipped_BL, _ = _split(*weighed)
  ones_BL = jnp.ones_like(weighted_BL)
  return loss_context_lib.Correction(
    ones_BL, ones_BL, masking.select(weighted_BL, clipped_BL)
  )


NORMS = {'coefficient': _coefficient, 'gradient': _gradient}


def clipping_bias(
  evidence: loss_context_lib.LossContext,
  low: Array | float,
  high: Array | float,
  minibatch_sums: Sums | tuple[()],
  *,
  norm: str,
  level: str,
  floor: Array | float,
  **options,
) -> loss_context_lib.Correction:
  """The correction of this module's docstring.

  Args:
    evidence: of this microbatch.
    low, high: the bounds in force.
    minibatch_sums: what `statistics` made of the whole minibatch.
    norm: a key of `NORMS`.
    level: of the ratio w.
    floor: of norm='gradient', for the caller (see `gradient_scale`).
    **options: tau, scope and applies_to.
  """
  del floor
  weighed = _weighed(evidence, level, low, high)
  return NORMS[norm](evidence, weighed, minibatch_sums, **options)


def uses_statistics(*, norm: str, scope: str) -> bool:
  """Returns whether rho is formed over the whole minibatch."""
  return norm == 'coefficient' and scope == 'minibatch'


def statistics(
  evidence: loss_context_lib.LossContext,
  low: Array | float,
  high: Array | float,
  *,
  norm: str,
  scope: str,
  level: str,
  **options,
) -> Sums | tuple[()]:
  """The four sums of a whole minibatch; () where they are not needed."""
  del options
  if not uses_statistics(norm=norm, scope=scope):
    return ()
  return batch_sums(*_weighed(evidence, level, low, high))
