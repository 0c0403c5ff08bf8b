"""How much each term of the loss is believed: the table of corrections.

A correction is called `correction(evidence, low, high, statistics, **options)`
with the bounds in force and returns a `Correction`. `statistics` is what its
entry in `CORRECTION_STATISTICS` made of the whole minibatch, () for one that
needs none. Those that a row selects multiply; denominators never change, so a
term that is not believed at all still counts.
"""

from stppo_jax.rl import clipping_bias
from stppo_jax.rl import mismatch

CORRECTIONS = {
  'clipping_bias': clipping_bias.clipping_bias,
  'tis': mismatch.tis,
  'mis': mismatch.mis,
  'icepop': mismatch.icepop,
  'geo_rs': mismatch.geo_rs,
}


def _nothing(evidence, low, high, **options):
  del evidence, low, high, options
  return ()


CORRECTION_STATISTICS = {
  'clipping_bias': clipping_bias.statistics,
  'tis': _nothing,
  'mis': _nothing,
  'icepop': _nothing,
  'geo_rs': _nothing,
}
