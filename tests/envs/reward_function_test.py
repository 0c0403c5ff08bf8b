"""Functions of users are found, checked and called."""

import textwrap

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import reward_function

_QUESTION = types.Question('q1', 'who?', ('x',), 'nq')


def _module(folder, monkeypatch, name, text):
  (folder / f'{name}.py').write_text(textwrap.dedent(text), encoding='utf-8')
  monkeypatch.syspath_prepend(folder)


def test_a_function_of_the_current_folder_is_called(tmp_path, monkeypatch):
  _module(
    tmp_path,
    monkeypatch,
    'rewards_of_a_user',
    """
    import numpy as np

    def brief(question, texts, scores):
      assert question.golden_answers == ('x',)
      return np.float32(scores['em'] / len(texts))
    """,
  )
  function = reward_function.load('rewards_of_a_user:brief')
  value = function(_QUESTION, ['a', 'b'], {'em': 1.0})
  assert value == 0.5 and isinstance(value, float)


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('brief', 'must be module:function'),
    ('math:', 'must be module:function'),
    ('absent_module:brief', "No module named 'absent_module'"),
    ('broken_rewards:brief', r'NameError: .*broken_rewards\.py:2\)'),
    ('some_rewards:breif', 'has no function breif; it has brief'),
    ('some_rewards:WEIGHT', 'has no function WEIGHT'),
    ('some_rewards:two', 'must take the arguments question, texts, scores: '),
  ],
)
def test_what_is_no_reward_function_is_refused(
  tmp_path, monkeypatch, name, message
):
  some = """
    WEIGHT = 2.0
    def two(question, texts): return 2.0
    def brief(question, texts, scores): return 1.0
    """
  _module(tmp_path, monkeypatch, 'some_rewards', some)
  _module(tmp_path, monkeypatch, 'broken_rewards', '\nx = missing\n')
  with pytest.raises(ValueError, match=message) as error:
    reward_function.load(name)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('value', [np.nan, float('inf'), None, '1', [1.0]])
def test_what_is_no_finite_number_is_refused(tmp_path, monkeypatch, value):
  _module(
    tmp_path,
    monkeypatch,
    'rewards_that_return_texts',
    'def reward(question, texts, scores): return texts',
  )
  function = reward_function.load('rewards_that_return_texts:reward')
  with pytest.raises(reward_function.RewardFunctionFailed, match="'q1', exp"):
    function(_QUESTION, value, {})


def test_an_error_of_the_function_names_its_line(tmp_path, monkeypatch):
  _module(
    tmp_path,
    monkeypatch,
    'rewards_that_fail',
    """
    def reward(question, texts, scores):
      return scores['missing']
    """,
  )
  function = reward_function.load('rewards_that_fail:reward')
  with pytest.raises(
    reward_function.RewardFunctionFailed,
    match=r"'q1' with KeyError: 'missing' \(.*rewards_that_fail\.py:3\)",
  ):
    function(_QUESTION, [''], {})
