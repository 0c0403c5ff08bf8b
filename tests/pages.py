"""Reads what pages of docs/ say to write and to run, and does it in a copy."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_FOLDERS = (
  *('assets', 'benchmarks', 'configs', 'docs', 'launch', 'stppo_jax'),
  *('studies', 'tests'),
)
_STEP = re.compile(
  r'(?:In `(?P<path>[^`]+)`,\s+(?P<place>before|after)\s+the\s+line\s+'
  r'(?:`` (?P<ticked>.+?) ``|`(?P<plain>[^`]+)`)'
  r'|At\s+the\s+(?P<end>end)\s+of\s+`(?P<long>[^`]+)`'
  r'|Write\s+`(?P<new>[^`]+)`\s+in\s+`(?P<folder>[^`]+)`)'
  r':\n\n```(?:python|text|json)\n(?P<code>.*?)```',
  re.DOTALL,
)


class Step(NamedTuple):
  """Code that goes before or after a line, to the end, or to a new file."""

  path: str
  place: str
  line: str
  code: str

  def apply(self, root: pathlib.Path) -> None:
    path = root / self.path
    if self.place == 'new':
      path.parent.mkdir(exist_ok=True)
      assert not path.exists(), f'{self.path} exists already'
      path.write_text(self.code, encoding='utf-8')
      return
    lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
    if self.place == 'end':
      index, code = len(lines), f'\n\n{self.code}'
    else:
      (found,) = [i for i, x in enumerate(lines) if x.strip() == self.line]
      index, code = found + (self.place == 'after'), self.code
    path.write_text(
      ''.join([*lines[:index], code, *lines[index:]]), encoding='utf-8'
    )


def text(page: str) -> str:
  """Returns the text of a page of docs/."""
  return (_ROOT / 'docs' / f'{page}.md').read_text(encoding='utf-8')


def steps(page: str) -> list[Step]:
  """Returns the steps of a page."""
  return [
    Step(
      m['path'] or m['long'] or f'{m["folder"]}/{m["new"]}',
      m['place'] or m['end'] or 'new',
      m['ticked'] or m['plain'] or '',
      m['code'],
    )
    for m in _STEP.finditer(text(page))
  ]


def commands(page: str) -> list[list[str]]:
  """Returns the words of the commands of a page."""
  consoles = re.findall(r'```console\n(.*?)```', text(page), re.DOTALL)
  lines = ''.join(consoles).splitlines()
  assert lines and all(line.startswith('$ ') for line in lines)
  return [shlex.split(line[2:]) for line in lines]


def copy(root: pathlib.Path) -> None:
  """Copies what people change, commands read and tests look at."""
  # Modification times are kept, so that compiled modules stay valid.
  for name in _FOLDERS:
    shutil.copytree(_ROOT / name, root / name, symlinks=True)
  for path in _ROOT.iterdir():
    if path.is_file():
      shutil.copy2(path, root)
  (root / '.cache').symlink_to(_ROOT / '.cache')


def run(words: list[str], root: pathlib.Path) -> subprocess.CompletedProcess:
  """Runs a command of a page in a copy, with this Python."""
  if words[0] == 'python':
    words = [sys.executable, *words[1:]]
  elif words[0] == 'make':
    folder = pathlib.Path(sys.executable).parent
    words = [*words, f'BIN={folder}', 'RUNTIME=', 'TESTING=']
  # The copy comes before what else is on the path, such as PyTorch.
  paths = [str(root), *os.environ.get('PYTHONPATH', '').split(os.pathsep)]
  return subprocess.run(
    words,
    cwd=root,
    env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
    capture_output=True,
    text=True,
    timeout=1800,
  )
