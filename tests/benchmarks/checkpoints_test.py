"""The benchmark of checkpoints, with a run that is small enough for a test."""

import re

import pytest

from benchmarks import checkpoints
from tests.training import runs

_NUMBER = r'([0-9.]+)'


@pytest.mark.slow
def test_fingerprints_are_compared_with_updates():
  config = runs.config()
  line = checkpoints.report_fingerprints(config, length=128, repeats=7)
  pattern = (
    rf'the fingerprints of {_NUMBER} MiB take {_NUMBER} .*, the updates of a '
    rf'step {_NUMBER} .* ms: {_NUMBER} .*goal 0.02'
  )
  found = re.match(pattern, line)
  assert found, line
  megabytes, part, whole, share = (float(x) for x in found.groups())
  assert megabytes > 0 and share == pytest.approx(part / whole, abs=0.1)


@pytest.mark.slow
def test_saves_that_threads_write_are_compared_with_whole_ones(tmp_path):
  line = checkpoints.report(tmp_path, megabytes=4, repeats=2)
  pattern = (
    rf'4 MiB: a save takes {_NUMBER} s, .* for {_NUMBER} s .*: {_NUMBER} '
  )
  found = re.match(pattern, line)
  assert found, line
  whole, beside, share = (float(x) for x in found.groups())
  assert share == pytest.approx(beside / whole, abs=0.1)
