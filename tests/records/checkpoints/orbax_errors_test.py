"""An error of Orbax is one line, and other errors are reported as ever."""

import asyncio
import logging
import os
import sys
import types

import pytest

from stppo_jax.records.checkpoints import orbax_errors
from tests import processes

_SAVES_TOO_MUCH = """
import resource
import sys

import jax

from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.records.checkpoints import pending_save

class Own:
  def __del__(self):
    raise ValueError('an error of the user')

state = {f'w{n}': jax.random.normal(jax.random.key(n), (64, 64))
         for n in range(12)}
checkpointer = checkpoint.Checkpointer(sys.argv[1])
checkpointer.save(1, state, {})
# As on a full disk: no file can grow beyond some thousand bytes.
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
  checkpointer.save(2, state, {})
except pending_save.SaveFailed as error:
  print(error, file=sys.stderr)
del checkpointer
Own()
"""

_RESTORES = """
import sys

import jax
import jax.numpy as jnp

from stppo_jax.records.checkpoints import checkpoint

state = {f'w{n}': jnp.full((64, 64), n, jnp.float32) for n in range(12)}
checkpointer = checkpoint.Checkpointer(sys.argv[1], keep=9)
if sys.argv[2] == 'save':
  for step in (1, 2, 3, 4):
    checkpointer.save(step, state, {})
else:
  step, _, _ = checkpointer.restore_latest(state)
  print(step)
checkpointer.close()
"""


def _ignored(error, *, caller=None):
  """Returns what Python tells its hook about an error that it ignores."""
  trace = error.__traceback__
  return types.SimpleNamespace(
    object=caller, exc_value=error, exc_traceback=trace and trace.tb_next
  )


def test_only_what_tensorstore_tells_a_lost_loop_is_hidden(monkeypatch):
  reported = []
  monkeypatch.setattr(sys, 'unraisablehook', reported.append)
  orbax_errors.hide_repeated()
  orbax_errors.hide_repeated()
  loop = asyncio.new_event_loop()
  loop.close()
  with pytest.raises(RuntimeError, match='closed') as raised:
    loop.call_soon_threadsafe(print)
  sys.unraisablehook(_ignored(raised.value))
  assert reported == []
  with pytest.raises(RuntimeError, match='closed') as raised:
    loop.run_until_complete(None)
  others = [_ignored(raised.value), _ignored(ValueError('own'))]
  for other in others:
    sys.unraisablehook(other)
  assert reported == others


@pytest.mark.slow
def test_a_save_that_fails_is_one_line(tmp_path):
  done = processes.python('-c', _SAVES_TOO_MUCH, tmp_path)
  line, *others = done.stderr.splitlines()
  folder = tmp_path / 'checkpoints'
  start, reason = line.split(': ', 1)
  assert start == f'step 2 could not be saved in {folder}'
  assert reason.endswith(': File too large') and len(reason) < 80
  # The error of the user is reported, and nothing else.
  assert others[-1] == 'ValueError: an error of the user'
  assert sum('Traceback' in other for other in others) == 1
  assert 'Event loop is closed' not in done.stderr


def _run(program, *arguments):
  """Runs a program and returns its output and the lines of its errors."""
  done = processes.python('-c', program, *arguments)
  assert done.returncode == 0, done.stderr
  return done.stdout, done.stderr.splitlines()


@pytest.mark.slow
def test_each_damaged_step_is_one_line(tmp_path):
  assert _run(_RESTORES, tmp_path, 'save') == ('', [])
  for step in (2, 3, 4):
    arrays = [
      path
      for path in (tmp_path / 'checkpoints' / str(step)).rglob('d/*')
      if path.is_file()
    ]
    assert arrays
    for path in arrays:
      if step == 2:
        path.unlink()
      elif step == 3:
        os.truncate(path, 9)
      else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
  restored, lines = _run(_RESTORES, tmp_path, 'restore')
  assert restored == '1\n'
  for step, line in zip((4, 3, 2), lines, strict=True):
    assert f'checkpoint {step} is not valid (' in line
    assert line.endswith(f'set aside as {step}.corrupt')


def test_what_is_meant_is_no_warning_and_other_warnings_are_shown():
  orbax_errors.hide_repeated()
  logger = logging.getLogger('absl')
  shown = [
    logger.filter(
      logger.makeRecord('absl', logging.WARNING, path, 1, text, (), None)
    )
    for path, text in (
      ('/site/orbax/checkpoint_manager.py', 'Waiting for previous save to ...'),
      ('/site/orbax/checkpoint_manager.py', 'Given directory is read only=/r'),
      ('/site/orbax/checkpoint_manager.py', 'another warning'),
      ('/site/other.py', 'Waiting for previous save to ...'),
    )
  ]
  assert list(map(bool, shown)) == [False, False, True, True]
