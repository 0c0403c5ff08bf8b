"""The benchmark of the update runs, on the shapes of the tests' runs."""

import re

import pytest

from benchmarks import update
from tests.training import runs


def test_another_loss_is_not_parity():
  metrics = [
    {'actor/pg_loss': x, 'actor/entropy': 1.0, 'critic/vf_loss': 1.0}
    for x in (1.0, 1.0 + 1e-8, 1.1)
  ]
  update.assert_parity(metrics[:2])
  with pytest.raises(AssertionError, match='actor/pg_loss'):
    update.assert_parity(metrics)


@pytest.mark.slow
def test_levels_start_equal_and_are_timed():
  report = update.run(runs.config(), length=128, repeats=2)
  rows = re.findall(r'^\| (\w+_ppo) +\| (\w+) +\|', report, re.M)
  assert rows == list(update.CASES)
  assert re.search(
    r'^turn_ppo / token_ppo: \d\.\d+ .*at most 1.01$', report, re.M
  )
  assert re.search(r'^second / first: \d\.\d+ ', report, re.M)
