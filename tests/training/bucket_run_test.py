"""A run whose folder is in a bucket, and that has nothing else."""

import dataclasses
import json
import shutil
import signal
import time

import pytest

from stppo_jax import __main__
from stppo_jax.workdir import bucket_files
from stppo_jax.workdir import lock
from tests.storage import emulator
from tests.training import bucket_hosts
from tests.training import faults
from tests.training import runs

_ADDRESS = bucket_hosts.ADDRESS
_STEPS = 4  # of the runs of two hosts


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_from_its_bucket(
  google, finished, tmp_path, capsys
):
  """A process knows nothing but the address, and leaves nothing else."""
  send = faults.send_at(('collect', 3), signal.SIGTERM)
  assert runs.train(_ADDRESS, send, checkpoint__every=2) == 75
  assert 'study/run/lease' not in google.objects
  capsys.readouterr()
  assert __main__.main(['status', _ADDRESS, '--json']) == 0
  state = json.loads(capsys.readouterr().out)
  assert (state['folder'], state['state']) == (_ADDRESS, 'interrupted')
  assert (state['step'], state['checkpoint']) == (2, 2)

  assert runs.train(_ADDRESS, checkpoint__every=2) == 0
  out = capsys.readouterr().out
  assert f'policy (Hugging Face format): {_ADDRESS}/policy' in out
  assert '/tmp' not in out
  bucket_hosts.assert_same_run(google, finished)

  # What reads a run reads it in the bucket, too.
  report, exported = tmp_path / 'report.html', tmp_path / 'exported'
  for command, expected in (
    (['status', _ADDRESS], 'finished'),
    (['checkpoint', 'list', _ADDRESS], 'newest'),
    (['checkpoint', 'verify', _ADDRESS], 'ok     step 3'),
    (['report', _ADDRESS, f'--out={report}'], '1 run'),
    (['view', _ADDRESS], 'step 3: 16 of 16 dialogues'),
    (['export', f'--workdir={_ADDRESS}', f'--out={exported}'], ''),
    (
      ['evaluate', f'--checkpoint={_ADDRESS}', f'--out={tmp_path}/scores'],
      f'{_ADDRESS}, step 3',
    ),
  ):
    assert __main__.main(command) == 0
    assert expected in capsys.readouterr().out
  assert report.stat().st_size > 10_000
  weights = [x / 'model.safetensors' for x in (exported, finished / 'policy')]
  assert weights[0].read_bytes() == weights[1].read_bytes()

  # Another run must not take the place of this one.
  begins = ['train', *runs.flags(seed=5), f'--workdir={_ADDRESS}']
  for command, subject in (
    (begins, 'seed=5'),
    ([*begins, '--restart'], '--re'),
  ):
    assert __main__.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(subject) and _ADDRESS in line


@pytest.mark.slow
def test_who_has_lost_the_lease_commits_nothing(google, capsys):
  """A process that slept past its lease wakes up before a save."""

  def take_over(moment):
    if moment == ('updated', 2):
      first = 'study/run/checkpoints/1/commit_success.txt'
      runs.wait(lambda: first in google.objects)
      holder = lock.Holder('elsewhere', 7, '1', 'now', True, 'another boot')
      record = {'holder': dataclasses.asdict(holder), 'seconds': 60.0}
      google.put('study/run/lease', json.dumps(record).encode())

  assert runs.train(_ADDRESS, take_over) == 75
  assert 'process 7 on host elsewhere' in capsys.readouterr().err
  steps = bucket_files.committed(
    {name.removeprefix('study/run/'): 0 for name in google.objects}
  )
  assert steps == [1]
  assert b'elsewhere' in google.data('study/run/lease')


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """Returns the folder of a run of two hosts in a bucket that nobody disturbs.

  It is downloaded, with all of its dialogues and arrays.
  """
  place = tmp_path_factory.mktemp('undisturbed')
  with pytest.MonkeyPatch.context() as patch, emulator.served() as storage:
    for name, value in storage.environment.items():
      patch.setenv(name, value)
    hosts = bucket_hosts.Hosts(place / 'hosts', num_steps=_STEPS)
    hosts.start()
    assert hosts.ends() == [0, 0]
    with bucket_hosts.downloaded(storage) as folder:
      shutil.copytree(folder, place / 'run')
  return place / 'run'


@pytest.mark.slow
def test_hosts_that_share_nothing_but_a_bucket(google, undisturbed, tmp_path):
  """Killed in a save and in a step, with one request in twenty failing."""
  google.fault = chance = emulator.RandomFaults(
    3, rate=0.05, kinds=bucket_hosts.KINDS
  )
  hosts = bucket_hosts.Hosts(tmp_path, num_steps=_STEPS)
  hosts.start()
  is_saving = lambda: any('checkpoints/2/state' in x for x in google.objects)
  hosts.wait(is_saving)
  hosts.kill()
  hosts.start()
  hosts.wait(lambda: 'step 3/' in hosts.said)
  hosts.processes[1].kill()
  assert hosts.ends() == [75, -signal.SIGKILL]
  hosts.start()
  assert hosts.ends() == [0, 0]
  chance.on = False
  assert chance.count > 20
  bucket_hosts.assert_same_run(google, undisturbed)
  assert 'study/run/lease' not in google.objects
  # The folders that stood for the bucket are gone, but those of killed ones.
  left = [x for x in tmp_path.glob('host*-3/stppo_jax-run-*')]
  assert not left


@pytest.mark.slow
def test_an_outage_of_the_bucket_loses_nothing(google, undisturbed, tmp_path):
  hosts = bucket_hosts.Hosts(tmp_path, num_steps=_STEPS, checkpoint__retry=3)
  hosts.start()
  hosts.wait(lambda: 'step 2/' in hosts.said)
  google.fault = lambda line: emulator.Fault('reset')
  assert hosts.ends() == [75, 75]
  assert 'the run goes on' in hosts.said and 'Server disconn' in hosts.said
  saved = [x for x in google.objects if x.endswith('/commit_success.txt')]
  assert saved
  google.fault = lambda line: None
  hosts.start()
  assert hosts.ends() == [0, 0]
  bucket_hosts.assert_same_run(google, undisturbed)


@pytest.mark.slow
def test_a_short_outage_is_waited_for(google, undisturbed, tmp_path):
  hosts = bucket_hosts.Hosts(tmp_path, num_steps=_STEPS)
  hosts.start()
  hosts.wait(lambda: 'step 1/' in hosts.said)
  google.fault = lambda line: emulator.Fault('503')
  time.sleep(20)
  google.fault = lambda line: None
  assert hosts.ends() == [0, 0]
  bucket_hosts.assert_same_run(google, undisturbed)
