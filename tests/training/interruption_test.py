"""Signals are requests, outages pauses: the run they end is the same run."""

import dataclasses
import os
import signal

import pytest

from stppo_jax import __main__
from stppo_jax import types
from stppo_jax.learner import learner
from stppo_jax.retrieval import client
from stppo_jax.retrieval import protocol
from stppo_jax.rollout import collect
from stppo_jax.training import evaluation
from stppo_jax.training import interruption
from stppo_jax.training import sft
from tests.training import runs

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


def _send(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', _CODES)
def test_work_that_may_be_dropped_ends_at_once(number):
  with interruption.Interruption() as interrupt:
    with pytest.raises(interruption.Interrupted):
      with interrupt.abandonable():
        _send(number)
        pytest.fail('went on')
    assert interrupt.exit_code == _CODES[number]


@pytest.mark.parametrize('number', _CODES)
def test_work_that_may_not_is_finished_first(number):
  with interruption.Interruption() as interrupt:
    with interrupt.abandonable():
      pass
    _send(number)
    finished = True
    with pytest.raises(interruption.Interrupted):
      with interrupt.abandonable():
        pytest.fail('began')
  assert finished and interrupt.exit_code == _CODES[number]


@pytest.mark.parametrize('first', _CODES)
def test_the_second_signal_is_the_end(first):
  with interruption.Interruption() as interrupt:
    _send(first)
    with pytest.raises(SystemExit) as caught:
      _send(signal.SIGTERM)
    assert caught.value.code == 75
    with pytest.raises(KeyboardInterrupt):
      _send(signal.SIGINT)
    assert interrupt.exit_code == _CODES[first]


def test_handlers_are_given_back():
  before = [signal.getsignal(number) for number in _CODES]
  with interruption.Interruption():
    inside = [signal.getsignal(number) for number in _CODES]
    assert all(a is not b for a, b in zip(before, inside))
  assert [signal.getsignal(number) for number in _CODES] == before


def test_an_interruption_is_not_an_error_to_be_handled():
  assert not issubclass(interruption.Interrupted, Exception)


_STEPS = 2


def _train(workdir, **changes):
  """Nothing but what ends a run saves it before its last step."""
  options = {
    'num_steps': _STEPS,
    'evaluate__every': 1,
    'checkpoint__every': 100,
  }
  flags = runs.flags(**(options | changes))
  return __main__.main(['train', *flags, f'--workdir={workdir}'])


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """The folder of a run that nothing happened to."""
  workdir = tmp_path_factory.mktemp('finished')
  assert _train(workdir) == 0
  return workdir


def _assert_same_run(workdir, finished):
  """Metrics, dialogues and weights, bit for bit."""
  runs.assert_same_told(workdir, finished, num_steps=_STEPS)
  weights = 'policy/model.safetensors'
  assert (workdir / weights).read_bytes() == (finished / weights).read_bytes()


def _before_call(monkeypatch, owner, name, act):
  """Calls `act(n)` before the nth call of a method."""
  method, count = getattr(owner, name), 0

  def counted(*args, **kwargs):
    nonlocal count
    count += 1
    act(count)
    return method(*args, **kwargs)

  monkeypatch.setattr(owner, name, counted)


def test_a_line_that_is_written_again_stands_once(
  finished, tmp_path, monkeypatch
):
  def crash(n):
    raise RuntimeError('a bug, or a power cut')

  def crash_in_update():
    with monkeypatch.context() as patch:
      _before_call(patch, learner.Learner, 'update_epochs', crash)
      assert _train(tmp_path) == 70

  def interrupt(owner, name, call):
    with monkeypatch.context() as patch:
      send = lambda n: _send(signal.SIGTERM) if n == call else None
      _before_call(patch, owner, name, send)
      assert _train(tmp_path) == 75

  interrupt(collect.Collector, 'collect', 2)  # saves step 0, which has a line
  crash_in_update()
  interrupt(evaluation.Evaluator, 'run', 2)  # saves step 1, which has none
  crash_in_update()  # after it was evaluated and written, not saved again
  assert [x['step'] for x in runs.metrics(tmp_path)] == [0, 1]
  assert _train(tmp_path) == 0
  _assert_same_run(tmp_path, finished)


def test_an_evaluation_is_dropped_and_its_step_is_not(
  finished, tmp_path, monkeypatch, capsys
):
  for call, number, saved in (
    (2, signal.SIGTERM, 1),  # after the one of step 0
    (1, signal.SIGINT, 1),  # the same again: it is saved already
    (2, signal.SIGINT, 2),
  ):
    with monkeypatch.context() as patch:
      send = lambda n: _send(number) if n == call else None
      _before_call(patch, evaluation.Evaluator, 'run', send)
      assert _train(tmp_path) == _CODES[number]
    out = capsys.readouterr().out
    assert f'interrupted after step {saved}, saved' in out
    assert [x['step'] for x in runs.metrics(tmp_path)] == [*range(saved)]
  assert _train(tmp_path) == 0
  _assert_same_run(tmp_path, finished)


@pytest.mark.parametrize('number', _CODES)
def test_a_start_is_dropped(tmp_path, monkeypatch, capsys, number):
  def imitate(config, services, directory):
    directory.mkdir()
    _send(number)
    pytest.fail('went on')

  monkeypatch.setattr(sft, 'imitate', imitate)
  assert _train(tmp_path, sft__before_training=True) == _CODES[number]
  assert 'interrupted before the first step' in capsys.readouterr().out
  assert {p.name for p in tmp_path.iterdir()} == {
    'config.json',
    'start.partial',
  }


def _fail_collections(monkeypatch, numbers, fraction):
  """The retriever fails a fraction of the nth training collections."""
  method, count = collect.Collector.collect, 0

  def failing(self, questions, keys, *, greedy=False):
    nonlocal count
    trajectories = method(self, questions, keys, greedy=greedy)
    if greedy:
      return trajectories
    count += 1
    failed = int(fraction * len(trajectories)) if count in numbers else 0
    status = types.TrajectoryStatus.INFRA_ERROR
    return [
      dataclasses.replace(trajectory, status=status)
      if n < failed
      else trajectory
      for n, trajectory in enumerate(trajectories)
    ]

  monkeypatch.setattr(collect.Collector, 'collect', failing)
  return lambda: count


def test_a_step_in_an_outage_is_collected_again(
  finished, tmp_path, monkeypatch, capsys
):
  collections = _fail_collections(monkeypatch, {2, 3}, 0.75)
  waits = []
  _before_call(
    monkeypatch, client.HttpRetriever, 'wait_until_ready', waits.append
  )
  assert _train(tmp_path) == 0
  assert collections() == _STEPS + 2
  assert len(waits) == 1 + 2  # at the start, and after either
  told = 'step 2: the infrastructure failed 75% of the trajectories'
  assert capsys.readouterr().out.count(told) == 2
  _assert_same_run(tmp_path, finished)


def test_a_few_failures_are_no_outage(tmp_path, monkeypatch):
  collections = _fail_collections(monkeypatch, {1}, 0.5)
  assert _train(tmp_path, num_steps=1) == 0
  assert collections() == 1
  assert runs.metrics(tmp_path)[-1]['rollout/valid_fraction'] == 0.5


def test_an_outage_past_its_grace_saves_and_ends(
  finished, tmp_path, monkeypatch, capsys
):
  def unreachable(n):
    if n > 1:
      raise protocol.RetrieverUnreachable('not ready within 60 s')

  with monkeypatch.context() as patch:
    _fail_collections(patch, {2}, 1.0)
    _before_call(patch, client.HttpRetriever, 'wait_until_ready', unreachable)
    assert _train(tmp_path) == 75
  assert capsys.readouterr().err == 'not ready within 60 s\n'
  assert (tmp_path / 'checkpoints' / '1').is_dir()
  assert _train(tmp_path) == 0
  _assert_same_run(tmp_path, finished)


def test_a_server_that_only_seems_healthy_ends_the_run(
  finished, tmp_path, monkeypatch, capsys
):
  with monkeypatch.context() as patch:
    collections = _fail_collections(patch, range(2, 100), 1.0)
    assert _train(tmp_path) == 75
    assert collections() == 1 + 3
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(
    'step 2: the retriever answers, yet 100% of the trajectories failed'
  )
  assert (tmp_path / 'checkpoints' / '1').is_dir()
  assert _train(tmp_path) == 0
  _assert_same_run(tmp_path, finished)


def test_queries_of_an_evaluation_are_in_no_line(tmp_path, monkeypatch):
  collections = 0

  def collecting(_):
    nonlocal collections
    collections += 1

  def statistics(self):
    nonlocal collections
    result, collections = {'retrieval/ok': collections}, 0
    return result

  _before_call(monkeypatch, collect.Collector, 'collect', collecting)
  monkeypatch.setattr(client.HttpRetriever, 'statistics', statistics)
  assert _train(tmp_path) == 0
  lines = runs.metrics(tmp_path)[1:]
  assert [line['retrieval/ok'] for line in lines] == [1, 1]


@pytest.mark.parametrize('trajectories', [0, 16])
def test_without_evaluation_dialogues_of_the_step_are_printed(
  tmp_path, capsys, trajectories
):
  changes = {
    'num_steps': 1,
    'evaluate__every': 0,
    'writer__samples': 3,
    'writer__trajectories': trajectories,
  }
  assert _train(tmp_path, **changes) == 0
  out = capsys.readouterr().out
  assert out.count('? golden: ') == 3 and 'evaluation after' not in out
  assert '\x1b' not in out  # no terminal
  kept = [p.name for p in tmp_path.glob('trajectories-*')]
  assert kept == ['trajectories-000001.jsonl'][:trajectories]


def test_another_config_is_refused_before_anything_is_asked(
  finished, capsys, monkeypatch
):
  before = (finished / 'config.json').read_bytes()
  monkeypatch.setattr(client.HttpRetriever, 'wait_until_ready', pytest.fail)
  assert _train(finished, seed=5) == 2
  assert capsys.readouterr().err == (
    f'seed=5: the run in {finished} was started with 0\n'
  )
  assert (finished / 'config.json').read_bytes() == before


def test_evaluating_leaves_a_live_run_alone(finished, tmp_path, capsys):
  saving = finished / 'checkpoints' / '9.orbax-checkpoint-tmp'
  saving.mkdir()
  before = {(str(p), p.stat().st_mtime_ns) for p in finished.rglob('*')}
  arguments = ['evaluate', *runs.flags()]
  assert __main__.main([*arguments, f'--workdir={finished}']) == 0
  after = {(str(p), p.stat().st_mtime_ns) for p in finished.rglob('*')}
  saving.rmdir()
  assert after == before
  assert f'step {_STEPS} val/em/one_hop' in capsys.readouterr().out
  missing = tmp_path / 'missing'
  assert __main__.main([*arguments, f'--workdir={missing}']) == 2
  assert not missing.exists()
  assert capsys.readouterr().err == f'--workdir={missing}: no such folder\n'
