"""The whole update against torch: parity is checked before timing."""

import re

import pytest

pytest.importorskip('torch', exc_type=ImportError)
pytestmark = pytest.mark.torch

from benchmarks import learners  # noqa: E402
from benchmarks import torch_trainer  # noqa: E402
from benchmarks import torch_update  # noqa: E402

_TINY = learners.Sizes(64, 32, layers=1, rows=8, length=40, core_rows=2)


def test_updates_are_equal_and_compared_with_torch():
  report = torch_update.run([_TINY], repeats=2, compiled=False)
  row = (
    r'^\| 32 x 1, \[8, 40\], 64 .* \| torch, eager \| \d+\.\d+ '
    r'.*1, \w+ rows, f\w+ +\|$'
  )
  assert re.search(row, report, re.M)
  assert report.splitlines()[-1].startswith(('undist', 'NOT A RESULT'))


def test_dialogues_are_compared_with_torch_padded_and_packed():
  report = torch_update.run(
    [_TINY._replace(dialogues=True)], repeats=2, compiled=True
  )
  cases = re.findall(
    r'^\| 32 x 1, .* 64, dialogues +\| ([^|]+) \|', report, re.M
  )
  assert [case.strip() for case in cases] == ['torch, padded', 'torch, packed']
  assert 'torch, packed at least 1.3' in report


def test_a_dialogue_that_sees_another_is_not_parity(monkeypatch):
  packed = torch_trainer.packed_rows

  def one_sequence(batch, arrays):
    tokens, positions, *others = packed(batch, arrays)
    positions[:] = range(positions.shape[1])
    return [tokens, positions, *others]

  monkeypatch.setattr(torch_trainer, 'packed_rows', one_sequence)
  with pytest.raises(AssertionError):
    torch_update.Pair(_TINY._replace(dialogues=True), compiled=False)


def test_other_gradients_are_not_parity():
  pair = torch_update.Pair(_TINY, compiled=False)
  theirs = torch_trainer.Trainer(pair.ours, pair.before)
  found = theirs.step()
  check = lambda: torch_update.assert_parity(
    pair.ours, pair.metrics, theirs, found, pair.before
  )
  check()
  norm = theirs.value.model.norm.weight
  norm.data += 0.01  # a weight elsewhere
  with pytest.raises(AssertionError, match='value'):
    check()
  norm.data -= 0.01
  moments = theirs.moments('policy')  # which share the optimiser's memory
  moments['model.layers.0.self_attn.q_proj.weight'] *= 1.5
  with pytest.raises(AssertionError, match='policy model.layers.0.*q_proj'):
    check()
