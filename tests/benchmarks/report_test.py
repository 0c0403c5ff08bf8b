"""Small versions of the benchmark of reports."""

import re

import pytest

from benchmarks import report
from tests.training import runs


@pytest.mark.slow
def test_a_page_is_written_and_measured():
  first, second = report.pages(steps=4, dialogues=3, tokens=4)
  assert first.startswith('4 steps, 12 dialogues, 4 tokens a turn: report in ')
  assert re.search(r'\d+\.\d MB', first)
  assert re.match(r'dialogues shown after \d+\.\d+ s|not opened: needs', second)


@pytest.mark.slow
def test_the_cost_of_records_is_measured():
  changes = {'num_steps': 4, 'writer__token_details': 4, 'evaluate__every': 0}
  line = report.records(runs.flags(**changes))
  for part in ('numbers of tokens', 'writing', 'measures of all levels'):
    assert re.search(rf'{part} -?\d+\.\d ms \(-?\d+\.\d%\)', line)
