"""The accelerator's benchmark, small and on a CPU."""

import json
import os
import subprocess
import sys
import time
import types

import pytest

from benchmarks import accelerator
from benchmarks import accelerator_engine

_TINY = (
  '--sizes=tiny --rows=8 --microbatch=4 --length=128 --dialogues=4 --slots=2 '
  '--prompt=32 --decode_chunk=4 --product=256 --decode_rows=4'
).split()
_PAGE = 'a\n<!-- one accelerator -->\nb\n<!-- end of one accelerator -->\nc\n'
_LIMITS = {'product': (1e-3, 0.0, 2e11, 0.0), 'copy': (1e-3, 0.0, 0.0, 4e9)}


def _figures(size, lines):
  found = {'size': size, 'device': 'a device', 'jax': '1', 'peak': 3 * 2**29}
  found['lines'] = [[name, *numbers] for name, numbers in lines.items()]
  return found | {'date': '2025-01-01'}


@pytest.fixture
def stub(monkeypatch, tmp_path):
  """Measures nothing; has the page, and the pieces that would be measured."""
  made = types.SimpleNamespace(
    page=tmp_path / 'page.md', run=[], device='a device', codes={}
  )
  made.page.write_text(_PAGE)

  def figures(name, words):
    made.run.append(name)
    if name in made.codes:
      return made.codes[name]
    found = _figures('0.5B', {name: (2.0, 1000, 1e14, 0.0)})
    found = _figures('', _LIMITS) if name == 'limits' else found
    return found | {'device': made.device}

  monkeypatch.chdir(tmp_path)  # the default folder is there
  monkeypatch.setattr(accelerator, 'PAGE', made.page)
  monkeypatch.setattr(accelerator, 'measured_in_process', figures)
  return made


_WORDS = ['--sizes=0.5B']
_ALL = [*_WORDS, '--all', '--write']


def test_only_what_is_missing_is_measured(stub, capsys):
  assert accelerator.main([*_WORDS, '--only', 'limits', 'decode']) == 0
  decodes = ['decode-0.5B-128', 'decode-0.5B-256']
  assert stub.run == ['limits', *decodes]
  stub.run.clear()
  stub.codes['step-0.5B'] = 70
  assert accelerator.main(_ALL) == 70
  packed, *others = (f'update-0.5B-{x}' for x in ('packed', 'tiles', 'padded'))
  assert stub.run == [packed, 'step-0.5B', *others]
  assert stub.page.read_text() == _PAGE
  assert 'pieces are missing' in capsys.readouterr().err
  stub.codes.clear()
  assert accelerator.main(_ALL) == 0
  text = stub.page.read_text()
  assert text.startswith('a\n') and text.endswith('\nc\n')
  assert '\nb\n' not in text and 'Measured on 2025-01-01: one a dev' in text
  rows = [line.split() for line in text.splitlines() if '-0.5B' in line]
  assert [row[3] for row in rows] == [packed, *decodes, 'step-0.5B', *others]
  # 1e14 operations in 2 s are 50 TFLOP/s, a quarter of those of the product.
  assert rows[0][5:] == '2 | 500 | 50 TFLOP/s | 25.0 % | 1.5 |'.split()
  stub.run.clear()
  accelerator.main([*_ALL, '--length=64'])  # another size
  assert len(stub.run) == 7


@pytest.mark.parametrize(
  'folder', ['stppo_jax', 'configs', 'benchmarks', 'jax']
)
def test_a_change_is_measured_again(folder, stub, monkeypatch, tmp_path):
  monkeypatch.setattr(accelerator, '_ROOT', tmp_path)
  words = [*_WORDS, '--only', 'limits']
  for _ in range(2):
    accelerator.main(words)
  assert len(stub.run) == 1
  if folder == 'jax':
    monkeypatch.setattr(accelerator.jax, '__version__', 'another')
  else:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / 'new.py').write_text('x = 1')
  accelerator.main(words)
  assert len(stub.run) == 2


def _refused(words, message, capsys):
  assert accelerator.main(words) == 2
  error = capsys.readouterr().err
  assert message in error and error.count('\n') == 1


def test_a_table_needs_all_figures_of_one_accelerator(stub, tmp_path, capsys):
  _refused(['--all', '--write', '--sizes=tiny'], '--sizes=tiny', capsys)
  only = [*_WORDS, '--only', 'limits']
  _refused([*only, '--write'], 'lacks update-0.5B-packed, ', capsys)
  assert not stub.run and not (tmp_path / 'figures').exists()
  stub.device = 'cpu'
  accelerator.main([*_WORDS, '--all'])
  _refused(_ALL, 'these are of a cpu', capsys)
  path = tmp_path / 'figures' / 'limits.json'
  path.write_text(path.read_text().replace('"cpu"', '"another"'))
  _refused([*_WORDS, '--all'], 'has one device, not another and cpu', capsys)
  assert stub.page.read_text() == _PAGE


@pytest.mark.parametrize(('returned', 'code'), [(None, 75), (1, 70)])
def test_the_exit_code_says_whether_to_go_on(
  returned, code, monkeypatch, tmp_path
):
  def run(command, **options):
    if returned is None:
      raise subprocess.TimeoutExpired(command, options['timeout'])
    return subprocess.CompletedProcess(command, returned, '')

  monkeypatch.setattr(accelerator.subprocess, 'run', run)
  words = [*_WORDS, '--only', 'limits', f'--folder={tmp_path}']
  assert accelerator.main(words) == code


def test_times_that_make_no_sense_are_measured_again():
  # Prompts of 2 s, short turns of 1 s and long ones of 5 s.
  times = iter([(3.0, 3.0), (1.0, 9.0), (3.0, 7.0)])
  found = accelerator_engine.parts_of(lambda: next(times), 1 / 4)
  assert found == (4.0, 2.0)
  with pytest.raises(RuntimeError, match='3 s with short turns and 2.5 s with'):
    accelerator_engine.parts_of(lambda: (3.0, 2.5), 1 / 4)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(tmp_path, capfd):
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
  assert accelerator.main(words) == 0
  assert (folder / 'limits.json').read_bytes() == limits
  output = capfd.readouterr().out
  assert output.count('limits ...') == 1
  programs = {
    line[0]
    for path in folder.glob('*.json')
    for line in json.loads(path.read_text())['lines']
  }
  assert len(programs) == 2 + 3 * 2 + 2 + 4
  assert all(f'| {name} ' in output for name in programs)
