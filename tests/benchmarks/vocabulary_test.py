"""Time and peak memory against torch; torch_update_test checks parity."""

import re

import pytest

pytest.importorskip('torch', exc_type=ImportError)
pytestmark = pytest.mark.torch

from benchmarks import learners  # noqa: E402
from benchmarks import vocabulary  # noqa: E402

_TINY = learners.Sizes(
  vocabulary=64, width=32, layers=1, rows=8, length=40, chunk=24
)


@pytest.mark.slow
def test_time_and_memory_are_compared_with_torch(monkeypatch):
  # A process each takes seconds; one number is like the other.
  monkeypatch.setattr(vocabulary, 'peak_apart', vocabulary.peak)
  report = vocabulary.run(_TINY, repeats=2)
  assert re.findall(r'^\| (\w+)', report, re.M) == ['case', 'ours', 'torch']
  assert re.search(r'^torch, eager / ours: \d\S+ .* at least 1$', report, re.M)
  assert re.search(r'^memory, ours / torch: \d\S+; goal: .* 0.4$', report, re.M)


def test_the_steepest_growth_counts(monkeypatch):
  # Logits of a chunk, and something that grows with the square of the length.
  monkeypatch.setattr(
    vocabulary, 'temporary', lambda x: x.vocabulary * 4096 + x.length**2
  )
  sizes = _TINY._replace(vocabulary=100_000)
  report = vocabulary.slope(sizes, (512, 2048, 8192))
  rows = re.findall(r'^\| (\d+) .*\| +(\S*) \|.*\| +(\S*) \|$', report, re.M)
  assert rows == [
    ('512', '', ''),
    ('2048', '0.007', '0.456'),
    ('8192', '0.102', '1.544'),
  ]
  assert report.endswith('greatest slope 1.544; goal: at most 1.15')


def test_memory_grows_with_the_length():
  report = vocabulary.slope(_TINY, (512, 1024))
  slope = float(re.search(r'^greatest slope (\d\.\d+);', report, re.M)[1])
  assert 0.5 < slope <= vocabulary.SLOPE_GOAL


def test_a_slope_needs_two_lengths(capsys):
  with pytest.raises(SystemExit) as ended:
    vocabulary.main(['--lengths', '512'])
  assert ended.value.code == 2
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.endswith('--lengths=512: must be none, or at least two')
