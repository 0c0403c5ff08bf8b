"""Two runs never share a folder, and nothing of a run is lost unsaid."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest

from stppo_jax import __main__
from stppo_jax import exits
from stppo_jax import interruption
from stppo_jax.learner import state as state_lib
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import voting
from stppo_jax.training import claim
from stppo_jax.training import run as run_lib
from stppo_jax.workdir import run_folder
from tests.training import runs

_HOLD = """
import pathlib, sys
from stppo_jax.workdir import lock
with lock.held(pathlib.Path(sys.argv[1])):
  print('held', flush=True)
  sys.stdin.read()
"""


@pytest.fixture
def run(finished, tmp_path):
  """Returns a copy of the folder of a finished run."""
  return shutil.copytree(finished, tmp_path / 'run')


def _files(folder):
  return {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def _evaluate(workdir):
  command = ['evaluate', *runs.flags(num_steps=runs.STEPS)]
  return __main__.main([*command, f'--checkpoint={workdir}'])


def test_a_second_run_waits_for_the_first(run, capsys):
  holder = subprocess.Popen(
    [sys.executable, '-c', _HOLD, str(run)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert holder.stdout.readline() == 'held\n'
    before = _files(run)
    assert runs.train(run) == 75
    assert f'process {holder.pid} on host ' in capsys.readouterr().err
    assert _files(run) == before
  finally:
    holder.kill()
    holder.communicate()
  assert runs.train(run) == 0
  assert f'process {holder.pid} on host ' in capsys.readouterr().out
  assert not (run / 'lock').exists()


def test_missing_checkpoints_erase_nothing(run, capsys):
  shutil.rmtree(run / 'checkpoints')
  for is_there in (False, True):  # an empty folder is where a disk was mounted
    if is_there:
      (run / 'checkpoints').mkdir()
    before = _files(run)
    for command in (runs.train, _evaluate):
      assert command(run) == 3
      (line,) = capsys.readouterr().err.splitlines()
      assert f'{run}/checkpoints' in line and '--restart' in line
    assert _files(run) == before
  # Another number of steps, and even another seed: it is another run.
  flags = runs.flags(num_steps=1, evaluate__every=0, seed=5)
  command = ['train', *flags, f'--workdir={run}', '--restart']
  assert __main__.main(command) == 0
  aside = run / 'aside-1'
  assert str(aside) in capsys.readouterr().out
  assert {aside / p.relative_to(run): x for p, x in before.items()} == (
    _files(aside)
  )
  assert [line['step'] for line in runs.metrics(run)] == [1]
  assert run_folder.read(run).run_id != run_folder.read(aside).run_id


@pytest.mark.parametrize('left', [b'', b'{"step": 3, "a'])
def test_a_lost_line_of_metrics_is_written_again(run, left, capsys):
  written = (run / 'metrics.jsonl').read_bytes()
  *lines, _ = written.splitlines(keepends=True)
  (run / 'metrics.jsonl').write_bytes(b''.join(lines) + left)
  assert runs.train(run) == 0
  assert (run / 'metrics.jsonl').read_bytes() == written
  assert 'the line of step 3 was missing in' in capsys.readouterr().out


def test_a_disk_without_room_is_told_before_a_step_is_lost(
  run, capsys, monkeypatch
):
  shutil.rmtree(run / 'checkpoints' / '3')
  before = _files(run / 'checkpoints')
  usage = shutil.disk_usage(run)
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage._replace(free=1000))
  assert runs.train(run) == 75
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f'{run}: ') and '1000 B' in line
  assert _files(run / 'checkpoints') == before


@pytest.mark.parametrize('field', ['run_id', 'config_digest'])
def test_a_checkpoint_of_another_run_is_not_loaded(run, capsys, field):
  identity = json.loads((run / 'run.json').read_text())
  (run / 'run.json').write_text(json.dumps(identity | {field: 'other'}))
  before = _files(run)
  export = ['export', f'--workdir={run}', f'--out={run.parent}/out']
  for code in (runs.train(run), _evaluate(run), __main__.main(export)):
    assert code == 2
  assert f'step 3 is of the run {identity["run_id"]}' in capsys.readouterr().err
  after = _files(run)
  for files in (before, after):
    del files[run / 'heartbeat.json']
  assert after == before


def test_a_folder_on_a_full_disk_is_one_line(tmp_path):
  workdir = tmp_path / 'run'
  workdir.mkdir()
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
  try:
    with pytest.raises(exits.Misconfigured) as caught:
      with claim.claimed(runs.config(), workdir):
        pytest.fail('went on')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert str(caught.value) == f'{workdir}: File too large'
  assert os.listdir(workdir) == []  # not even a lock that names nobody


def test_a_run_that_has_ended_is_not_interrupted(tmp_path):
  hosts = hosts_lib.Hosts()
  with claim.claimed(runs.config(), tmp_path, hosts=hosts):
    interrupts = hosts.on_stop
  assert hosts.on_stop != interrupts


class _Two(hosts_lib.Hosts):
  """The first of two hosts; the second one says what it is told to say."""

  def __init__(self):
    super().__init__(0, ['a', 'b'])
    self.vote, self.votes = {}, []

  def exchange(self, what, value, *, timeout=None):
    if what != 'vote':
      return [value, value]
    self.votes.append((value, timeout))
    return [value, self.vote]


_NO_STATE = state_lib.TrainState(policy=None, value=None)


class _Checkpoints:
  """Checkpoints of a run that has none yet."""

  def __init__(self):
    self.saved = []

  def restore(self, checkpointer, start):
    del checkpointer, start

  def save(self, checkpointer, step, state, host, *, waits):
    self.saved.append(step)


def _claimed(workdir, hosts=hosts_lib.ALONE):
  return claim.claimed(runs.config(), workdir, hosts=hosts)


def _open(folder, checkpoints):
  return run_lib.Run.open(
    runs.config(), folder, _NO_STATE, checkpoints, None, num_steps=3
  )


def test_a_host_does_not_save_alone_what_others_have_not_resumed(tmp_path):
  checkpoints, hosts = _Checkpoints(), _Two()
  with _claimed(tmp_path, hosts) as folder:
    hosts.vote = {'interrupted': 75}
    with _open(folder, checkpoints):
      pytest.fail('went on')
  assert folder.exit_code == 75 and checkpoints.saved == []


def test_hosts_that_wait_for_each_other_finish_before_they_leave(tmp_path):
  hosts, done = _Two(), []
  with _claimed(tmp_path, hosts) as folder:
    hosts.votes.clear()
    with folder.collective_section():
      with folder.interruptible():
        done.append('a part')
      os.kill(os.getpid(), signal.SIGTERM)
      done.append('all')
    pytest.fail('went on')
  assert done == ['a part', 'all'] and folder.exit_code == 75
  # The last vote has no timeout: the others finish the body, too.
  assert hosts.votes == [({}, None), ({'interrupted': 75}, None)]


def test_hosts_that_wait_for_each_other_abandon_parts(tmp_path):
  hosts = _Two()
  with _claimed(tmp_path, hosts) as folder:
    hosts.votes.clear()
    with folder.collective_section():
      with folder.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail('went on')
  assert folder.exit_code == 75
  assert hosts.votes == [({'interrupted': 75}, voting.PATIENCE)]


def test_a_host_alone_abandons_its_start_at_once(tmp_path):
  with _claimed(tmp_path) as folder:
    with folder.collective_section():
      with folder.interruptible():
        pass
      os.kill(os.getpid(), signal.SIGTERM)
      pytest.fail('went on')
  assert folder.exit_code == 75


def test_a_signal_before_the_folder_is_claimed_is_the_callers(tmp_path):
  hosts = _Two()
  hosts.vote = {'interrupted': 130}
  with pytest.raises(interruption.Interrupted) as caught:
    with _claimed(tmp_path / 'run', hosts):
      pytest.fail('went on')
  assert caught.value.exit_code == 130
  assert not (tmp_path / 'run').exists()


@pytest.fixture
def own_cache(monkeypatch):
  """Leaves it to a run where compiled programs are kept, and counts misses."""
  before = jax.config.jax_compilation_cache_dir
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
  jax.config.update('jax_compilation_cache_dir', None)
  compilation_cache.reset_cache()
  events = []

  def listen(event, **details):
    del details
    events.append(event.removeprefix('/jax/compilation_cache/'))

  jax.monitoring.register_event_listener(listen)

  def misses():
    wanted = events.count('compile_requests_use_cache')
    missed = wanted - events.count('cache_hits')
    events.clear()
    return wanted, missed

  yield misses
  jax.monitoring.unregister_event_listener(listen)
  jax.config.update('jax_compilation_cache_dir', before)
  compilation_cache.reset_cache()


@pytest.mark.slow
def test_a_resumed_run_compiles_nothing_again(tmp_path, own_cache):
  compiled = []
  for num_steps in (1, 2, 3):
    jax.clear_caches()  # as a new process does
    own_cache()
    assert runs.train(tmp_path / 'run', num_steps=num_steps) == 0
    compiled.append(own_cache())
  assert any((tmp_path / 'run' / 'compiled').iterdir())
  (first, missed), (_, more), (wanted, none) = compiled
  assert missed > first / 2 and wanted > first / 2
  # The second start restores a checkpoint, for which it has a few programs.
  assert more < missed / 4 and none == 0
  before = set(os.listdir(tmp_path / 'run' / 'compiled'))
  flags = [*runs.flags(num_steps=1), f'--workdir={tmp_path / "run"}']
  assert __main__.main(['train', *flags, '--restart']) == 0
  assert before <= set(os.listdir(tmp_path / 'run' / 'compiled'))
