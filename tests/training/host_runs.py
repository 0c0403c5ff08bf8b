"""Runs of several processes, each of which has two virtual devices.

Collectives go over loopback.
"""

import json
import pathlib
import time

from tests.training import runs

_DEVICES = 'JAX_NUM_CPU_DEVICES'
DEVICES = {_DEVICES: '2'}
# Metrics of hosts, and counts of requests: each host asks on its own.
OF_HOSTS = ('hosts/', 'retrieval/')
_TIMEOUT = 600  # seconds, on a machine that is busy with other things


def start(
  workdir,
  count=2,
  *,
  algorithm='st_ppo',
  faults=None,
  devices=None,
  **changes,
):
  """Starts the processes of a run.

  Args:
    workdir: the run's folder.
    count: the number of processes.
    algorithm: an entry of the table of algorithms.
    faults: host to the arguments of `one_host`.
    devices: host to its number of devices; the others have two.
    **changes: see `runs.flags`.
  """
  changes = {'num_steps': runs.STEPS, **changes}
  address, processes = runs.free_address(), []
  for index in range(count):
    module, fault = 'stppo_jax', ()
    if index in (faults or {}):
      module, fault = 'tests.training.one_host', faults[index]
    flags = ['train', *runs.flags(algorithm, **changes), f'--workdir={workdir}']
    flags += [f'--coordinator={address}', f'--num_processes={count}']
    flags += [f'--process_id={index}']
    environment = dict(DEVICES)
    if index in (devices or {}):
      environment[_DEVICES] = str(devices[index])
    processes.append(runs.start(*fault, *flags, module=module, **environment))
  return processes


def ends(processes) -> list[tuple[int, str]]:
  """Returns the exit codes and what was printed; shows it if a test fails."""
  found = []
  for index, process in enumerate(processes):
    out, error = process.communicate(timeout=_TIMEOUT)
    print(f'--- host {index}: {process.returncode}\n{out}{error}')
    found.append((process.returncode, out + error))
  return found


def ends_soon(processes, culprit) -> list[tuple[int, str]]:
  """Returns the ends of two hosts; the other one ends soon after one does."""
  processes[culprit].wait(timeout=_TIMEOUT)
  began = time.monotonic()
  processes[1 - culprit].wait(timeout=_TIMEOUT)
  assert time.monotonic() - began < 30
  return ends(processes)


def faulty(workdir, culprit, fault, codes, **options):
  """Returns the ends of two hosts: codes of the culprit and of the other."""
  processes = start(workdir, faults={culprit: fault}, **options)
  found = ends_soon(processes, culprit)
  assert (found[culprit][0], found[1 - culprit][0]) == codes
  return found


def train(workdir, count=2, **options):
  """Returns what the hosts of a run have printed, which ends without errors."""
  found = ends(start(workdir, count, **options))
  assert [code for code, _ in found] == [0] * count
  return [text for _, text in found]


def alone(workdir, algorithm='st_ppo', environment=DEVICES, **options):
  """Trains in one process of its own, by default on two devices."""
  flags = ['train', *runs.flags(algorithm, **options), f'--workdir={workdir}']
  ((code, _),) = ends([runs.start(*flags, **environment)])
  assert code == 0


def repeated(workdir: pathlib.Path, apart=OF_HOSTS):
  """Returns the lines of metrics that do not depend on the number of hosts."""
  return [
    {k: x for k, x in line.items() if not k.startswith(apart)}
    for line in runs.repeated(workdir)
  ]


def dialogues(workdir: pathlib.Path, step: int, count: int = 1):
  """Returns the dialogues of all hosts in the order of the batch."""
  names = [f'trajectories-{step:06d}.jsonl'] + [
    f'trajectories-{step:06d}-host{index}.jsonl' for index in range(1, count)
  ]
  texts = [(workdir / name).read_text('utf-8') for name in names]
  return [json.loads(line) for text in texts for line in text.splitlines()]


def assert_same_dialogues(workdir, expected, steps, *, counts=(1, 1)):
  """Asserts equal dialogues of two runs with so many hosts that learn."""
  for step in steps:
    ours, theirs = (
      dialogues(folder, step, count)
      for folder, count in zip((workdir, expected), counts)
    )
    assert ours == theirs and len(ours) >= 16


def versions(workdir: pathlib.Path, step: int, host: int = 0):
  """Returns the recorded versions of the turns of each dialogue of a host."""
  end = f'-host{host}' if host else ''
  text = (workdir / f'versions-{step:06d}{end}.json').read_text()
  (found,) = json.loads(text)
  return found
