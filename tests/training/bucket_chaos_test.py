"""Two hosts, a bucket and many faults end as the undisturbed run.

    BUCKET_FAULTS=20 BUCKET_SEED=1 python -m pytest -m slow -s \
      tests/training/bucket_chaos_test.py
"""

from collections.abc import Callable
import os
import random
import shutil
import signal
import time

import pytest

from tests.storage import emulator
from tests.training import bucket_hosts

# As many of the faults below, in a random order.
_FAULTS = int(os.environ.get('BUCKET_FAULTS', 6))
_SEED = int(os.environ.get('BUCKET_SEED', 5))
_STEPS = 2 * _FAULTS
_RATE = 0.03  # the share of requests that fail all the time


def _end(number: signal.Signals, *, both: bool = False):
  """Returns a fault that ends one process, or both, by a signal."""

  def strike(hosts, google, chance):
    del google
    for process in hosts.processes if both else [_one(hosts, chance)]:
      process.send_signal(number)

  return strike


def _one(hosts, chance):
  return chance.choice(hosts.processes)


def _sleep(hosts, google, chance):
  """Stops a process for a while, as a machine that is moved does."""
  del google
  process = _one(hosts, chance)
  process.send_signal(signal.SIGSTOP)
  time.sleep(chance.uniform(2, 8))
  process.send_signal(signal.SIGCONT)


def _outage(kind: str):
  """Returns a fault in which the bucket answers nobody for a while."""

  def strike(hosts, google, chance):
    del hosts
    usual = google.fault
    google.fault = lambda line: emulator.Fault(kind, 1.0)
    time.sleep(chance.uniform(3, 15))
    google.fault = usual

  return strike


_KINDS: dict[str, Callable] = {
  'kill a host': _end(signal.SIGKILL),
  'kill both': _end(signal.SIGKILL, both=True),
  'preempt': _end(signal.SIGTERM),
  'sleep': _sleep,
  'outage, 503': _outage('503'),
  'outage, resets': _outage('reset'),
  'outage, slow': _outage('slow'),
  'outage, answers lost': _outage('lost'),
}


def _steps(google):
  """Returns the steps of committed checkpoints in the bucket."""
  names = (name.split('/') for name in list(google.objects))
  return {
    int(x[3])
    for x in names
    if x[2] == 'checkpoints' and x[4:] == ['commit_success.txt']
  }


def strike_all(hosts, google, *, seed: int, count: int) -> list[str]:
  """Strikes a run with faults until it ends; returns which have struck.

  After each one the run must make a step; one that has ended is started again.

  Args:
    hosts: the run.
    google: its bucket.
    seed: the beginning of chance.
    count: the number of faults.
  """
  chance, struck = random.Random(seed), []
  google.fault = emulator.RandomFaults(
    seed, rate=_RATE, kinds=bucket_hosts.KINDS
  )
  names = [*_KINDS] * (count // len(_KINDS) + 1)
  chance.shuffle(names)
  codes = None
  while codes != [0, 0]:
    hosts.start()
    best, deadline = max(_steps(google), default=0), time.monotonic() + 600
    while all(process.poll() is None for process in hosts.processes):
      assert time.monotonic() < deadline
      time.sleep(0.05)
      if len(struck) == count or max(_steps(google), default=0) <= best:
        continue
      time.sleep(chance.uniform(0, 3))
      if any(process.poll() is not None for process in hosts.processes):
        break
      best = max(_steps(google))
      struck.append(names[len(struck)])
      print(f'{struck[-1]} after step {best}', flush=True)
      _KINDS[struck[-1]](hosts, google, chance)
    codes = hosts.ends()
    assert all(code in (0, 75, -signal.SIGKILL) for code in codes), codes
  google.fault = lambda line: None
  return struck


@pytest.mark.slow
def test_a_bucket_run_survives_faults_of_hosts_and_of_the_bucket(
  google, tmp_path
):
  hosts = bucket_hosts.Hosts(tmp_path / 'disturbed', num_steps=_STEPS)
  struck = strike_all(hosts, google, seed=_SEED, count=_FAULTS)
  assert len(struck) == _FAULTS
  with bucket_hosts.downloaded(google) as folder:
    disturbed = shutil.copytree(folder, tmp_path / 'run')
  google.objects.clear()
  hosts = bucket_hosts.Hosts(tmp_path / 'undisturbed', num_steps=_STEPS)
  hosts.start()
  assert hosts.ends() == [0, 0]
  bucket_hosts.assert_same_run(google, disturbed)
