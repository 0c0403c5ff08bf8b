"""Makes tests/golden/family: results of public implementations for one batch.

    pip install numpy verl==0.9.1 trl==1.16.0 google-tunix==0.1.7 torch==2.13.0
    python tests/golden/make_family.py

(The three packages bring much that is not needed: `--no-deps`, and what the
imports then ask for, will do.)

Every function gets the same arrays, in float64. `arrays.npz` has them under
the names of `TokenBatch`; `verl.npz`, `trl.npz` and `tunix.npz` have what came
out: `CASE.loss` with `CASE.gradient_BL`, its gradient with respect to the
log-probabilities (of a value loss: the values), and `CASE.WHAT` for all else;
`sources.json` has the versions and the options. `tests/rl/golden_test.py` holds
our rows against them and says where an implementation deviates.

These packages have no ratio per turn. A turn fed to a ratio per sequence, as a
row of its own, is one: `family_batch.by_turn`. The public code of AT2PO has
one; `family_atpo.py` makes its numbers.
"""

import importlib.metadata
import json

import family_batch
import family_trl
import family_tunix
import family_verl
import jax
import numpy as np

_SOURCES = {
  'verl': family_verl.make,
  'trl': family_trl.make,
  'google-tunix': family_tunix.make,
}


def main():
  jax.config.update('jax_enable_x64', True)
  arrays = family_batch.make_arrays()
  np.savez(family_batch.FOLDER / 'arrays.npz', **arrays)
  for package, make in _SOURCES.items():
    family_batch.save(package.removeprefix('google-'), make(arrays))
  versions = {name: importlib.metadata.version(name) for name in _SOURCES}
  sources = {'versions': versions, 'options': family_batch.OPTIONS}
  text = json.dumps(sources, indent=2) + '\n'
  (family_batch.FOLDER / 'sources.json').write_text(text)


if __name__ == '__main__':
  main()
