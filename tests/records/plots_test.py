"""The numbers of the curves, and the picture of them."""

import json
import math

from matplotlib import image
import numpy as np
import pytest

from stppo_jax.records import plots


def _write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def _rows(num_steps):
  for step in range(1, num_steps + 1):
    row = {
      'step': step,
      'critic/score/mean': step / 10,
      'actor/ppo_kl': 0.01 * step,
      'writer/non_finite': {'x': 'nan'},
      'x': None,
    }
    for level, share in (('token', 0.02), ('turn', 0.1), ('sequence', 0.2)):
      row[f'clipfrac/{level}/low'] = share
      row[f'clipfrac/{level}/high'] = 2 * share
    if step % 4 == 0:
      row['val/em/one_hop'] = 0.5
    yield row


def test_columns_have_nan_where_a_step_has_nothing(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  _write(path, [{'step': 1, 'a': 1.0}, {'step': 2, 'a': None, 'b': 2}])
  columns = plots.read_metrics(path)
  np.testing.assert_array_equal(columns['step'], [1, 2])
  np.testing.assert_array_equal(columns['a'], [1, math.nan])
  np.testing.assert_array_equal(columns['b'], [math.nan, 2])


def test_trailing_mean_by_hand():
  values = np.array([1.0, 3.0, math.nan, 5.0, 7.0])
  found = plots.trailing_mean(values, 3)
  np.testing.assert_allclose(found, [1, 2, 2, 4, 6])
  nothing = np.array([math.nan, 2.0])
  np.testing.assert_array_equal(plots.trailing_mean(nothing, 1), [math.nan, 2])


def test_the_curves_are_the_metrics(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  _write(path, _rows(10))
  title = 'quickstart: st_ppo, seed 3'
  page = plots.draw(path, title=title)
  assert page.get_suptitle() == title
  lines = {
    line.get_label(): line.get_xydata()
    for axes in page.axes
    for line in axes.get_lines()
  }
  train = lines['train, mean of 5 steps']
  np.testing.assert_allclose(train[-1], [10, 0.8])
  np.testing.assert_allclose(lines['val/em/one_hop'], [[4, 0.5], [8, 0.5]])
  np.testing.assert_allclose(lines['turn ratio'][:, 1], 0.3)
  np.testing.assert_allclose(lines['to the sampling policy'][2], [3, 0.03])
  assert 'to the reference' not in lines


def test_few_metrics_still_draw_and_none_are_an_error(tmp_path):
  path, png = tmp_path / 'metrics.jsonl', tmp_path / 'curve.png'
  path.touch()
  with pytest.raises(ValueError, match='metrics.jsonl: '):
    plots.learning_curve(path, png)
  _write(path, [{'step': 1, 'critic/score/mean': None}])
  plots.learning_curve(path, png, title='$\\frac$')
  assert image.imread(png).shape == (1280, 1200, 4)
  assert [p.name for p in tmp_path.glob('curve*')] == ['curve.png']
