"""Runs that collect ahead: their staleness, and their interruptions.

They use one device, where steps are collected on another thread.
"""

import functools
import os
import signal
import threading

import jax
import numpy as np
import pytest

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.retrieval import protocol
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.training import prefetch
from stppo_jax.training.building import assembly
from stppo_jax.training.evaluating import evaluation
from tests.training import faults
from tests.training import runs

_STEPS = 5
# Orbax reads the leaves concurrently; see checkpoint_test.py.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture(autouse=True, scope='module')
def one_device():
  """Makes runs use one device of those that tests have."""

  def build_mesh(config):
    return mesh_lib.make_mesh(
      data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]
    )

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(assembly, 'build_mesh', build_mesh)
    yield


def _changes(steps_ahead, changes):
  return {
    'num_steps': _STEPS,
    'rollout__steps_ahead': steps_ahead,
    'evaluate__every': 4,
    **changes,
  }


def _train(workdir, steps_ahead=1, act=lambda moment: None, **changes):
  """Trains; `act` is called at the moments of the run."""
  changes = _changes(steps_ahead, changes)
  with faults.at(runs.config(**changes), act):
    return runs.train(workdir, **changes)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """Returns a function from steps ahead to the folder of a finished run."""

  @functools.cache
  def make(steps_ahead):
    workdir = tmp_path_factory.mktemp(f'ahead{steps_ahead}')
    assert _train(workdir, steps_ahead) == 0
    return workdir

  return make


def _newest(workdir, steps_ahead):
  """Returns step and leaves of the newest checkpoint, as numpy arrays."""
  learner = runs.learner(runs.config(rollout__steps_ahead=steps_ahead))
  saved = checkpoint.Checkpointer(workdir, read_only=True)
  found = saved.restore_latest(learner.abstract_state(learner.start()))
  saved.close()
  step, state, _ = found
  return step, jax.device_get(state)


def _saved_step(workdir):
  return max(int(path.name) for path in (workdir / 'checkpoints').iterdir())


def _assert_same_run(workdir, expected, steps_ahead=1):
  """Asserts equal states, metrics and dialogues, bit for bit."""
  runs.assert_same_files(workdir, expected, num_steps=_STEPS)
  (step, ours), (_, theirs) = (
    _newest(folder, steps_ahead) for folder in (workdir, expected)
  )
  assert step == _STEPS and len(ours.published) == steps_ahead
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_staleness_is_the_number_of_steps_ahead(finished):
  lines = runs.metrics(finished(1))[1:]
  assert [line['rollout/staleness'] for line in lines] == [0.0] + [1.0] * 4
  # Engine and trainer are compared at the weights that sampled.
  assert max(line['mismatch/logprob_abs_diff'] for line in lines) < 1e-4
  assert all(line['timing_s/collect'] > 0 for line in lines)
  assert all(line['mismatch/truncation'] == 0 for line in lines)
  # The first minibatch is away from them already: the policy has moved.
  assert all(line['ratio/token/max'] > 1 + 1e-5 for line in lines[1:])


@pytest.mark.slow
def test_a_device_that_only_collects_makes_the_same_run(finished, tmp_path):
  """One device learns and another one collects, at the same time."""
  updated, threads = threading.Event(), set()

  def act(moment):
    if moment == ('collect', 2):
      threads.add(threading.current_thread().name[:13])
      # The update of the first step does not wait for this collection.
      assert updated.wait(60.0)
    if moment == ('updated', 1):
      updated.set()

  # Of the eight devices of tests the first one learns, and the last collects.
  changes = {'mesh__collect_fraction': 0.125, 'evaluate__every': 0}
  assert _train(tmp_path, act=act, num_steps=2, **changes) == 0
  assert threads == {'collect-ahead'}
  for step in (1, 2):
    ours, theirs = (
      runs.trajectories(folder, step) for folder in (tmp_path, finished(1))
    )
    assert ours == theirs
  pairs = zip(runs.repeated(tmp_path), runs.repeated(finished(1))[1:])
  for ours, theirs in pairs:
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.slow
def test_in_between_it_is_the_same_run_as_in_the_background(
  finished, tmp_path, monkeypatch
):
  collector, threads = prefetch.Prefetcher, set()

  def in_between(*functions, loop, **options):
    assert loop is not None
    return collector(*functions, loop=None, **options)

  def act(moment):
    threads.add(threading.current_thread())

  monkeypatch.setattr(prefetch, 'Prefetcher', in_between)
  assert _train(tmp_path, act=act, num_steps=3) == 0
  assert threads == {threading.main_thread()}
  # Up to the last step, which is evaluated here.
  assert runs.repeated(tmp_path)[:3] == runs.repeated(finished(1))[:3]
  for step in (1, 2, 3):
    ours, theirs = (
      runs.trajectories(folder, step) for folder in (tmp_path, finished(1))
    )
    assert ours == theirs


