"""The work of a chip as a slice of TPU chips grows.

It needs the compiler for TPU, `pip install libtpu`; what compiles is skipped
without it.
"""

import importlib.util
import pathlib
import re

import pytest

from benchmarks import weak_scaling

_PAGE = pathlib.Path(weak_scaling.__file__).parents[1] / 'docs' / 'sharding.md'


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:Error reading persistent compilation')
@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed'
)
def test_a_chip_multiplies_and_sends_what_the_formulas_say():
  small, large = (weak_scaling.count(x) for x in weak_scaling.SLICES[:2])
  assert (small.data, large.data) == (1, 2)
  assert large.operations == pytest.approx(small.operations, rel=0.02)
  for counted in (small, large):
    for sent, formula in (counted.update, counted.publish):
      assert sent == pytest.approx(formula, rel=0.05)


def test_the_table_of_the_page_keeps_the_goals():
  text = _PAGE.read_text(encoding='utf-8')
  table = text.partition('<!-- weak scaling -->')[2].partition('<!--')[0]
  lines = table.strip().splitlines()[2:]
  names = [x.split()[1] for x in lines]
  assert names == list(weak_scaling.SLICES[: len(names)]) and len(names) > 2
  operations = [float(x) for x in re.findall(r'([\d.]+) GFLOP', table)]
  assert len(operations) == len(lines)
  assert max(operations) <= 1.02 * min(operations)
  for line in lines:
    differences = [float(x) for x in re.findall(r'\(([+-][\d.]+) %\)', line)]
    assert len(differences) == 2
    assert max(map(abs, differences)) <= 5, line
