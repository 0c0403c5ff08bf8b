"""Runs whose dialogues get newer weights between their turns."""

import asyncio
import contextlib
import signal

import jax
import pytest

from stppo_jax.envs import environments
from stppo_jax.sampling import engine as engine_lib
from tests.training import faults
from tests.training import runs

_STEPS, _ROWS = 4, 16
_CHANGES = {
  'num_steps': _STEPS,
  'evaluate__every': 0,
  'rollout__slots': 8,
  'writer__trajectories': _ROWS,
  # So large that every policy has other log-probabilities.
  'policy_optimizer__learning_rate': 0.02,
  'policy_optimizer__warmup_updates': 0,
}
_ALL = jax.devices()


@contextlib.contextmanager
def _answers_wait_for_weights(count):
  """Lets the first turns of a step be answered once there are newer weights.

  These are the weights after `count` of the steps before it have been learned
  from, so that the later turns are of other versions.
  """
  newest, begun = [0], []
  base = environments.find('search')
  swap = engine_lib.Engine.swap_weights

  def swapped(engine, weights, version):
    swap(engine, weights, version)
    newest[0] = version

  class Environment(base):
    def episode(self, question):
      begun.append(question.id)
      return super().episode(question)

    async def step(self, question, turn_index, text):
      if not turn_index:
        step = begun.index(question.id) // _ROWS
        while newest[0] < min(step, count):
          await asyncio.sleep(0.001)
      return await super().step(question, turn_index, text)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, 'devices', lambda: _ALL[:1])
    patch.setitem(environments.ENVIRONMENTS, 'search', Environment)
    patch.setattr(engine_lib.Engine, 'swap_weights', swapped)
    yield


def _train(workdir, turn_swaps, **changes):
  changes = _CHANGES | {'rollout__turn_swaps': turn_swaps} | changes
  with _answers_wait_for_weights(_STEPS):
    assert runs.train(workdir, **changes) == 0
  return runs.metrics(workdir)[-_STEPS:]


@pytest.mark.slow
def test_each_turn_is_trained_as_one_of_the_policy_that_wrote_it(tmp_path):
  lines = {}
  for name in ('keep', 'recompute'):
    lines[name] = _train(tmp_path / name, name, rollout__steps_ahead=1)
    assert [x['rollout/staleness_max'] for x in lines[name]] == [0.0, 1, 1, 1]
    for line in lines[name][1:]:
      # The first turns are one step old, the later ones are not.
      assert 0 < line['rollout/staleness'] < 1 < line['rollout/versions'] <= 2
      assert line['mismatch/after_swap/share'] > 0
      assert line['staleness/logprob_abs_diff'] > 1e-3
  for kept, recomputed in zip(lines['keep'][1:], lines['recompute'][1:]):
    # Engine and trainer agree on the policy of each turn, and differ where old
    # keys and values were kept, which is what the metric is for.
    assert recomputed['mismatch/logprob_abs_diff'] < 1e-5
    gap = kept['mismatch/after_swap/logprob_abs_diff']
    assert gap == kept['mismatch/logprob_abs_diff'] > 1e-4
  # Every step is trained on its own dialogues, whatever came first.
  with _answers_wait_for_weights(0):
    assert runs.train(tmp_path / 'never', **_CHANGES) == 0
  for step in range(1, _STEPS + 1):
    asked = [
      [record['id'] for record in runs.trajectories(tmp_path / name, step)]
      for name in ('never', 'keep', 'recompute')
    ]
    assert asked[0] == asked[1] == asked[2] and len(set(asked[0])) == _ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
  ('act', 'code'),
  [
    (None, 0),
    (faults.crash_at(('updated', 3)), 70),
    (faults.send_at(('updated', 2), signal.SIGTERM), 75),
  ],
)
def test_a_run_is_repeated_bit_for_bit_from_its_record(tmp_path, act, code):
  changes = _CHANGES | {
    'rollout__turn_swaps': 'keep',
    'rollout__steps_ahead': 2,
  }
  with _answers_wait_for_weights(1):
    assert runs.train(tmp_path / 'first', **changes) == 0
  lines = runs.metrics(tmp_path / 'first')
  assert any(line.get('rollout/versions', 0) > 1 for line in lines)
  assert max(line.get('rollout/staleness_max', 0) for line in lines) <= 2
  again = tmp_path / 'again'
  changes['rollout__replay_order'] = tmp_path / 'first'
  # Nothing is late this time.
  with _answers_wait_for_weights(0):
    if act is not None:
      assert runs.train(again, act, **changes) == code
    assert runs.train(again, **changes) == 0
  runs.assert_same_files(again, tmp_path / 'first', num_steps=_STEPS)


@pytest.mark.parametrize('damaged', [False, True])
def test_what_is_not_recorded_is_not_repeated(damaged, tmp_path, capsys):
  file = tmp_path / 'versions-000002.json'
  if damaged:  # a later step than the first
    file.write_text('[[')
  changes = {
    'rollout__turn_swaps': 'keep',
    'rollout__steps_ahead': 1,
    'rollout__replay_order': tmp_path,
  }
  with _answers_wait_for_weights(0):
    assert runs.train(tmp_path / 'run', **changes) == 2
  (line,) = capsys.readouterr().err.splitlines()
  no_run = f'rollout.replay_order={tmp_path}: no run with'
  assert line.startswith(f'{file}: no JSON' if damaged else no_run)


def test_devices_that_learn_and_collect_in_turn_are_refused(tmp_path, capsys):
  changes = {'rollout__turn_swaps': 'keep', 'rollout__steps_ahead': 1}
  assert len(_ALL) > 1
  assert runs.train(tmp_path, **changes) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("rollout.turn_swaps=keep: must be 'never', because")
