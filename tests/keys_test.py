"""Keys differ by seed, step, purpose and row, and by nothing else."""

import jax
import numpy as np

from stppo_jax import keys


def _bits(key):
  return tuple(np.asarray(jax.random.key_data(key)).ravel().tolist())


def test_all_keys_differ():
  made = [
    _bits(keys.step_key(seed, step, purpose))
    for seed in (0, 1)
    for step in (0, 1, 2)
    for purpose in keys.Purpose
  ]
  assert len(set(made)) == len(made) == 2 * 3 * len(keys.Purpose)
  again = keys.step_key(1, 2, keys.Purpose.COLLECT)
  assert _bits(again) in made


def test_keys_of_rows_do_not_depend_on_the_first_row():
  key = keys.step_key(0, 0, keys.Purpose.COLLECT)
  whole = [_bits(k) for k in keys.row_keys(key, 0, 6)]
  assert len(set(whole)) == 6
  parts = [*keys.row_keys(key, 0, 2), *keys.row_keys(key, 2, 4)]
  assert [_bits(k) for k in parts] == whole
