"""Two hosts of a run that share nothing but a bucket, and its storage."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

from benchmarks import run_differences
from stppo_jax.workdir import bucket_files
from tests.storage import emulator
from tests.training import runs

ADDRESS = 'gs://mine/study/run'
# What requests meet now and then.
KINDS = (
  emulator.Fault('503'),
  emulator.Fault('429'),
  emulator.Fault('reset'),
  emulator.Fault('lost'),
  emulator.Fault('slow', 0.2),
)


class Hosts:
  """The processes of a run of two hosts in the bucket.

  Each has a folder of its own for temporary files, as machines do.

  Args:
    folder: holds these folders, and what the processes print.
    **changes: see `runs.flags`.
  """

  def __init__(self, folder: pathlib.Path, **changes):
    self._folder, self._changes = folder, changes
    self._starts = 0

  def start(self) -> None:
    """Starts the run, or resumes it."""
    self._starts += 1
    coordinator = runs.free_address()
    self._logs, self.processes = [], []
    for index in range(2):
      place = self._folder / f'host{index}-{self._starts}'
      place.mkdir(parents=True)
      self._logs.append(place.with_suffix('.log'))
      arguments = ['train', *runs.flags(**self._changes)]
      arguments += [f'--workdir={ADDRESS}', f'--coordinator={coordinator}']
      arguments += ['--num_processes=2', f'--process_id={index}']
      with open(self._logs[-1], 'wb') as log:
        self.processes.append(
          subprocess.Popen(
            [sys.executable, '-u', '-m', 'stppo_jax', *arguments],
            stdout=log,
            stderr=log,
            cwd=runs.REPO,
            env=os.environ
            | {
              'JAX_NUM_CPU_DEVICES': '2',
              'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
              'TMPDIR': str(place),
            },
          )
        )

  def ends(self) -> list[int]:
    """Returns the exit codes; prints what was said."""
    try:
      for process in self.processes:
        process.wait(timeout=600)
    finally:
      self.kill()
      print('\n'.join(f'--- {x}\n{x.read_text()}' for x in self._logs))
    return [process.returncode for process in self.processes]

  def kill(self) -> None:
    """Kills both with SIGKILL."""
    for process in self.processes:
      process.kill()
      process.wait()

  @property
  def said(self) -> str:
    """The lines that both have printed since the last start."""
    return ''.join(path.read_text() for path in self._logs)


def wait(condition, hosts=None, seconds=300.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    assert hosts is None or all(x.poll() is None for x in hosts.processes)
    time.sleep(0.05)


@contextlib.contextmanager
def downloaded(google):
  """Yields the folder of the run in the bucket, with arrays and weights."""
  with bucket_files.downloaded(ADDRESS, dialogues=True, arrays=True) as folder:
    (folder / 'policy').mkdir()
    data = google.data('study/run/policy/model.safetensors')
    (folder / 'policy' / 'model.safetensors').write_bytes(data)
    yield folder


def assert_same_run(google, expected):
  """Asserts that the run in the bucket is another one, bit for bit."""
  with downloaded(google) as folder:
    lines = run_differences.differences(folder, expected, may_lack=False)
    assert not list(lines)
