"""Two hosts of a run that share nothing but a bucket, and its storage."""

import contextlib
import pathlib

from benchmarks import run_differences
from stppo_jax.workdir import bucket_files
from tests.storage import emulator
from tests.training import host_runs
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
      own = host_runs.DEVICES | {'TMPDIR': str(place)}
      with open(self._logs[-1], 'wb') as log:
        self.processes.append(runs.start(*arguments, log=log, **own))

  def ends(self) -> list[int]:
    """Returns the exit codes; prints what was said."""
    try:
      for process in self.processes:
        process.wait(timeout=600)
    finally:
      self.kill()
      print('\n'.join(f'--- {x}\n{x.read_text()}' for x in self._logs))
    return [process.returncode for process in self.processes]

  def wait(self, condition) -> None:
    """Waits until something holds while both of them run."""

    def holds():
      assert all(process.poll() is None for process in self.processes)
      return condition()

    runs.wait(holds)

  def kill(self) -> None:
    """Kills both with SIGKILL."""
    for process in self.processes:
      process.kill()
      process.wait()

  @property
  def said(self) -> str:
    """The lines that both have printed since the last start."""
    return ''.join(path.read_text() for path in self._logs)


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
