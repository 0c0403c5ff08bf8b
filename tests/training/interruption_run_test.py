"""A run that a signal or an outage ended resumes as the same run."""

import contextlib
import signal

import pytest

from stppo_jax import __main__
from stppo_jax.retrieval import server
from stppo_jax.tools import run_state
from stppo_jax.training import components
from tests import processes
from tests.training import faults
from tests.training import runs

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


def _stuck(workdir, kind, number, **changes):
  """Returns the ended process of a run that is stuck when a signal comes."""
  flags = runs.flags(**changes, preemption__grace=6.0)
  words = '-m', 'tests.training.one_host', 'stuck', kind, number, 'train'
  return processes.python(*words, *flags, f'--workdir={workdir}')


@pytest.mark.slow
def test_an_update_that_outlasts_the_grace_seconds_is_not_waited_for(
  finished, tmp_path
):
  # Its first step is not saved when the signal comes.
  options = {'checkpoint__every': 99, 'num_steps': runs.STEPS}
  process = _stuck(tmp_path, 'updated', 2, **options)
  assert process.returncode == 75
  assert 'in the updates after step 1' in process.stdout
  assert 'preemption.grace=6' in process.stdout
  assert not list((tmp_path / 'checkpoints').iterdir())
  assert _train(tmp_path, **options, preemption__grace=6.0) == 0
  runs.assert_same_files(tmp_path, finished)


@pytest.mark.slow
def test_a_supervised_start_that_is_stuck_leaves_its_folder(tmp_path):
  """The folder of the run around it is free, and says how the run ended."""
  changes = {'sft__before_training': True, 'sft__num_steps': 2}
  assert _stuck(tmp_path, 'collect', 1, **changes).returncode == 75
  state = run_state.read(tmp_path)
  assert (state.state, state.step) == (run_state.INTERRUPTED, 0)
  assert not (tmp_path / 'lock').exists()


def test_a_signal_behind_the_last_step_leaves_a_finished_run(run, capsys):
  stop = faults.send_at(('printed', 1), signal.SIGTERM)
  with faults.printed('done. metrics', stop):
    assert runs.train(run) == 0
  assert 'policy (Hugging Face format)' in capsys.readouterr().out
  assert run_state.read(run).state == run_state.FINISHED


def _train(workdir, act=lambda moment: None, **changes):
  # Only an interruption saves these runs before their last step.
  return runs.train(workdir, act, **{'checkpoint__every': 100, **changes})


@pytest.mark.slow
def test_a_run_interrupted_anywhere_is_the_same_run(finished, tmp_path, capsys):
  """Dropped work is done again; an update is finished and saved."""
  for moment, number, promised, saved, written in (
    # The evaluation of the start is dropped.
    (('evaluate', 1), signal.SIGTERM, 'before the first step', 0, []),
    # A collection is dropped; step 0 has its line, and keeps one.
    (('collect', 1), signal.SIGINT, 'before the first step', 0, [0]),
    # An update is finished, written and saved.
    (('updated', 1), signal.SIGTERM, 'step 1', 1, [0, 1]),
    # An evaluation is dropped and its step is not: it has no line yet.
    (('evaluate', 1), signal.SIGTERM, 'saving step 2', 2, [0, 1]),
    # Written, but not saved again: the next start writes the same line.
    (('updated', 1), None, '', 2, [0, 1, 2]),
  ):
    if number is None:
      assert _train(tmp_path, faults.crash_at(moment)) == 70
    else:
      code = _train(tmp_path, faults.send_at(moment, number))
      assert code == _CODES[number]
      said = f'after step {saved}, saved' if saved else 'before the first step'
      out, err = capsys.readouterr()
      assert f'interrupted {said}' in out
      assert err.startswith(f'{number.name}: ') and promised in err
    names = [int(p.name) for p in (tmp_path / 'checkpoints').iterdir()]
    assert max(names, default=0) == saved
    assert [x['step'] for x in runs.metrics(tmp_path)] == written
  assert _train(tmp_path) == 0
  runs.assert_same_files(tmp_path, finished)


@pytest.mark.slow
def test_no_error_loses_a_finished_step(finished, tmp_path, capsys):
  """One that nobody foresaw, and a file that cannot be written at the end."""
  assert _train(tmp_path, faults.crash_at(('collect', 2))) == 70
  assert 'step 1 is saved' in capsys.readouterr().out
  policy, curve = tmp_path / 'policy', tmp_path / 'learning_curve.png'
  for path, make, remove in (
    (policy, policy.touch, policy.unlink),  # where a folder is to be
    (curve, curve.mkdir, curve.rmdir),  # where a file is to be
  ):
    make()
    assert _train(tmp_path) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(path)) and 'step 3 is saved' in line
    remove()
  assert _train(tmp_path) == 0
  runs.assert_same_files(tmp_path, finished)


@pytest.mark.slow
def test_a_save_that_fails_beside_the_loop_ends_the_run(
  finished, tmp_path, capsys
):
  """The disk is full from the second step on, whose save threads write."""

  def act(moment):
    if moment == ('updated', 2):
      # Threads write the first checkpoint.
      runs.wait(lambda: run_state.read(tmp_path).checkpoint == 1)
      faults.fill_disk()

  with faults.room_in_the_end():
    assert _train(tmp_path, act, checkpoint__every=1) == 75
  said = f'step 2 could not be saved in {tmp_path}/checkpoints'
  assert said in capsys.readouterr().err
  assert run_state.read(tmp_path).checkpoint == 1
  assert __main__.main(['checkpoint', 'verify', f'--workdir={tmp_path}']) == 0
  assert _train(tmp_path, checkpoint__every=1) == 0  # there is room again
  runs.assert_same_files(tmp_path, finished)


