"""Runs of several processes, each of which has two virtual devices.

Collectives go over loopback.
"""

import json
import pathlib
import time

from tests.training import runs

_DEVICES = 'JAX_NUM_CPU_DEVICES'
DEVICES = {_DEVICES: '2'}
_TIMEOUT = 600  # seconds, on a machine that is busy with other things


def start(
  workdir,
  count=2,
  *,
  algorithm='st_ppo',
  faults=None,
  own=None,
  devices=None,
  **changes,
):
  """Starts the processes of a run.

  Args:
    workdir: the run's folder.
    count: the number of processes.
    algorithm: an entry of the table of algorithms.
    faults: host to the arguments of `one_host`.
    own: host to changes of its config.
    devices: host to its number of devices; the others have two.
    **changes: see `runs.flags`.
  """
  address, processes = runs.free_address(), []
  for index in range(count):
    mine = changes | (own or {}).get(index, {})
    module, fault = 'stppo_jax', ()
    if index in (faults or {}):
      module, fault = 'tests.training.one_host', faults[index]
    flags = ['train', *runs.flags(algorithm, **mine), f'--workdir={workdir}']
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


def train(workdir, count=2, **options):
  """Returns what the hosts of a run have printed, which ends without errors."""
  found = ends(start(workdir, count, **options))
  assert [code for code, _ in found] == [0] * count
  return [text for _, text in found]


def dialogues(workdir: pathlib.Path, step: int, count: int = 1):
  """Returns the dialogues of all hosts in the order of the batch."""
  names = [f'trajectories-{step:06d}.jsonl'] + [
    f'trajectories-{step:06d}-host{index}.jsonl' for index in range(1, count)
  ]
  texts = [(workdir / name).read_text('utf-8') for name in names]
  return [json.loads(line) for text in texts for line in text.splitlines()]
