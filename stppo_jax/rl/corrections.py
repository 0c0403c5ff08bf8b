"""The table of corrections, which weigh the terms of the loss.

A correction is called `correction(context, low, high, statistics, **options)`
with the bounds in force, and returns `loss_context.TermWeights`. `statistics`
is the result of its `Choice.statistics` for the whole minibatch, and () for a
correction that needs none. The weights of all selected corrections multiply.
Denominators never change, so a term of weight 0 still counts.
"""

from stppo_jax.rl import clipping_bias
from stppo_jax.rl import mismatch
from stppo_jax.rl import options

CORRECTIONS = {
  'clipping_bias': options.Choice(
    clipping_bias.clipping_bias,
    clipping_bias.ClippingBias,
    clipping_bias.minibatch_sums,
    clipping_bias.needs_minibatch_sums,
    metrics=('stab/norm_clipped', 'stab/norm_unclipped', 'stab/rho'),
  ),
  **mismatch.CORRECTIONS,
}

# A class that holds the names of the selected corrections, and the options of
# all corrections.
Correction = options.selection('Correction', CORRECTIONS)
