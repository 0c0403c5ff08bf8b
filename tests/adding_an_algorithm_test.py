"""docs/adding_an_algorithm.md, followed to the letter in a copy."""

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
_PAGE = (_ROOT / 'docs' / 'adding_an_algorithm.md').read_text(encoding='utf-8')

_STEP = re.compile(
  r'(?:In `(?P<path>[^`]+)`,\s+(?P<place>before|after)\s+the\s+line\s+'
  r'(?:`` (?P<ticked>.+?) ``|`(?P<plain>[^`]+)`)'
  r'|At\s+the\s+end\s+of\s+`(?P<end>[^`]+)`)'
  r':\n\n```(?:python|text)\n(?P<code>.*?)```',
  re.DOTALL,
)


class Step(NamedTuple):
  """Code that goes before or after a line of a file, or to its end."""

  path: str
  place: str
  line: str
  code: str

  def apply(self, root: pathlib.Path) -> None:
    path = root / self.path
    lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
    if self.place == 'end':
      index, code = len(lines), f'\n\n{self.code}'
    else:
      (found,) = [i for i, x in enumerate(lines) if x.strip() == self.line]
      index, code = found + (self.place == 'after'), self.code
    path.write_text(
      ''.join([*lines[:index], code, *lines[index:]]), encoding='utf-8'
    )


def steps() -> list[Step]:
  """Returns the steps of the page."""
  return [
    Step(
      match['path'] or match['end'],
      match['place'] or 'end',
      match['ticked'] or match['plain'],
      match['code'],
    )
    for match in _STEP.finditer(_PAGE)
  ]


def _commands() -> list[list[str]]:
  (console,) = re.findall(r'```console\n(.*?)```', _PAGE, re.DOTALL)
  lines = console.splitlines()
  assert all(line.startswith('$ ') for line in lines)
  return [shlex.split(line[2:]) for line in lines]


def _copy(root: pathlib.Path) -> None:
  """Copies what the steps change and the commands read."""
  # Modification times are kept, so that compiled modules stay valid.
  for name in (
    'configs',
    'studies',
    'stppo_jax',
    'docs',
    'tests',
    'benchmarks',
  ):
    shutil.copytree(_ROOT / name, root / name, symlinks=True)
  for name in ('pyproject.toml', 'README.md', 'Makefile'):
    shutil.copy2(_ROOT / name, root / name)
  for name in ('assets', '.cache'):
    (root / name).symlink_to(_ROOT / name)


def _run(words: list[str], root: pathlib.Path) -> str:
  if words[0] == 'python':
    words = [sys.executable, *words[1:]]
  elif words[0] == 'make':
    folder = pathlib.Path(sys.executable).parent
    words = [*words, f'BIN={folder}', 'RUNTIME=']
  done = subprocess.run(
    words,
    cwd=root,
    env=dict(os.environ, PYTHONPATH=str(root)),
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert done.returncode == 0, f'{words}\n{done.stdout}{done.stderr}'
  return done.stdout


@pytest.fixture(scope='module')
def changed(tmp_path_factory) -> pathlib.Path:
  """A copy in which every step was taken."""
  root = tmp_path_factory.mktemp('clone')
  _copy(root)
  for step in steps():
    step.apply(root)
  return root


def test_every_block_of_code_is_a_step():
  assert len(steps()) == len(re.findall(r'```(?:python|text)\n', _PAGE)) > 0


@pytest.mark.parametrize('step', steps(), ids=lambda s: f'{s.path}:{s.line}')
def test_every_place_is_there_once(step):
  if step.place != 'end':
    text = (_ROOT / step.path).read_text(encoding='utf-8')
    assert [x.strip() for x in text.splitlines()].count(step.line) == 1


# Its tests compile for a minute. In `make test`, `additions_test.py` takes the
# same steps, makes the documents and builds the algorithm.
@pytest.mark.slow
def test_the_page_adds_an_algorithm(changed):
  document = changed / 'docs' / 'algorithms.md'
  before = document.read_text(encoding='utf-8')
  outputs = {shlex.join(words): _run(words, changed) for words in _commands()}
  after = document.read_text(encoding='utf-8')
  assert '### `log_ppo`' in after and '### `log_ppo`' not in before
  choices = (changed / 'docs' / 'choices' / 'bounds.md').read_text('utf-8')
  assert '`width=0.2`' in choices

  tests = next(x for words, x in outputs.items() if ' pytest ' in words)
  # The tests of bounds, the page's three, those of every algorithm and those
  # of the generated pages.
  passed = re.search(r'(\d+) passed', tests)
  assert passed and int(passed[1]) >= 35, tests
  config = next(x for words, x in outputs.items() if ' config ' in words)
  assert 'algorithm.bounds.width = 0.1' in config.splitlines()
  assert "algorithm.bounds.name = 'logarithmic'" in config.splitlines()


@pytest.mark.slow
def test_a_misspelt_option_is_reported_in_one_line(changed):
  words = f'{sys.executable} -m stppo_jax config --config.algorithm.bounds.'
  config = '--config=configs/quickstart.py:log_ppo'
  done = subprocess.run(
    [*shlex.split(words + 'widht=0.1'), config],
    cwd=changed,
    env=dict(os.environ, PYTHONPATH=str(changed)),
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert 'widht' in line and 'did you mean width?' in line
