"""Hosts that collect beside others are faster than hosts that do both."""

import pytest

from benchmarks import side_by_side


@pytest.mark.slow
def test_the_hosts_that_learn_hardly_wait(capsys):
  code = side_by_side.main(['--scale=0.05', '--steps=8'])
  print(table := capsys.readouterr().out)
  assert code == 0 and table.count('%') == len(side_by_side.CASES)
