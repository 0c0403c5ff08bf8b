"""Trusted intervals of the ratio.

A rule is called `rule(sums, entropy_BL, **options)` and returns the absolute
bounds (low, high): scalars, or arrays that broadcast against [B, L]. `sums` is
what the rule's entry in `BOUNDS_SUMS` gathered over the whole minibatch, in a
pass without gradient; they add up over microbatches.
"""

import jax

Array = jax.Array


def fixed(
  sums: tuple[()],
  entropy_BL: Array | None,
  *,
  clip_low: Array | float,
  clip_high: Array | float,
) -> tuple[Array | float, Array | float]:
  """[1 - clip_low, 1 + clip_high], both positive distances from 1."""
  del sums, entropy_BL
  return 1 - clip_low, 1 + clip_high


def _nothing(ratio_BL, advantages_BL, old_logprobs_BL, loss_mask_BL, **options):
  del ratio_BL, advantages_BL, old_logprobs_BL, loss_mask_BL, options
  return ()


BOUNDS = {'fixed': fixed}
BOUNDS_SUMS = {'fixed': _nothing}
