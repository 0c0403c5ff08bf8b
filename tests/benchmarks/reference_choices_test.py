"""The table of the authors' choices, on a batch that is made up."""

import numpy as np
import pytest

from benchmarks import reference_choices
from stppo_jax.configs import reference
from tests.tools.lab import batch_arrays


@pytest.mark.slow
def test_each_choice_has_a_line_and_ours_changes_nothing(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(reference_choices, '_ROWS', 2)
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
  # Two trajectories have other numbers of tokens than the next two.
  assert float(table['mean of the means of microbatches'][0]) < 1
  assert float(table['advantage.whiten = all'][0]) < 1


def test_a_file_that_does_not_fit_is_named_in_one_line(tmp_path, refused):
  path = tmp_path / 'F.npz'
  error = lambda: refused(f'--batch={path}', main=reference_choices.main)
  assert error() == f'--batch={path}: No such file or directory\n'
  arrays, *_ = batch_arrays.arrays(poison=0.0)
  del arrays['ref_logprobs_BL'], arrays['old_values_BL']
  np.savez(path, **arrays)
  line = f'--batch={path}: lacks old_values_BL, which the table reads\n'
  assert error() == line
