"""The formulas of the accelerator's benchmark, and one small run of it."""

import re

import pytest

from benchmarks import accelerator

_TINY = (
  '--sizes=tiny',
  '--rows=4',
  '--microbatch=2',
  '--length=256',
  '--slots=4',
  '--prompt=64',
  '--product=256',
)


def test_operations_are_those_of_the_published_shapes():
  # Qwen2.5-1.5B has 1.31e9 weights in its layers and 0.23e9 in its embedding
  # (its model card), and a product with a weight is two operations.
  shape = accelerator.shape_of('1.5B', 'none')
  layers = accelerator.layer_flops(shape, 0)
  assert layers == pytest.approx(2 * 1.31e9, rel=5e-3)
  # Two products with half of 4096 tokens, for each of 12 heads of 128.
  attention = accelerator.layer_flops(shape, 4096) - layers
  assert attention == 28 * 2 * 2 * 2048 * 12 * 128
  policy, value = accelerator.forward_flops(shape, 2, 4096, losses=100)
  assert value == 2 * 4096 * (layers + attention)
  assert policy - value == pytest.approx(100 * 2 * 0.233e9, rel=5e-3)


@pytest.mark.slow
def test_a_run_prints_its_limits_and_tables(capsys):
  accelerator.main(_TINY)
  output = capsys.readouterr().out
  assert 'a product of 256 x 256 matrices: ' in output
  rows = re.findall(r'^\| tiny +\|(.*)\|$', output, re.MULTILINE)
  assert [row.split('|')[0].strip() for row in rows] == [
    'annotate',
    'update',
    '4',
  ]