@pytest.mark.slow
def test_an_interrupted_start_goes_on(tmp_path, capsys):
  """The policy of the supervised start exists completely or not at all."""
  workdir, other = tmp_path / 'run', tmp_path / 'other'
  changes = {
    'sft__before_training': True,
    'sft__num_steps': 2,
    'sft__batch_size': 16,  # as in commands/train_test.py: the same program
    'num_steps': 1,
    'evaluate__every': 0,
  }
  send = faults.send_at(('collect', 1), signal.SIGINT)  # of demonstrations
  assert _train(workdir, send, **changes) == 130
  assert 'interrupted before the first step' in capsys.readouterr().out
  record = {'config.json', 'files.json', 'run.json', 'heartbeat.json'}
  assert {path.name for path in workdir.iterdir()} == record | {'start'}
  left = {path.name for path in (workdir / 'start').iterdir()}
  assert left == record | {'checkpoints'}
  assert not list((workdir / 'start' / 'checkpoints').iterdir())
  state = run_state.read(workdir)
  assert (state.state, state.step) == (run_state.INTERRUPTED, 0)
  # After its first step, it is saved as any other run.
  send = faults.send_at(('collect', 2), signal.SIGTERM)
  assert _train(workdir, send, **changes) == 75
  assert 'interrupted after step 1, saved' in capsys.readouterr().out
  policy = workdir / 'start' / 'policy'
  assert not policy.exists() and not (workdir / 'checkpoints').exists()
  # As if killed while it was written.
  partial = workdir / 'start' / '.policy.partial'
  partial.mkdir()
  (partial / 'rest').touch()
  assert _train(workdir, **changes) == 0
  assert not (policy / 'rest').exists() and not partial.exists()
  assert _train(other, **changes) == 0
  for name in ('start', '.'):
    assert runs.weights(workdir / name) == runs.weights(other / name)


@pytest.mark.slow
def test_a_step_in_an_outage_is_collected_again(finished, tmp_path, capsys):
  failures, collections = {('collect', 2): 0.75, ('collect', 3): 0.75}, []

  def act(moment):
    collections.append(moment[0] == 'collect')
    return failures.get(moment)

  assert _train(tmp_path, act) == 0
  assert sum(collections) == runs.STEPS + 2
  assert capsys.readouterr().out.count('failed 12 of 16 trajectories') == 2
  runs.assert_same_files(tmp_path, finished)


@pytest.mark.slow
def test_refilled_rows_are_those_of_a_run_without_failures(
  finished, tmp_path, capsys
):
  def act(moment):
    return 0.5 if moment == ('collect', 2) else None

  assert _train(tmp_path, act, rollout__refill_rounds=2) == 0
  assert '2: 8 of 8 failed' in capsys.readouterr().out
  name = 'rollout/refilled_rows'
  lines, expected = runs.repeated(tmp_path), runs.repeated(finished)
  assert [line.pop(name, 0) for line in lines] == [0, 0, 8, 0]
  assert [line.pop(name, 0) for line in expected] == [0, 0, 0, 0]
  assert lines == expected
  assert runs.weights(tmp_path) == runs.weights(finished)


@pytest.mark.slow
def test_a_few_failures_are_no_outage(tmp_path, capsys):
  changes = {
    'num_steps': 1,
    'evaluate__every': 0,
    'writer__samples': 3,
    'writer__trajectories': 0,
  }
  assert _train(tmp_path, lambda moment: 0.5, **changes) == 0
  (line,) = runs.metrics(tmp_path)
  assert line['rollout/valid_fraction'] == 0.5
  # Dialogues are printed, though none is kept.
  printed = capsys.readouterr().out
  assert printed.count('? golden: ') == 3
  assert '8 of 16' in printed and 'the server is away' in printed
  assert not list(tmp_path.glob('trajectories-*'))


@pytest.mark.slow
def test_an_outage_that_lasts_saves_and_ends_the_run(
  finished, tmp_path, capsys
):
  passages = components.build_questions(runs.config()).passages()
  with contextlib.ExitStack() as stack:
    served = stack.enter_context(server.embedded(passages))

    def act(moment):
      if moment == ('collect', 2):
        stack.close()
        return 1.0

    retrieval = {
      'retrieval__url': served.url,
      'retrieval__ready_timeout': 0.5,
      'retrieval__timeout': 5.0,
    }
    assert _train(tmp_path, act, **retrieval) == 75
  assert served.url in capsys.readouterr().err
  # A server that is ready but fails all queries ends the run too.
  collections = []

  def fail(moment):
    if moment[0] != 'collect':
      return None
    collections.append(moment)
    return 1.0

  assert _train(tmp_path, fail) == 75
  assert collections == [('collect', n) for n in (1, 2, 3)]
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('step 2: ') and '16 of 16 trajectories' in line
  assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['1']
  assert _train(tmp_path) == 0
  runs.assert_same_files(tmp_path, finished)


def test_another_config_is_refused_before_any_request(finished, capsys):
  # No server listens there.
  assert _train(finished, seed=5, retrieval__url='http://127.0.0.1:9') == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('seed=5: ') and str(finished) in line
