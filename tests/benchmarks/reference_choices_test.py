"""The table of the authors' choices, on a batch that is made up."""

import numpy as np

from benchmarks import reference_choices
from stppo_jax.configs import reference
from tests.tools.lab import batch_arrays


def test_each_choice_has_a_line_and_ours_changes_nothing(tmp_path, capsys):
  arrays, *_ = batch_arrays.arrays(poison=0.0)
  path = tmp_path / 'F.npz'
  np.savez(path, **arrays)
  reference_choices.main([f'--batch={path}'])
  _, _, *lines = capsys.readouterr().out.splitlines()
  cells = [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines]
  table = {cell[0]: cell[1:] for cell in cells}
  assert table['ours'] == ['1.0000', '1.000', '1.00 times the tokens']
  keys = {*reference.ALWAYS, *reference.WITH_VALUES} - {'updates.shuffle'}
  for key in keys:
    assert any(key.removeprefix('algorithm.') in name for name in table), key
  # One microbatch holds the whole batch, whose rows are fewer than 16.
  assert table['updates.microbatch_means = True'][0] == '1.0000'
  assert float(table['advantage.whiten = all'][0]) < 1
