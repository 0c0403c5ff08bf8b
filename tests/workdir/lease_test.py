"""The lease of a bucket: one holder, also when clocks and answers fail."""

import dataclasses
import json
import os
import subprocess
import threading
import time

import pytest

from stppo_jax import buckets
from stppo_jax.workdir import lease
from stppo_jax.workdir import lock
from tests.storage import emulator

_ADDRESS = 'gs://mine/run'
_OBJECT = 'run/lease'


@pytest.fixture
def bucket(google):
  del google
  return buckets.Bucket(_ADDRESS)


_ELSEWHERE = lock.Holder('elsewhere', 7, '1', 'now', True, 'another boot')


def _of_another(google, *, seconds, holder=_ELSEWHERE):
  """Writes the lease of another process, which is on another host."""
  record = {'holder': dataclasses.asdict(holder), 'seconds': seconds}
  google.put(_OBJECT, json.dumps(record | {'token': 'x'}).encode())


def test_a_lease_is_there_in_the_body_alone(bucket, google):
  with lease.held(bucket) as held:
    first = google.objects[_OBJECT].generation
    held.check()
    assert google.objects[_OBJECT].generation == first
    held.touch()
    assert google.objects[_OBJECT].generation > first
  assert not google.objects


def test_who_renews_its_lease_keeps_others_out(bucket, google, said):
  with lease.held(bucket, seconds=2):
    with pytest.raises(lock.Locked) as error, lease.held(bucket, seconds=2):
      pass
    assert error.value.exit_code == 75
    assert str(error.value).startswith(f'{_ADDRESS}: process {os.getpid()} ')
  assert not google.objects
  assert 'runs out in' in said[0]


@pytest.mark.slow
def test_the_lease_of_an_ended_run_elsewhere_is_waited_for(
  bucket, google, said
):
  _of_another(google, seconds=2)
  began = time.monotonic()
  with lease.held(bucket):
    assert 1 <= time.monotonic() - began < 8
  waits, takes = said
  assert 'process 7 on host elsewhere' in waits and 'runs out in' in waits
  assert 'took over' in takes


def test_the_clock_of_this_machine_does_not_count(bucket, google):
  google.clock = lambda: time.time() - 9000
  _of_another(google, seconds=30)
  with lease.held(buckets.Bucket('gs://mine/other')):
    pass
  google.clock = lambda: time.time() - 9000 + 40
  began = time.monotonic()
  with lease.held(bucket):
    assert time.monotonic() - began < 10


def test_an_ended_process_of_this_host_is_not_waited_for(bucket, google, said):
  with subprocess.Popen(['true']) as ended:
    here = lock.Holder.of_this_process()
  ended = dataclasses.replace(here, pid=ended.pid)
  _of_another(google, seconds=60, holder=ended)
  began = time.monotonic()
  with lease.held(bucket):
    assert time.monotonic() - began < 10
  assert [line for line in said if 'took over' in line]


def test_a_holder_that_slept_past_its_lease_finds_out(bucket, google):
  with lease.held(bucket) as held:
    _of_another(google, seconds=30)
    with pytest.raises(lock.Lost, match='process 7 on host elsewhere'):
      held.touch()
    with pytest.raises(lock.Lost):
      held.check()
  # The lease of the other one is left alone.
  assert b'elsewhere' in google.data(_OBJECT)


def test_nobody_loses_a_lease_that_nobody_took(bucket, google):
  with lease.held(bucket) as held:
    google.clock = lambda: time.time() + 9000
    held.touch()
    del google.objects[_OBJECT]  # by hand
    held.touch()
    assert _OBJECT in google.objects


@pytest.mark.slow
def test_an_answer_that_is_lost_loses_no_lease(bucket, google):
  lost = iter([emulator.Fault('lost')])
  google.fault = lambda line: next(lost, None) if 'POST' in line else None
  with lease.held(bucket) as held:
    lost = iter([emulator.Fault('lost')])
    held.touch()
    held.touch()


@pytest.mark.slow
def test_of_two_that_wait_one_gets_the_lease(bucket, google):
  _of_another(google, seconds=1)
  ends = []

  def hold():
    try:
      with lease.held(buckets.Bucket(_ADDRESS), seconds=2):
        ends.append('held')
        time.sleep(3)
    except lock.Locked:
      ends.append('locked')

  threads = [threading.Thread(target=hold) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(ends) == ['held', 'locked']
