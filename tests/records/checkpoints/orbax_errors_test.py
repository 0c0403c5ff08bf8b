"""An error of Orbax is one line, and other errors are reported as ever."""

import os
import subprocess
import sys

import pytest

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


def _run(program, *arguments):
  """Runs a program and returns its output and the lines of its errors."""
  done = subprocess.run(
    [sys.executable, '-c', program, *map(str, arguments)],
    capture_output=True,
    text=True,
    timeout=300,
  )
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
