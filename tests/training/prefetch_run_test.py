"""Runs that collect ahead: stale by so much, and the same when they are cut.

On one device, where the collection of the next steps is in the background.
"""

import functools
import os
import random
import signal
import threading
import time

import jax
import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.learner import learner as learner_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.records import checkpoint
from stppo_jax.retrieval import protocol
from stppo_jax.rollout import collect
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.training import assembly
from stppo_jax.training import evaluation
from stppo_jax.training import prefetch
from tests.training import runs

_STEPS = 8
# Orbax reads the leaves concurrently; see checkpoint_test.py.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture(autouse=True, scope='module')
def one_device():
  """As where there is one device; the others of the tests stand by."""

  def build_mesh(config, *, local=False):
    return mesh_lib.make_mesh(
      data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]
    )

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(assembly, 'build_mesh', build_mesh)
    yield


def _flags(steps_ahead=1, **changes):
  options = {
    'num_steps': _STEPS,
    'rollout__steps_ahead': steps_ahead,
    'evaluate__every': 4,
  }
  return runs.flags(**(options | changes))


def _train(workdir, *args, **changes):
  flags = _flags(*args, **changes)
  return __main__.main(['train', *flags, f'--workdir={workdir}'])


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """Makes the folder of a run that nothing happened to, by steps ahead."""

  @functools.cache
  def make(steps_ahead):
    workdir = tmp_path_factory.mktemp(f'ahead{steps_ahead}')
    assert _train(workdir, steps_ahead) == 0
    return workdir

  return make


def _newest(workdir, steps_ahead):
  """(step, all leaves as numpy arrays) of the newest checkpoint."""
  config = runs.config(rollout__steps_ahead=steps_ahead)
  questions = assembly.build_questions(config)
  tokenizer = assembly.build_tokenizer(config, questions)
  shape = assembly.build_model_config(config, tokenizer)
  learner = learner_lib.Learner(config, shape, assembly.build_mesh(config))
  saved = checkpoint.Checkpointer(workdir, read_only=True)
  found = saved.restore_latest(learner.abstract_state(learner.start()))
  saved.close()
  step, state, _ = found
  return step, jax.device_get(state)


def _saved_step(workdir):
  return max(int(path.name) for path in (workdir / 'checkpoints').iterdir())


def _assert_same_run(workdir, expected, steps_ahead=1):
  """Parameters, moments, published policies, metrics, dialogues: the bits."""
  runs.assert_same_told(workdir, expected, num_steps=_STEPS)
  (step, ours), (_, theirs) = (
    _newest(folder, steps_ahead) for folder in (workdir, expected)
  )
  assert step == _STEPS and len(ours.published) == steps_ahead
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def _before_call(patch, owner, name, act):
  """Calls `act(n)` before the nth call of a method."""
  method, count = getattr(owner, name), 0

  def counted(*args, **kwargs):
    nonlocal count
    count += 1
    act(count)
    return method(*args, **kwargs)

  patch.setattr(owner, name, counted)


def test_a_run_is_so_many_steps_stale(finished):
  lines = runs.metrics(finished(1))[1:]
  assert [line['rollout/staleness'] for line in lines] == [0.0] + [1.0] * 7
  # Engine and trainer are compared at the weights that sampled.
  assert max(line['mismatch/logprob_abs_diff'] for line in lines) < 1e-4
  assert all(line['timing_s/collect'] > 0 for line in lines)
  assert all(line['mismatch/truncation'] == 0 for line in lines)
  # The first minibatch is away from them already: the policy has moved.
  assert all(line['ratio/token/max'] > 1 + 1e-5 for line in lines[1:])


def test_in_between_it_is_the_same_run_as_in_the_background(
  finished, tmp_path, monkeypatch
):
  collector, threads = prefetch.Prefetcher, set()

  def in_between(play, publish, *, loop, **options):
    assert loop is not None
    return collector(play, publish, loop=None, **options)

  monkeypatch.setattr(prefetch, 'Prefetcher', in_between)
  _before_call(
    monkeypatch,
    collect.Collector,
    'collect',
    lambda n: threads.add(threading.current_thread()),
  )
  assert _train(tmp_path, num_steps=3) == 0
  assert threads == {threading.main_thread()}
  # Up to the last step, which is evaluated here.
  assert runs.repeated(tmp_path)[:3] == runs.repeated(finished(1))[:3]
  for step in (1, 2, 3):
    played = (runs.trajectories(x, step) for x in (tmp_path, finished(1)))
    assert next(played) == next(played)


def test_the_ratio_can_be_of_the_current_policy(finished, tmp_path):
  assert _train(tmp_path, num_steps=3, updates__old_policy='current') == 0
  current, sampled = (runs.metrics(x)[1:4] for x in (tmp_path, finished(1)))
  # The first step is of the same weights either way.
  assert current[0]['mismatch/logprob_abs_diff'] < 1e-4
  assert current[0]['ratio/token/max'] == sampled[0]['ratio/token/max']
  # Then the weight holds what the ratio held.
  for ours, theirs in zip(current[1:], sampled[1:]):
    assert ours['mismatch/logprob_abs_diff'] > 1e-4
    assert theirs['mismatch/logprob_abs_diff'] < 1e-5
    spread = ours['ratio/token/max'] - 1, theirs['ratio/token/max'] - 1
    assert spread[0] < spread[1]


