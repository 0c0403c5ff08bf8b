"""Orbax saves to a bucket from several processes, and reads what it saved."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests.storage import emulator

_REPO = pathlib.Path(__file__).resolve().parents[2]
_MARKER = 'commit_success.txt'
_KINDS = (
  emulator.Fault('503'),
  emulator.Fault('429'),
  emulator.Fault('reset'),
  emulator.Fault('lost'),
  emulator.Fault('slow', 0.2),
)


def _address() -> str:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{probe.getsockname()[1]}'


def _run(storage, count, *steps):
  """Returns what each of some processes prints; they save steps and read."""
  coordinator = _address()
  place = {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '2'}
  module = ['tests.storage.orbax_host', 'gs://mine/run/checkpoints']
  processes = [
    subprocess.Popen(
      [sys.executable, '-m', *module, coordinator, str(count), str(index)]
      + [str(step) for step in steps],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=_REPO,
      env=os.environ | place | storage.environment,
    )
    for index in range(count)
  ]
  lines = []
  for process in processes:
    out, error = process.communicate(timeout=300)
    print(out, error)
    assert process.returncode == 0
    lines.append(out.splitlines()[-1])
  return lines


def _committed(storage):
  return {name for name in storage.objects if name.endswith(f'/{_MARKER}')}


@pytest.mark.slow
@pytest.mark.parametrize('rate', [0.0, 0.1])
def test_two_processes_save_and_restore(rate):
  with emulator.served() as storage:
    storage.fault = faults = emulator.RandomFaults(7, rate=rate, kinds=_KINDS)
    said = 'steps [2, 3] read 3 True'
    assert _run(storage, 2, 1, 2, 3) == [said, said]
    assert (faults.count > 0) == (rate > 0)
    run = 'run/checkpoints'
    assert f'{run}/3/{_MARKER}' in _committed(storage)
    # TensorStore has written arrays of both processes, and gcsfs the rest.
    uploads = [x for x in storage.requests if x.startswith('POST /upload')]
    for name in ('ocdbt.process_0', 'ocdbt.process_1', _MARKER):
      assert any(name in x for x in storage.objects), name
    assert any('uploadType=media' in x for x in uploads)
    # A step without its marker is none: another start makes it again.
    faults.on = False
    del storage.objects[f'{run}/3/{_MARKER}']
    said = 'steps [2] read 2 True'
    assert _run(storage, 1, 2) == [said]
