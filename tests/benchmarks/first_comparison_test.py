"""The first comparison is made, opened, and timed."""

import re

import pytest

from benchmarks import chromium
from benchmarks import first_comparison


@pytest.mark.slow
def test_the_seconds_until_the_differences_are_seen(tmp_path):
  flags = ['--seeds=1', '--config.num_steps=1', '--config.evaluate.every=0']
  try:
    text = first_comparison.report(tmp_path, cores=2, arguments=flags)
  except chromium.Missing as missing:
    pytest.skip(str(missing))
  seconds = dict(re.findall(r'^\| ([\w ]+?) +\| (\d+) ', text, re.M))
  written, seen = (
    seconds['the report is written'],
    seconds['the comparison is seen'],
  )
  assert 0 < int(written) <= int(seen)
  assert 0 < int(seconds['CPU']) <= 2 * int(seen)
  assert text.splitlines()[-1].split('\t')[:3] == ['turn_ppo', 'token_ppo', '1']
