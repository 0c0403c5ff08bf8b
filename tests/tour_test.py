"""The cells of docs/tour.ipynb run on the folder that they name."""

import json
import pathlib
import runpy

import matplotlib.pyplot as plt

from benchmarks import made_runs

_NOTEBOOK = pathlib.Path(__file__).parents[1] / 'docs' / 'tour.ipynb'


def test_the_cells_run_one_after_the_other(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  plt.switch_backend('agg')
  made_runs.make(
    tmp_path / 'runs' / 'quickstart-st_ppo-seed0', steps=30, collapses=True
  )
  cells = [
    cell
    for cell in json.loads(_NOTEBOOK.read_text('utf-8'))['cells']
    if cell['cell_type'] == 'code'
  ]
  # Nothing is kept of an earlier run of the notebook.
  assert not any(cell['outputs'] for cell in cells)
  script = tmp_path / 'tour.py'
  script.write_text('\n'.join(''.join(cell['source']) for cell in cells))
  names = runpy.run_path(str(script))
  figures = [plt.figure(number) for number in plt.get_fignums()]
  lines = [len(axes.lines) for page in figures for axes in page.axes]
  plt.close('all')
  assert lines == [2, 3, 3]
  assert names['success_curve'].curve(names['reward'], names['steps']).collapsed
  assert names['first'] == {'entropy': 25}
  out = capsys.readouterr().out
  assert out.startswith('seed 0, finished: 31 lines\nstep 30\n')
  assert 'Who built bridge' in out
  assert len(names['changes']) == len(names['pieces']) == 8
