"""One small run of the accelerator's benchmark."""

import re

import pytest

from benchmarks import accelerator

_TINY = (
  '--sizes=tiny',
  '--rows=16',
  '--microbatch=8',
  '--length=256',
  '--slots=8',
  '--prompt=64',
  '--product=256',
)


@pytest.mark.slow
def test_a_run_prints_its_limits_and_tables(capsys):
  accelerator.main(_TINY)
  output = capsys.readouterr().out
  assert 'a product of 256 x 256 matrices: ' in output
  rows = re.findall(r'^\| tiny +\|(.*)\|$', output, re.MULTILINE)
  assert [row.split('|')[0].strip() for row in rows] == [
    'annotate',
    'update',
    '8',
  ]
