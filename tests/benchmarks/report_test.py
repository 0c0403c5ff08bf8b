"""A small version of the benchmark of reports."""

import re

import pytest

from benchmarks import report


@pytest.mark.slow
def test_a_page_is_written_and_measured():
  first, second = report.pages(steps=4, dialogues=3, tokens=4)
  assert first.startswith('4 steps, 12 dialogues, 4 tokens a turn: report in ')
  assert re.search(r'\d+\.\d MB', first)
  assert re.match(r'dialogues shown after \d+\.\d+ s|not opened: needs', second)
