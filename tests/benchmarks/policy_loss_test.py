"""Parity with plain torch is checked before timing, and fails if it must."""

import re

import numpy as np
import pytest

torch = pytest.importorskip('torch', exc_type=ImportError)
pytestmark = pytest.mark.torch

from benchmarks import policy_loss  # noqa: E402
from benchmarks import torch_reference  # noqa: E402

_TINY = (4, 96, 3)


def test_every_algorithm_and_form_is_in_the_table():
  table = policy_loss.run(*_TINY, repeats=2)
  found = re.findall(r'^\| (\w+) +\| (\w+) +\|', table, re.M)
  forms = list(torch_reference.TURN_MEANS)
  assert [line for line in found if line[0] != 'algorithm'] == [
    ('token_ppo', 'plain'),
    *(('turn_ppo', form) for form in forms),
    *(('st_ppo', form) for form in forms),
  ]
  assert 'compile, s: token_ppo' in table


@pytest.mark.parametrize('constant', ['CLIP', 'TAU', 'ENTROPY_COEFFICIENT'])
def test_another_formula_is_not_timed(monkeypatch, constant):
  value = getattr(torch_reference, constant)
  ours = policy_loss.compile_ours

  def first_ours(*arguments):
    monkeypatch.setattr(torch_reference, constant, value)
    result = ours(*arguments)
    monkeypatch.setattr(torch_reference, constant, 0.1 * value)
    return result

  monkeypatch.setattr(policy_loss, 'compile_ours', first_ours)
  with pytest.raises(AssertionError):
    policy_loss.run(*_TINY, repeats=2)


@pytest.mark.parametrize('form', torch_reference.TURN_MEANS)
def test_turn_means_by_hand(form):
  x = torch.tensor([[1.0, 3.0, 9.0, 5.0], [2.0, 4.0, 6.0, 0.0]])
  ids = torch.tensor([[1, 1, 0, 2], [2, 2, 2, 0]])
  means = torch_reference.TURN_MEANS[form](x, ids, 2)
  own = np.asarray(ids) > 0
  np.testing.assert_allclose(
    np.where(own, means, 0), [[2, 2, 0, 5], [4, 4, 4, 0]]
  )
