"""docs/adding_an_environment.md, followed to the letter in a copy."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PAGE = (_ROOT / 'docs' / 'adding_an_environment.md').read_text('utf-8')

_FILE = re.compile(
  r'Write `(?P<name>[^`]+)` in `(?P<folder>[^`]+)`:\n\n'
  r'```(?:python|json)\n(?P<code>.*?)```',
  re.DOTALL,
)
_LINE = re.compile(
  r'In `(?P<path>[^`]+)`, after the line\s+`(?P<line>[^`]+)`:\n\n'
  r'```python\n(?P<code>.*?)```',
  re.DOTALL,
)


class Step(NamedTuple):
  """A new file, or code behind a line of a file, indented like that line."""

  path: str
  line: str
  code: str

  def apply(self, root: pathlib.Path) -> None:
    path = root / self.path
    if not self.line:
      path.parent.mkdir(exist_ok=True)
      assert not path.exists()
      path.write_text(self.code, encoding='utf-8')
      return
    lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
    (found,) = [i for i, x in enumerate(lines) if x.strip() == self.line]
    indent = lines[found][: -len(lines[found].lstrip())]
    lines.insert(found + 1, indent + self.code)
    path.write_text(''.join(lines), encoding='utf-8')


def steps(folder: str) -> list[Step]:
  """Returns the steps of the page that touch files of a folder."""
  found = [
    Step(f'{m["folder"]}/{m["name"]}', '', m['code'])
    for m in _FILE.finditer(_PAGE)
  ]
  found += [
    Step(m['path'], m['line'], m['code']) for m in _LINE.finditer(_PAGE)
  ]
  return [step for step in found if step.path.startswith(folder)]


def test_every_block_of_code_is_a_step():
  assert len(steps('')) == len(re.findall(r'```(?:python|json)\n', _PAGE)) == 5


@pytest.mark.slow
def test_the_command_of_the_page_trains(tmp_path):
  for name in ('configs', 'stppo_jax'):
    shutil.copytree(_ROOT / name, tmp_path / name, symlinks=True)
  (tmp_path / 'assets').symlink_to(_ROOT / 'assets')
  for step in steps(''):
    step.apply(tmp_path)
  (console,) = re.findall(r'```console\n\$ python (.*?)\n```', _PAGE)
  done = subprocess.run(
    [sys.executable, *shlex.split(console)],
    cwd=tmp_path,
    env=dict(os.environ, PYTHONPATH=str(tmp_path)),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  metrics = (tmp_path / 'runs' / 'guess' / 'metrics.jsonl').read_text('utf-8')
  assert 'env/number_of_guesses' in metrics and 'score/guessed' in metrics
