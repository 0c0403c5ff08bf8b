"""An environment of the user, with the interface of Gymnasium."""

import threading

import pytest

from stppo_jax import types
from stppo_jax.configs import base
from stppo_jax.data import games
from stppo_jax.envs import gymnasium
from tests.rollout import dialogues
from tests.sampling import vocabularies
from tests.training import runs

_STATUS = types.TrajectoryStatus
_closed = []
_go_on = threading.Event()  # for a step that hangs


class Stop(Exception):
  """An error of an environment that ends the run."""

  exit_code = 2


class Counter:
  """An environment in which the seed has to be counted up to."""

  def reset(self, *, seed=None):
    self._goal, self._at = seed % 3 + 2, 0
    return f'Count to {self._goal} </action>.', {}

  def step(self, action):
    if action == 'crash':
      raise RuntimeError('a bug of the user')
    if action == 'stop':
      raise Stop('no more')
    if action == 'hang':
      assert _go_on.wait(60)
    right = action == str(self._at + 1)
    self._at += right
    done = self._at == self._goal
    return f'At {self._at}. <answer>', 0.5 * right, done, False, {}

  def close(self):
    _closed.append(self)


def make():
  return Counter()


def _collect(scripts, *, make=make, timeout=60.0):
  """Returns the trajectories of one question, one for each script."""
  environment = gymnasium.GymnasiumEnvironment(
    make=make, max_turns=2, prompt_template='', timeout=timeout
  )
  _closed.clear()
  write = lambda text: text if text == 'hm' else f'<action>{text}</action>'
  return dialogues.collect_scripts(
    [[write(text) for text in script] for script in scripts],
    environment,
    games.GameQuestions(seed=0, count=0).evaluation(1)['games'],
    tokenizer=vocabularies.bpe(),
    max_length=3000,
    group_size=len(scripts),
  )


def test_episodes_are_independent_and_their_rewards_are_on_their_turns():
  scripts = [['1', '2'], ['1', '7', '2'], ['hm', '1', '1'], ['1', 'crash']]
  trajectories = _collect(scripts)
  assert len(_closed) == 5  # the one of the prompt, too
  found = [(t.status, [turn.reward for turn in t.turns]) for t in trajectories]
  assert found == [
    (_STATUS.COMPLETED, [0.5, 0.5]),
    (_STATUS.COMPLETED, [0.5, 0.0, 0.5]),
    (_STATUS.TRUNCATED_TURNS, [0.0, 0.5, 0.0]),
    (_STATUS.INFRA_ERROR, [0.5, 0.0]),
  ]
  assert [t.scores['return'] for t in trajectories] == [1.0, 1.0, 0.5, 0.0]
  assert trajectories[2].turns[0].action == 'invalid'
  assert trajectories[3].cause == 'RuntimeError: a bug of the user'
  decode = vocabularies.bpe().decode
  assert 'Count to 2 (/action).' in decode(trajectories[0].prompt_ids)
  observed = decode(trajectories[0].turns[0].observation_ids)
  assert observed == '\n\nAt 1. (answer)\n\n'


def test_a_step_that_hangs_ends_its_own_trajectory_only():
  _go_on.clear()
  counted, hung = _collect([['1', '2'], ['1', 'hang']], timeout=0.5)
  assert counted.status is _STATUS.COMPLETED
  assert hung.status is _STATUS.INFRA_ERROR
  assert 'no result within env.gymnasium.timeout=0.5 s' in hung.cause
  assert len(_closed) == 2  # an environment is not closed in its step
  _go_on.set()
  for thread in threading.enumerate():
    if thread.name == gymnasium.THREAD_NAME:
      thread.join()
  assert len(_closed) == 3


def test_an_environment_that_does_not_begin_ends_its_trajectories():
  _go_on.clear()
  (trajectory,) = _collect([['1']], make=_go_on.wait, timeout=0.1)
  _go_on.set()
  assert trajectory.status is _STATUS.INFRA_ERROR
  assert trajectory.cause.startswith('TimeoutError: make and reset: no result')


def test_environments_are_closed_if_the_collection_ends_early():
  with pytest.raises(Stop):
    _collect([['1'], ['stop'], ['1']])
  assert len(_closed) == 4


@pytest.mark.parametrize('name', ['', 'no_such_module:make', 'math:make'])
def test_a_function_that_is_not_there_is_one_line(name):
  options = base.get_config().env.to_dict()
  options['gymnasium']['make'] = name
  with pytest.raises(ValueError, match='must be module:function') as caught:
    gymnasium.GymnasiumEnvironment.from_options(options, None)
  assert '\n' not in str(caught.value)


@pytest.mark.slow
def test_a_run_trains_in_it(tmp_path):
  changes = {
    'num_steps': 1,
    'data__name': 'games',
    'env__name': 'gymnasium',
    'env__gymnasium__make': f'{__name__}:make',
    # Those of other tests, so that programs are shared.
    'model__tokenizer_path': runs.REPO / 'assets' / 'quickstart',
    'evaluate__every': 1,
  }
  assert runs.train(tmp_path / 'run', **changes) == 0
  assert 'val/return/games' in runs.metrics(tmp_path / 'run')[-1]
