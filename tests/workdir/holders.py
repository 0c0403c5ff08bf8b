"""Other processes that hold the lock of a folder."""

import contextlib
import subprocess
import sys

_HOLD = """
import pathlib, sys
from stppo_jax.workdir import lock
with lock.held(pathlib.Path(sys.argv[1])):
  print('held', flush=True)
  sys.stdin.read()
"""


@contextlib.contextmanager
def started(folder, program=_HOLD):
  """Yields another process that holds the lock of a folder, and kills it."""
  process = subprocess.Popen(
    [sys.executable, '-c', program, str(folder)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stdout.readline() == 'held\n'
    yield process
  finally:
    process.kill()
    process.communicate()
