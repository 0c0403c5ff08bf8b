"""How the program ends: signals from its first moment, lost output."""

import os
import signal
import subprocess
import sys

import pytest

from tests.training import runs

# Python imports it at its start: the process signals itself at an import.
_SITE = """
import os, sys

def audit(event, arguments):
  if event == 'import' and arguments[0] == {name!r}:
    os.kill(os.getpid(), {number})

sys.addaudithook(audit)
"""


def _start(*arguments, path='', **streams):
  return subprocess.Popen(
    [sys.executable, '-m', 'stppo_jax', *arguments],
    text=True,
    cwd=runs.REPO,
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(path)},
    stderr=subprocess.PIPE,
    **streams,
  )


@pytest.mark.parametrize(
  ('number', 'name', 'code'),
  [
    (signal.SIGTERM, 'ast', 75),
    (signal.SIGINT, 'ml_collections', 130),
    (signal.SIGHUP, 'numpy', 75),  # whose imports turn errors into others
    (signal.SIGINT, 'jaxlib', 130),
    pytest.param(signal.SIGTERM, 'orbax', 75, marks=pytest.mark.slow),
  ],
)
def test_a_signal_during_the_imports_ends_with_one_line(
  tmp_path, number, name, code
):
  (tmp_path / 'sitecustomize.py').write_text(
    _SITE.format(name=name, number=int(number)), encoding='utf-8'
  )
  workdir = tmp_path / 'run'
  process = _start(
    'train', *runs.flags(), f'--workdir={workdir}', path=tmp_path
  )
  _, err = process.communicate(timeout=60)
  assert process.returncode == code
  assert err.startswith(f'{number.name}: ending') and err.count('\n') == 1
  assert not workdir.exists()


def test_output_that_nobody_reads_is_no_traceback():
  with _start('help', stdout=subprocess.PIPE) as process:
    process.stdout.close()
    assert process.stderr.read() == ''
  assert process.returncode == 141


def test_output_to_a_full_disk_is_one_line():
  with open('/dev/full', 'w') as full, _start('help', stdout=full) as process:
    assert process.stderr.read() == 'output: No space left on device\n'
  assert process.returncode == 75


def test_an_error_that_quotes_a_file_is_escaped(refused):
  name = 'no\x1b[31m\u202efolder'
  line = refused('export', f'--workdir={name}', '--out=out')
  assert line.startswith('--workdir=no\\x1b[31m\\u202efolder: ')
