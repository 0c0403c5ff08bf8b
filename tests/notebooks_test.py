"""The cells of the notebooks of docs/ run on the folders that they name."""

import json
import os
import pathlib
import runpy

import matplotlib.pyplot as plt
import pytest

from benchmarks import made_runs
from stppo_jax.tools.report import dialogue_data

_ROOT = pathlib.Path(__file__).parents[1]
_TOUR, _COMPARE = 'tour.ipynb', 'compare.ipynb'


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A working directory with the runs that the notebooks read."""
  monkeypatch.chdir(tmp_path)
  plt.switch_backend('agg')
  made_runs.make(
    tmp_path / 'runs' / 'quickstart-st_ppo-seed0', steps=30, collapses=True
  )
  for seed, level in enumerate(('token', 'turn')):
    made_runs.make(
      tmp_path / 'runs' / 'token_or_turn' / f'{level}_ppo-seed0',
      steps=30,
      seed=seed,
      evaluated=8,
      algorithm=f'{level}_ppo',
      collapses=level == 'token',
    )
  return tmp_path


def _run(name, folder):
  """Returns the names and the numbers of lines of the figures of a notebook."""
  notebook = json.loads((_ROOT / 'docs' / name).read_text('utf-8'))
  cells = [x for x in notebook['cells'] if x['cell_type'] == 'code']
  # Nothing is kept of an earlier run of the notebook.
  assert not any(cell['outputs'] for cell in cells)
  script = folder / 'cells.py'
  script.write_text('\n'.join(''.join(cell['source']) for cell in cells))
  names = runpy.run_path(str(script))
  figures = [plt.figure(number) for number in plt.get_fignums()]
  lines = [len(axes.lines) for page in figures for axes in page.axes]
  plt.close('all')
  return names, lines


def test_the_cells_of_the_tour_run_one_after_the_other(folder, capsys):
  names, lines = _run(_TOUR, folder)
  assert lines == [2, 3, 3]
  assert names['success_curve'].curve(names['reward'], names['steps']).collapsed
  assert names['first'] == {'entropy': 25}
  out = capsys.readouterr().out
  assert out.startswith('seed 0, finished: 31 lines\nstep 30\n')
  assert 'Who built bridge' in out
  assert len(names['changes']) == len(names['pieces']) == 8


def test_two_runs_are_compared(folder, capsys):
  names, lines = _run(_COMPARE, folder)
  assert lines == [2, 2, 2, 2]
  # The run with token ratios collapses in the second half.
  assert names['difference'][-1] > 0.5 > abs(names['difference'][5])
  rows = {name: values for name, *values in names['table']}
  assert rows['collapsed at step'][1] is None
  token, turn = rows['last reward']
  assert turn - token > 0.5
  token, turn = map(dialogue_data.reward, names['pair'].values())
  assert token != turn
  out = capsys.readouterr().out
  assert 'collapsed at step' in out
  assert out.index('\ntoken ratio\n') < out.index('\nturn ratio\n')


@pytest.mark.slow
@pytest.mark.parametrize('name', [_TOUR, _COMPARE])
def test_a_notebook_runs_in_a_kernel_of_jupyter(name, folder, monkeypatch):
  import nbclient
  import nbformat

  path = os.pathsep.join([str(_ROOT), os.environ.get('PYTHONPATH', '')])
  monkeypatch.setenv('PYTHONPATH', path)
  text = (_ROOT / 'docs' / name).read_text('utf-8')
  notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
  nbformat.validate(notebook)
  nbclient.NotebookClient(
    notebook, timeout=300, resources={'metadata': {'path': str(folder)}}
  ).execute()
  kinds = [
    kind
    for cell in notebook.cells
    for output in cell.get('outputs', ())
    for kind in output.get('data', {output.output_type: ''})
  ]
  assert kinds.count('image/png') == 2 and 'stream' in kinds
  assert 'error' not in kinds
