"""Every form makes the same sums; two of them have their known weakness."""

import functools
import re

import jax
import numpy as np
import pytest

from benchmarks import batches
from benchmarks import turn_sums

_OURS = [f for f in turn_sums.FORMS if f not in ('one_hot', 'prefix_sums')]
_T = 4
_IDS = batches.turn_ids(np.random.default_rng(0), 4, 128, _T)


def _form(name):
  return jax.jit(functools.partial(turn_sums.FORMS[name], num_turns=_T))


def test_exact_sums_by_hand():
  x = np.array([[1e16, 1.0, -1e16, 2.0, 9.0]])
  ids = np.array([[1, 1, 1, 2, 0]])
  np.testing.assert_array_equal(turn_sums.exact_sums(x, ids, 3), [[1, 2, 0]])


@pytest.mark.parametrize('name', turn_sums.FORMS)
def test_forms_agree(name):
  x = np.random.default_rng(1).normal(size=_IDS.shape).astype(np.float32)
  np.testing.assert_allclose(
    _form(name)(x, _IDS), turn_sums.exact_sums(x, _IDS, _T), atol=2e-6
  )


@pytest.mark.parametrize('name', _OURS)
def test_a_small_turn_after_a_large_one_is_exact(name):
  x = turn_sums.large_then_small(_IDS)
  sums = turn_sums.exact_sums(x, _IDS, _T)
  np.testing.assert_allclose(sums[:, :2], [[1e4, 1e-3]] * 4, rtol=1e-6)
  assert turn_sums.small_turn_error(_form(name), _IDS, _T) < 1e-6


def test_prefix_sums_lose_a_small_turn():
  assert turn_sums.small_turn_error(_form('prefix_sums'), _IDS, _T) > 0.01


def test_the_table_shows_the_weaknesses():
  report = turn_sums.run(2, 64, 2, repeats=2)
  lines = report.split('\n\n')[0].splitlines()
  cells = {
    name: rest
    for name, *rest in (re.findall(r'[^|\s][^|]*[^|\s]', x) for x in lines[2:])
  }
  assert list(cells) == list(turn_sums.FORMS)
  for name, (_, _, _, _, small, same_bits, inf_stays) in cells.items():
    assert same_bits == 'yes'
    assert (inf_stays == 'yes') == (name in _OURS)
    assert (float(small) < 1e-6) == (name != 'prefix_sums')


def test_wrong_sums_are_not_timed(monkeypatch):
  wrong = lambda x, ids, num_turns: 1.001 * turn_sums.one_hot(x, ids, num_turns)
  monkeypatch.setattr(turn_sums, 'FORMS', {'wrong': wrong})
  with pytest.raises(AssertionError, match='wrong: error'):
    turn_sums.run(2, 64, 2, repeats=2)
