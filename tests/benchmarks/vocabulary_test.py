"""Time and peak memory stand beside torch; parity is `torch_update_test`'s."""

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
def test_time_and_memory_stand_beside_torch(monkeypatch):
  # A process each takes seconds; one number is like the other.
  monkeypatch.setattr(vocabulary, '_peak_apart', vocabulary.peak)
  told = vocabulary.run(_TINY, repeats=2)
  assert re.findall(r'^\| (\w+)', told, re.M) == ['case', 'ours', 'torch']
  assert re.search(r'^torch / ours: \d\S+ .* at least 1$', told, re.M)
  assert re.search(r'^memory, ours / torch: \d\S+; goal: .* 0.4$', told, re.M)


def test_memory_grows_with_the_length():
  told = vocabulary.slope(_TINY, (40, 80))
  assert re.findall(r'^\| (\d+)', told, re.M) == ['40', '80']
  assert re.search(r'^slope \d\.\d+; goal: at most 1.15$', told, re.M)