@pytest.mark.slow
def test_the_ratio_can_be_of_the_current_policy(finished, tmp_path):
  # A correction must read k, which holds the staleness. This one rejects
  # nothing, so the loss is the same.
  changes = {
    'updates__old_policy': 'current',
    'algorithm__correction__names': ('clipping_bias', 'geo_rs'),
    'algorithm__correction__geo_rs__band': 100.0,
  }
  assert _train(tmp_path, num_steps=3, **changes) == 0
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


@pytest.mark.slow
@pytest.mark.parametrize('steps_ahead', [1, 2])
def test_a_run_interrupted_often_is_the_same_run(
  finished, tmp_path, capsys, steps_ahead
):
  threads = set()

  def signalled(moment):
    """Sends a signal when another collection begins in the background."""
    if moment == ('collect', 2 + steps_ahead):
      threads.add(threading.current_thread())
      os.kill(os.getpid(), signal.SIGTERM)

  def unreachable(moment):
    if moment[0] == 'collect':
      # Nothing is collected after a collection that failed.
      assert moment[1] <= 2
      threads.add(threading.current_thread())
    if moment == ('collect', 2):
      raise protocol.RetrieverUnreachable('not ready within 60 s')

  steps = []
  for act, code in (
    (signalled, 75),
    (unreachable, 75),
    (faults.crash_at(('updated', 2)), 70),
  ):
    assert _train(tmp_path, steps_ahead, act) == code
    assert not any(t.name.startswith('collect') for t in threading.enumerate())
    steps.append(_saved_step(tmp_path))
  assert threads and threading.main_thread() not in threads
  printed = capsys.readouterr()
  # The second step was being learned from, or about to be.
  first = steps[0]
  assert first in (1, 2) and steps == [first, first + 1, first + 2]
  assert f'interrupted after step {first}, saved' in printed.out
  assert 'not ready within 60 s\na bug, or a power cut' in printed.err
  assert _train(tmp_path, steps_ahead) == 0
  _assert_same_run(tmp_path, finished(steps_ahead), steps_ahead)


@pytest.mark.slow
@pytest.mark.parametrize('steps_ahead', [1, 2])
def test_a_killed_run_resumes_as_the_same_run(
  finished, tmp_path, monkeypatch, steps_ahead
):
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
  flags = runs.flags(**_changes(steps_ahead, {}))
  for kill in range(3):
    process = runs.start('train', *flags, f'--workdir={tmp_path}')
    try:
      for line in process.stdout:
        # Once at the start of a step, once in its middle.
        if line.startswith(f'step {kill}/'):
          break
    finally:
      process.kill()
      process.communicate()
    assert process.returncode == -signal.SIGKILL
  assert _train(tmp_path, steps_ahead) == 0
  _assert_same_run(tmp_path, finished(steps_ahead), steps_ahead)


@pytest.mark.slow
def test_evaluations_use_the_present_policy_and_run_alone(
  tmp_path, monkeypatch
):
  moments, evaluated, updates = [], [], [threading.Event() for _ in range(4)]
  run, publish = evaluation.Evaluator.run, engine_lib.Engine.publish
  published = []

  def act(moment):
    kind, count = moment
    moments.append(kind)
    if kind == 'updated':
      updates[count].set()
    if kind == 'collect' and count > 1:
      # Longer than the work before an evaluation.
      assert updates[count - 1].wait(60.0)

  def kept(self, params, version, **options):
    published.append(jax.device_get(params))
    publish(self, params, version, **options)

  def seen(self, **options):
    evaluated.append(published[-1])
    return run(self, **options)

  monkeypatch.setattr(engine_lib.Engine, 'publish', kept)
  monkeypatch.setattr(evaluation.Evaluator, 'run', seen)
  assert _train(tmp_path, act=act, num_steps=3, evaluate__every=1) == 0
  collections = [kind for kind in moments if kind != 'updated']
  assert collections[::2].count('evaluate') == 4
  assert collections[::2].count('collect') == 3
  ended = {'evaluate': 'evaluated', 'collect': 'collected'}
  assert collections[1::2] == [ended[kind] for kind in collections[::2]]
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

  def other(self, params, version, **options):
    publish(self, jax.tree.map(lambda x: 1.01 * x, params), version, **options)

  def act(moment):
    assert moment[0] != 'updated'

  monkeypatch.setattr(engine_lib.Engine, 'publish', other)
  assert _train(tmp_path, act=act, evaluate__every=0) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert 'do not compute the same policy' in line
  assert not [*(tmp_path / 'checkpoints').iterdir()]
