"""The pictures of `lab compare` and `lab levels`."""

import numpy as np
import pytest

from stppo_jax.records import plots
from tests.commands import lab_calls

_ALGORITHMS = '--algorithms=token_ppo,turn_ppo'


@pytest.fixture
def page(monkeypatch):
  """Returns the pages that were saved."""
  saved, save = [], plots.save

  def save_and_keep(page, path, **options):
    saved.append(page)
    save(page, path, **options)

  monkeypatch.setattr(plots, 'save', save_and_keep)
  return saved


def test_compare_draws_shares_and_cosines(file, tmp_path, page, capsys):
  out = tmp_path / 'P.png'
  narrow = 'turn_ppo:bounds.clip_high=0.01'
  chosen = f'--algorithms=turn_ppo,{narrow}'
  words = ('compare', f'--batch={file}', chosen, f'--plot={out}')
  found = lab_calls.metrics(capsys, *words, '--json')
  assert out.read_bytes().startswith(b'\x89PNG')
  *panels, cosines = page[0].get_axes()
  assert len(panels) == 9
  for axes in panels:
    assert len(axes.get_lines()) == 2
    for line in axes.get_lines():
      shares = np.asarray(line.get_ydata(), float)
      shares = shares[~np.isnan(shares)]
      assert len(shares) and ((shares >= 0) & (shares <= 1)).all()
  shown = cosines.get_images()[0].get_array()
  assert shown[0, 1] == pytest.approx(found['cosines']['turn_ppo'][narrow])
  assert shown[0, 1] < 0.99


@pytest.mark.slow
def test_levels_draws_bounds_where_they_hold(file, tmp_path, page, capsys):
  out = tmp_path / 'P.png'
  words = ('levels', f'--batch={file}', _ALGORITHMS, f'--plot={out}')
  assert lab_calls.lab(*words) == 0
  assert 'turn_ppo' in capsys.readouterr().out
  bounds = [
    [line.get_xdata()[0] for line in axes.get_lines()]
    for axes in page[0].get_axes()
  ]
  # Neither algorithm has a ratio of sentences or sequences.
  both = pytest.approx(np.log([0.8, 1.2]), rel=1e-5)
  assert bounds == [both, both, [], []]
