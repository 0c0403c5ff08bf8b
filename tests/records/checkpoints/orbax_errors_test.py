"""An error of Orbax is one line, and other errors are reported as ever."""

import asyncio
import logging
import sys
import types

import pytest

from stppo_jax.records.checkpoints import orbax_errors
from tests import processes

_SAVES_AND_RESTORES = """
import os
import pathlib
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
for step in (1, 2, 3):
  checkpointer.save(step, state, {})
# As on a full disk: no file can grow beyond some thousand bytes.
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
try:
  checkpointer.save(4, state, {})
except pending_save.SaveFailed as error:
  print(error, file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
for step, damage in ((2, os.remove), (3, lambda path: os.truncate(path, 9))):
  folder = pathlib.Path(sys.argv[1], 'checkpoints', str(step))
  for path in folder.rglob('d/*'):
    damage(path)
step, _, _ = checkpointer.restore_latest(state)
print(step)
del checkpointer
Own()
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
def test_a_failed_save_and_each_damaged_step_are_one_line(tmp_path):
  done = processes.python('-c', _SAVES_AND_RESTORES, tmp_path)
  assert done.stdout == '1\n', done.stderr
  failed, *damaged = done.stderr.splitlines()[:3]
  start, reason = failed.split(': ', 1)
  assert start == f'step 4 could not be saved in {tmp_path / "checkpoints"}'
  assert reason.endswith(': File too large') and len(reason) < 80
  for step, line in zip((3, 2), damaged, strict=True):
    assert f'checkpoint {step} is not valid (' in line
    assert line.endswith(f'set aside as {step}.corrupt')
  # The error of the user is reported, and nothing else.
  others = done.stderr.splitlines()[3:]
  assert others[-1] == 'ValueError: an error of the user'
  assert sum('Traceback' in other for other in others) == 1
  assert 'Event loop is closed' not in done.stderr


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
