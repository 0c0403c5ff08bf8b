"""Functions of users are found, checked and called."""

import sys
import textwrap

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import reward_function

_QUESTION = types.Question('q1', 'who?', ('x',), 'nq')


_MODULES = {
  'rewards_of_a_user': """
    import numpy as np
    WEIGHT = 2.0

    def two(question, texts): return 2.0

    def same(question, texts, scores): return texts

    def brief(question, texts, scores):
      assert question.golden_answers == ('x',)
      return np.float32(scores['em'] / len(texts))
    """,
  'broken_rewards': '\nx = missing\n',
}


@pytest.fixture(autouse=True)
def _modules(tmp_path, monkeypatch):
  """The modules lie in a folder that is searched."""
  for name, text in _MODULES.items():
    path = tmp_path / f'{name}.py'
    path.write_text(textwrap.dedent(text), encoding='utf-8')
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.syspath_prepend(tmp_path)


def test_a_function_of_the_current_folder_is_called():
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
    ('rewards_of_a_user:breif', 'has no function breif; it has brief'),
    ('rewards_of_a_user:WEIGHT', 'has no function WEIGHT'),
    ('rewards_of_a_user:two', 'must take the arguments question, texts, '),
  ],
)
def test_what_is_no_reward_function_is_refused(name, message):
  with pytest.raises(ValueError, match=message) as error:
    reward_function.load(name)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('value', [np.nan, float('inf'), None, '1', [1.0]])
def test_what_is_no_finite_number_is_refused(value):
  function = reward_function.load('rewards_of_a_user:same')
  with pytest.raises(reward_function.RewardFunctionFailed, match="'q1', exp"):
    function(_QUESTION, value, {})


def test_an_error_of_the_function_names_its_line():
  function = reward_function.load('rewards_of_a_user:brief')
  with pytest.raises(
    reward_function.RewardFunctionFailed,
    match=r"'q1' with KeyError: 'em' \(.*rewards_of_a_user\.py:11\)",
  ):
    function(_QUESTION, [''], {})
