"""The accelerator's benchmark, small and on a CPU."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks import accelerator

_TINY = (
  '--sizes=tiny',
  '--rows=8',
  '--microbatch=4',
  '--length=128',
  '--dialogues=4',
  '--slots=2',
  '--prompt=32',
  '--decode_chunk=4',
  '--product=256',
  '--decode_rows=4',
)
_PAGE = 'a\n<!-- one accelerator -->\nb\n<!-- end of one accelerator -->\nc\n'
_LIMITS = {'product': (1e-3, 0.0, 2e11, 0.0), 'copy': (1e-3, 0.0, 0.0, 4e9)}


def _figures(size, lines):
  return {
    'size': size,
    'device': 'a device',
    'jax': '1',
    'date': '2025-01-01',
    'peak': 3 * 2**29,
    'lines': [[name, *numbers] for name, numbers in lines.items()],
  }


@pytest.fixture
def stub(monkeypatch, tmp_path):
  """Measures nothing; returns the page and the pieces that would be."""
  page, run = tmp_path / 'page.md', []
  page.write_text(_PAGE)

  def figures(name, words):
    run.append(name)
    if name == 'limits':
      return _figures('', _LIMITS)
    if 'step' in name:
      return 'exit code 1'
    return _figures('tiny', {name: (2.0, 1000, 1e14, 0.0)})

  monkeypatch.setattr(accelerator, 'PAGE', page)
  monkeypatch.setattr(accelerator, 'measured_in_process', figures)
  return page, run


def test_only_what_is_missing_is_measured(stub, tmp_path, capsys):
  page, run = stub
  words = [f'--folder={tmp_path / "figures"}', '--sizes=tiny', '--write']
  # The exit code says whether to go on.
  assert accelerator.main([*words, '--only', 'limits', 'decode']) == 0
  decodes = ['decode-tiny-128', 'decode-tiny-256']
  assert run == ['limits', *decodes]
  run.clear()
  assert accelerator.main([*words, '--all']) == 75
  updates = [f'update-tiny-{x}' for x in ('packed', 'tiles', 'padded')]
  assert run == [*updates, 'step-tiny']
  assert 'step-tiny: exit code 1' in capsys.readouterr().out
  text = page.read_text()
  assert (
    text.startswith('a\n') and text.endswith('\nc\n') and '\nb\n' not in text
  )
  assert 'Measured on 2025-01-01: one a device, jax 1, commit ' in text
  rows = [line.split() for line in text.splitlines() if 'tiny-' in line]
  assert [row[3] for row in rows] == [*updates, *decodes]
  # 1e14 operations in 2 s are 50 TFLOP/s, a quarter of those of the product.
  assert rows[0][5:] == '2 | 500 | 50 TFLOP/s | 25.0 % | 1.5 |'.split()
  run.clear()
  accelerator.main([*words, '--all', '--length=64'])  # another size
  assert len(run) == 7


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    (['--folder=x'], 'one of the arguments --all --only is required'),
    (['--all', '--folder=/proc/x'], '--folder=/proc/x: '),
  ],
)
def test_a_bad_command_is_an_error(words, message, capsys):
  with pytest.raises(SystemExit, match='^2$'):
    accelerator.main(words)
  assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(tmp_path, monkeypatch, capfd):
  folder = tmp_path / 'figures'
  words = [*_TINY, '--all', f'--folder={folder}']
  first = subprocess.Popen(
    [sys.executable, '-m', 'benchmarks.accelerator', *words],
    start_new_session=True,
  )
  while not (folder / 'limits.json').exists():
    assert first.poll() is None
    time.sleep(0.1)
  os.killpg(first.pid, 9)
  first.wait()
  limits = (folder / 'limits.json').read_bytes()
  monkeypatch.setattr(accelerator, 'PAGE', tmp_path / 'page.md')
  accelerator.PAGE.write_text(_PAGE)
  assert accelerator.main([*words, '--write']) == 0
  assert (folder / 'limits.json').read_bytes() == limits
  output = capfd.readouterr().out
  assert output.count('limits ...') == 1
  programs = {
    line[0]
    for path in folder.glob('*.json')
    for line in json.loads(path.read_text())['lines']
  }
  assert len(programs) == 2 + 3 * 2 + 2 + 4
  page = accelerator.PAGE.read_text()
  assert all(f'| {name} ' in page for name in programs)
