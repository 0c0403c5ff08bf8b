"""A small version of the benchmark of commands."""

import re

import pytest

from benchmarks import commands


@pytest.mark.slow
def test_what_answers_at_once_is_timed(tmp_path):
  text = commands.report(tmp_path, bad=['num_steps=ten'], runs=2, repeats=1)
  *_, refused, status, config = text.splitlines()
  assert re.match(r'\| train --config.num_steps=ten +\| \d+\.\d\d ', refused)
  assert re.match(r'\| status of 2 runs +\| \d+\.\d\d ', status)
  assert re.match(r'\| config +\| \d+\.\d\d ', config)