def _signal(patch, workdir, steps_ahead):
  """Cuts the run in a collection in the background, its turns to come."""
  begin, threads = engine_lib.Engine.begin, []

  def signalled(self, *args, **options):
    begin(self, *args, **options)
    if not options['greedy']:
      threads.append(threading.current_thread())
      if len(threads) == 3 + steps_ahead:
        os.kill(os.getpid(), signal.SIGTERM)

  patch.setattr(engine_lib.Engine, 'begin', signalled)
  assert _train(workdir, steps_ahead) == 75
  assert len(threads) == 3 + steps_ahead
  assert threading.main_thread() not in threads


def _outage(patch, workdir, steps_ahead):
  """Cuts the run where the third step from here is wanted."""
  method, threads = collect.Collector.collect, []

  def unreachable(self, *args, greedy=False):
    if not greedy:
      threads.append(threading.current_thread())
      if len(threads) == 3:
        raise protocol.RetrieverUnreachable('not ready within 60 s')
    return method(self, *args, greedy=greedy)

  patch.setattr(collect.Collector, 'collect', unreachable)
  assert _train(workdir, steps_ahead) == 75
  # What comes after it is not asked for.
  assert len(threads) == 3 and threading.main_thread() not in threads


def _crash(patch, workdir, steps_ahead):
  """Cuts the run in the second update from here."""
  update, calls = learner_lib.Learner.update_epochs, []

  def crashed(*args):
    calls.append(args)
    if len(calls) == 2:
      raise RuntimeError('a bug, or a power cut')
    return update(*args)

  patch.setattr(learner_lib.Learner, 'update_epochs', crashed)
  assert _train(workdir, steps_ahead) == 70


@pytest.mark.parametrize(
  'steps_ahead', [1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_cut_again_and_again_it_is_the_same_run(
  finished, tmp_path, monkeypatch, capsys, steps_ahead
):
  steps = []
  for cut in (_signal, _outage, _crash):
    with monkeypatch.context() as patch:
      cut(patch, tmp_path, steps_ahead)
    assert not any(t.name.startswith('collect') for t in threading.enumerate())
    steps.append(_saved_step(tmp_path))
  told = capsys.readouterr()
  # The third step was being learned from, or about to be.
  first = steps[0]
  assert first in (2, 3) and steps == [first, first + 2, first + 3]
  assert f'interrupted after step {first}, saved' in told.out
  assert told.err.startswith('not ready within 60 s\nTraceback')
  assert 'a power cut' in told.err
  assert _train(tmp_path, steps_ahead) == 0
  _assert_same_run(tmp_path, finished(steps_ahead), steps_ahead)


@pytest.mark.slow
@pytest.mark.parametrize('steps_ahead', [1, 2])
def test_killed_it_is_the_same_run(
  finished, tmp_path, monkeypatch, steps_ahead
):
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
  for kill in range(3):
    process = runs.start('train', *_flags(steps_ahead), f'--workdir={tmp_path}')
    try:
      for line in process.stdout:
        if line.startswith('step '):
          break
      time.sleep(random.Random(kill).uniform(0.0, 0.5))
    finally:
      process.kill()
      process.communicate()
    assert process.returncode in (0, -signal.SIGKILL)
  assert _train(tmp_path, steps_ahead) == 0
  _assert_same_run(tmp_path, finished(steps_ahead), steps_ahead)


def test_evaluations_are_of_the_policy_of_now_and_alone(tmp_path, monkeypatch):
  playing, together, evaluated = set(), [], []
  method, run = collect.Collector.collect, evaluation.Evaluator.run

  def counted(self, *args, **options):
    playing.add(self)
    together.append(len(playing))
    if threading.current_thread() is not threading.main_thread():
      time.sleep(0.5)  # longer than what comes before an evaluation
    try:
      return method(self, *args, **options)
    finally:
      playing.remove(self)

  def seen(self, params, **options):
    evaluated.append(jax.device_get(params))
    return run(self, params, **options)

  monkeypatch.setattr(collect.Collector, 'collect', counted)
  monkeypatch.setattr(evaluation.Evaluator, 'run', seen)
  assert _train(tmp_path, num_steps=3, evaluate__every=1) == 0
  assert together == [1] * (3 + 4)
  _, state = _newest(tmp_path, 1)
  for behind, params in enumerate([state.policy.params, *state.published]):
    jax.tree.map(np.testing.assert_array_equal, evaluated[3 - behind], params)
  assert _moved(state.policy.params, state.published[0]) > 1e-6


def _moved(before, after):
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  return max(np.abs(a - b).max() for a, b in pairs)


def test_an_engine_of_other_weights_ends_the_run_before_an_update(
  tmp_path, monkeypatch, capsys
):
  publish = engine_lib.Engine.publish

  def other(self, params, version):
    publish(self, jax.tree.map(lambda x: 1.01 * x, params), version)

  monkeypatch.setattr(engine_lib.Engine, 'publish', other)
  _before_call(monkeypatch, learner_lib.Learner, 'update_epochs', pytest.fail)
  assert _train(tmp_path, evaluate__every=0) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert 'do not compute the same policy' in line
  assert not [*(tmp_path / 'checkpoints').iterdir()]
