"""Two runs never share a folder, and nothing of a run is lost unsaid."""

import json
import os
import shutil
import signal

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
from tests.training import faults
from tests.training import runs
from tests.workdir import holders
from tests.workdir import two_hosts


def _claimed(workdir, hosts=hosts_lib.ALONE):
  return claim.claimed(runs.config(), workdir, hosts=hosts)


def _files(folder):
  return {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def _evaluate(workdir):
  command = ['evaluate', *runs.flags(num_steps=runs.STEPS)]
  return __main__.main([*command, f'--checkpoint={workdir}'])


def test_a_second_run_waits_for_the_first(run, capsys):
  metrics = (run / 'metrics.jsonl').read_bytes()
  with holders.started(run) as holder:
    before = _files(run)
    assert runs.train(run) == 75
    assert f'process {holder.pid} on host ' in capsys.readouterr().err
    assert _files(run) == before
  assert runs.train(run) == 0
  assert f'process {holder.pid} on host ' in capsys.readouterr().out
  assert not (run / 'lock').exists()
  # The run was finished: there is nothing to do.
  assert (run / 'metrics.jsonl').read_bytes() == metrics


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
  # Another number of steps, and even another algorithm: it is another run.
  changes = {'num_steps': 1, 'evaluate__every': 0}
  flags = runs.flags(**changes, algorithm__bounds__clip_low=0.1)
  command = ['train', *flags, f'--workdir={run}', '--restart']
  assert __main__.main(command) == 0
  aside = run / 'aside-1'
  assert str(aside) in capsys.readouterr().out
  assert {aside / p.relative_to(run): x for p, x in before.items()} == (
    _files(aside)
  )
  assert [line['step'] for line in runs.metrics(run)] == [1]
  assert run_folder.read(run).run_id != run_folder.read(aside).run_id


def test_a_lost_line_of_metrics_is_written_again(run, capsys):
  written = (run / 'metrics.jsonl').read_bytes()
  *lines, _ = written.splitlines(keepends=True)
  (run / 'metrics.jsonl').write_bytes(b''.join(lines) + b'{"step": 3, "a')
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
  with faults.room_in_the_end():
    faults.fill_disk(0)
    with pytest.raises(exits.Misconfigured) as caught, _claimed(workdir):
      pytest.fail('went on')
  assert str(caught.value) == f'{workdir}: File too large'
  assert os.listdir(workdir) == []  # not even a lock that names nobody


def test_a_run_that_has_ended_is_not_interrupted(tmp_path):
  hosts = hosts_lib.Hosts()
  with _claimed(tmp_path, hosts):
    interrupts = hosts.on_stop
  assert hosts.on_stop != interrupts


class _Checkpoints:
  """Checkpoints of a run that has none yet."""

  def __init__(self):
    self.saved = []

  def restore(self, checkpointer, start):
    del checkpointer, start

  def save(self, checkpointer, step, state, host, *, waits):
    self.saved.append(step)


def test_a_host_does_not_save_alone_what_others_have_not_resumed(tmp_path):
  checkpoints, hosts = _Checkpoints(), two_hosts.TwoHosts(vote={})
  state = state_lib.TrainState(policy=None, value=None)
  with _claimed(tmp_path, hosts) as folder:
    hosts.theirs['vote'] = {'interrupted': 75}
    with run_lib.Run.open(
      runs.config(), folder, state, checkpoints, None, num_steps=3
    ):
      pytest.fail('went on')
  assert folder.exit_code == 75 and checkpoints.saved == []


def test_hosts_that_wait_for_each_other_finish_before_they_leave(tmp_path):
  hosts, done = two_hosts.TwoHosts(vote={}), []
  with _claimed(tmp_path, hosts) as folder:
    hosts.heard.clear()
    with folder.collective_section():
      with folder.interruptible():
        done.append('a part')
      os.kill(os.getpid(), signal.SIGTERM)
      done.append('all')
    pytest.fail('went on')
  assert done == ['a part', 'all'] and folder.exit_code == 75
  # The last vote has no timeout: the others finish the body, too.
  assert hosts.heard == [
    ('vote', {}, None),
    ('vote', {'interrupted': 75}, None),
  ]


def test_hosts_that_wait_for_each_other_abandon_parts(tmp_path):
  hosts = two_hosts.TwoHosts(vote={})
  with _claimed(tmp_path, hosts) as folder:
    hosts.heard.clear()
    with folder.collective_section():
      with folder.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail('went on')
  assert folder.exit_code == 75
  assert hosts.heard == [('vote', {'interrupted': 75}, voting.PATIENCE)]


def test_a_host_alone_abandons_its_start_at_once(tmp_path):
  with _claimed(tmp_path) as folder:
    with folder.collective_section():
      with folder.interruptible():
        pass
      os.kill(os.getpid(), signal.SIGTERM)
      pytest.fail('went on')
  assert folder.exit_code == 75


def test_a_signal_before_the_folder_is_claimed_is_the_callers(tmp_path):
  hosts = two_hosts.TwoHosts(vote={'interrupted': 130})
  with pytest.raises(interruption.Interrupted) as caught:
    with _claimed(tmp_path / 'run', hosts):
      pytest.fail('went on')
  assert caught.value.exit_code == 130
  assert not (tmp_path / 'run').exists()


@pytest.fixture
def own_cache(monkeypatch):
  """Leaves it to a run where compiled programs are kept."""
  before = jax.config.jax_compilation_cache_dir
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
  jax.config.update('jax_compilation_cache_dir', None)
  compilation_cache.reset_cache()
  yield
  jax.config.update('jax_compilation_cache_dir', before)
  compilation_cache.reset_cache()


@pytest.mark.slow
@pytest.mark.usefixtures('own_cache')
def test_a_resumed_run_compiles_nothing_again(tmp_path):
  compiled = []  # the programs that were ever compiled, after each start
  for num_steps in (1, 2, 3):
    jax.clear_caches()  # as a new process does
    assert runs.train(tmp_path, num_steps=num_steps) == 0
    compiled.append(set(os.listdir(tmp_path / 'compiled')))
  first, second, third = compiled
  # The second start restores a checkpoint, for which it has a few programs.
  assert 0 < len(second - first) < len(first) / 4 and third == second
  flags = [*runs.flags(num_steps=1), f'--workdir={tmp_path}', '--restart']
  assert __main__.main(['train', *flags]) == 0
  assert third <= set(os.listdir(tmp_path / 'compiled'))
