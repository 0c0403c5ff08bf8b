"""Folders of weights are removed by their owner, or after its death."""

import gc
import pathlib
import sys
import tempfile

import pytest

from stppo_jax.sampling.remote import weights_folder
from tests import processes

_KILLED = """
import os
import pathlib
from stppo_jax.sampling.remote import weights_folder

folder = weights_folder.WeightsFolder()
(folder.path / 'model.safetensors').write_bytes(b'weights')
print(folder.path, flush=True)
os.kill(os.getpid(), 9)
"""


def _killed(folder):
  """Returns the folder that a killed process has left."""
  environment = {'TMPDIR': str(folder), 'PYTHONPATH': ':'.join(sys.path)}
  done = processes.python('-c', _KILLED, env=environment)
  assert done.returncode == -9, done.stderr
  return pathlib.Path(done.stdout.strip())


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_removed(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  left = _killed(tmp_path)
  assert (left / 'model.safetensors').exists()
  # A folder without a lock may be one that is being made.
  (tmp_path / 'stppo_jax-weights-new').mkdir()
  alive = weights_folder.WeightsFolder()
  (alive.path / 'model.safetensors').write_bytes(b'weights')
  assert alive.path.stat().st_mode & 0o77 == 0
  other = weights_folder.WeightsFolder()
  assert not left.exists()
  assert (alive.path / 'model.safetensors').exists() and other.path.exists()
  assert (tmp_path / 'stppo_jax-weights-new').exists()
  path = alive.path
  del alive
  gc.collect()
  assert not path.exists() and other.path.exists()
