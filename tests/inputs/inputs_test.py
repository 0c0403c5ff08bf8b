"""Every command with the inputs of `inputs.tsv`, sane and insane.

A line of the file has the exit code, what is written, what is named, and the
command. What is written are files and folders in the current folder, or the
places whose content changes; `-` is nothing. What is named are parts of the
lines of standard error: with exit code 2, there is one line for each of them.
Several are separated by ` & `, and several parts of one line by ` + `. After
`stdout` they are parts of the standard output. What follows ` < ` is the
standard input. `places.py` has the names in braces.
"""

import io
import os
import pathlib
import shlex
import shutil
import signal
import sys
import traceback
from typing import NamedTuple

import pytest

from stppo_jax import __main__
from tests.inputs import places

_SECONDS = 120  # that a command may take; some compile


class _Input(NamedTuple):
  number: int
  code: int
  written: set[str]
  named: list[str]
  command: str


def _inputs() -> list[_Input]:
  text = pathlib.Path(__file__).with_name('inputs.tsv').read_text('utf-8')
  found = []
  for number, line in enumerate(text.splitlines(), 1):
    code, written, named, command = line.split('\t')
    found.append(
      _Input(
        number,
        int(code),
        set(written.split(' & ')) - {'-'},
        [name for name in named.split(' & ') if name],
        command,
      )
    )
  return found


_INPUTS = _inputs()
_COMMANDS = list(__main__.commands())


def _name(an_input: _Input) -> str:
  """Returns the name of a command."""
  name = an_input.command.partition(' ')[0]
  return name if name in _COMMANDS else 'help'


def _times(root: pathlib.Path, skipped: str = '') -> dict[str, object]:
  """Returns path to time of each file below a folder, and of no folder.

  The content of folders of the name `skipped` is left out.
  """
  times, start = {}, len(f'{root}/')
  for folder, folders, files in os.walk(root):
    inside = f'{folder}/'[start:]
    times |= dict.fromkeys((inside + name for name in folders), False)
    for name in files:
      times[inside + name] = os.stat(f'{folder}/{name}').st_mtime_ns
    if skipped in folders:
      folders.remove(skipped)
  return times


def _words(command: str, values: dict[str, str]) -> list[str]:
  words = []
  for word in shlex.split(command):
    made = word.format_map(values)
    words += made.split() if word in ('{tiny}', '{pairwise}') else [made]
  return words


def _too_long(*_):
  raise TimeoutError(f'takes longer than {_SECONDS} s')


def _wrong(an_input: _Input, code: int, out: str, err: str, values) -> str:
  """Returns what is wrong with the answer to an input; '' if nothing is."""
  if code != an_input.code:
    return f'exit code {code}'
  if 'Traceback' in out + err:
    return 'a traceback'
  named = [name.format_map(values) for name in an_input.named]
  if named[:1] == ['stdout']:
    lost = [name for name in named[1:] if name not in out]
  else:
    lines = err.splitlines()
    names = lambda line, name: all(part in line for part in name.split(' + '))
    lost = [n for n in named if not any(names(line, n) for line in lines)]
    if code == 2 and (len(lines) != len(named) or not named):
      return f'{len(lines)} lines'
    if code == 2 and not all(any(names(x, n) for n in named) for x in lines):
      return 'a line that names nothing'
  return f'does not name {", ".join(lost)}' if lost else ''


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  return tmp_path_factory.mktemp('places')


@pytest.fixture(scope='module')
def values(root, finished):
  return places.make(root, finished)


def test_every_command_has_many_inputs():
  assert len(_INPUTS) >= 750
  assert len({x.command for x in _INPUTS}) == len(_INPUTS)
  for name in _COMMANDS:
    codes = [x.code for x in _INPUTS if _name(x) == name]
    assert len(codes) >= 8 and 0 in codes and 2 in codes, name


# What is refused is refused early, so that all of it takes seconds.
@pytest.mark.parametrize(
  'is_refused', [True, pytest.param(False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('name', dict.fromkeys(map(_name, _INPUTS)))
def test_inputs_have_their_answers(
  name, is_refused, root, values, monkeypatch, capfd
):
  previous = signal.signal(signal.SIGALRM, _too_long)
  bad, here = [], root / 'here'
  # Most files belong to checkpoints. No refused command may write there, so it
  # is enough to compare these files once, after all commands.
  skipped = 'checkpoints' if is_refused else ''
  whole, before = _times(root), _times(root, skipped)
  chosen = [x for x in _INPUTS if _name(x) == name]
  for an_input in (x for x in chosen if (x.code == 2) == is_refused):
    here.mkdir()
    monkeypatch.chdir(here)
    command, _, stdin = an_input.command.partition(' < ')
    monkeypatch.setattr(sys, 'stdin', io.StringIO(f'{stdin}\n'))
    capfd.readouterr()
    signal.alarm(_SECONDS)
    try:
      code = __main__.main(_words(command, values))
    except BaseException:
      traceback.print_exc()
      code = -1
    finally:
      signal.alarm(0)
    out, err = capfd.readouterr()
    after = _times(root, skipped)
    changed = {
      path.removeprefix('here/').partition('/')[0]
      for path, _ in before.items() ^ after.items()
      # Python keeps the byte code of a config file beside it, once.
      if path != 'here' and '__pycache__' not in path
    }
    # The next one finds what this one has left, but for its folder.
    before = {x: y for x, y in after.items() if not x.startswith('here')}
    wrong = _wrong(an_input, code, out, err, values)
    if not wrong and changed != an_input.written:
      wrong = f'writes {changed or "nothing"}'
    if wrong:
      bad.append(f'{an_input.number}: {command[:200]}: {wrong}: {err[-500:]}')
    monkeypatch.chdir(root)
    shutil.rmtree(here)
  signal.signal(signal.SIGALRM, previous)
  if is_refused:
    inside = lambda times: {x for x in times.items() if skipped in x[0]}
    if changed := inside(_times(root)) ^ inside(whole):
      bad.append(f'changed in checkpoints: {sorted(changed)}')
  assert not bad, '\n'.join([f'{len(bad)} bad answers', *bad])
