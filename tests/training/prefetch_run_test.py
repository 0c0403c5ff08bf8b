"""Runs that collect ahead, and their interruptions.

They use one device, where steps are collected on another thread.
"""

import contextlib
import functools
import json
import os
import signal
import threading

import jax
import pytest

from stppo_jax import __main__
from stppo_jax.retrieval import protocol
from tests.training import faults
from tests.training import runs

_STEPS = 5
_ALL = jax.devices()


@contextlib.contextmanager
def _devices(*places):
  """Lets jax have only these of the devices of tests."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, 'devices', lambda: [_ALL[place] for place in places])
    yield


@pytest.fixture(autouse=True, scope='module')
def one_device():
  """Makes runs use one device of those that tests have."""
  with _devices(0):
    yield


def _changes(steps_ahead, changes):
  return {
    'num_steps': _STEPS,
    'rollout__steps_ahead': steps_ahead,
    'evaluate__every': 4,
    **changes,
  }


def _train(workdir, steps_ahead=1, act=lambda moment: None, **changes):
  return runs.train(workdir, act, **_changes(steps_ahead, changes))


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """Returns a function from steps ahead to the folder of a finished run."""

  @functools.cache
  def make(steps_ahead):
    workdir = tmp_path_factory.mktemp(f'ahead{steps_ahead}')
    assert _train(workdir, steps_ahead) == 0
    return workdir

  return make


def _saved_step(workdir):
  return max(int(path.name) for path in (workdir / 'checkpoints').iterdir())


def _assert_same_run(workdir, expected, steps_ahead=1):
  runs.assert_same_files(workdir, expected, num_steps=_STEPS)
  leaves = runs.leaves(workdir, _STEPS)
  count = lambda start: sum(name.startswith(start) for name in leaves)
  assert count('published.') == steps_ahead * count('policy.params.') > 0


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

  # The first one learns.
  changes = {'mesh__collect_fraction': 0.5, 'evaluate__every': 0}
  with _devices(0, -1):
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
def test_evaluations_use_the_present_policy_and_run_alone(tmp_path):
  moments, updates = [], [threading.Event() for _ in range(4)]

  def act(moment):
    kind, count = moment
    moments.append(kind)
    if kind == 'updated':
      updates[count].set()
    if kind == 'collect' and count > 1:
      # Longer than the work before an evaluation.
      assert updates[count - 1].wait(60.0)
    if moment == ('updated', 3):
      raise faults.Crash

  changes = {
    'num_steps': 3,
    'evaluate__every': 1,
    'writer__evaluation': 16,
    'checkpoint__keep': 2,
    # So large that every policy gives other answers.
    'policy_optimizer__learning_rate': 0.05,
    'policy_optimizer__warmup_updates': 0,
  }
  run = tmp_path / 'run'
  assert _train(run, act=act, **changes) == 70
  collections = [kind for kind in moments if kind != 'updated']
  assert collections[::2].count('evaluate') == 3
  assert collections[::2].count('collect') == 3
  ended = {'evaluate': 'evaluated', 'collect': 'collected'}
  assert collections[1::2] == [ended[kind] for kind in collections[::2]]
  answers = [_texts(run / f'evaluation-{step:06d}.jsonl') for step in (1, 2)]
  assert answers[0] != answers[1]
  # The newest checkpoint has the policy that the last evaluation used.
  flags = [f'--checkpoint={run}', f'--out={tmp_path}/answers']
  assert __main__.main(['evaluate', *flags]) == 0
  assert _texts(tmp_path / 'answers' / 'dialogues.jsonl') == answers[1]


def _texts(path):
  """Returns question to texts of the policy in a file of dialogues."""
  records = map(json.loads, path.read_text('utf-8').splitlines())
  return {
    record['question']: [turn['text'] for turn in record['turns']]
    for record in records
  }


@pytest.mark.slow
def test_an_engine_of_another_policy_ends_the_run_before_an_update(
  tmp_path, capsys
):
  def act(moment):
    assert moment[0] != 'updated'

  # It reads rounded keys and values, so its policy is another one.
  changes = {'rollout__cache_dtype': 'int8', 'evaluate__every': 0}
  assert _train(tmp_path, act=act, **changes) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert 'mismatch/logprob_abs_diff_mean' in line
  assert not [*(tmp_path / 'checkpoints').iterdir()]
