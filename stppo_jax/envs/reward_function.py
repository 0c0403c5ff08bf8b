"""Rewards that a function of the user computes (`env.reward_function`).

    def brief(question, texts, scores):
      return scores['em'] * 0.9 ** len(texts)

`question` is a `types.Question`. `texts` are the policy's turns, without the
observations. `scores` has the scores of the environment, such as 'em'. The
function returns a finite number.
"""

from collections.abc import Callable, Mapping, Sequence
import importlib
import inspect
import math
import traceback

from stppo_jax import exits
from stppo_jax import types
from stppo_jax.envs import protocol

RewardFunction = Callable[
  [types.Question, Sequence[str], Mapping[str, float]], float
]
_ARGUMENTS = ('question', 'texts', 'scores')


class RewardFunctionFailed(exits.RunEnded):
  """Raised if the user's function fails or returns no finite number.

  The message is one line. The run can be resumed after the function is mended.
  """

  exit_code = exits.USAGE


def load(name: str) -> RewardFunction:
  """Returns a function that calls the user's `module:function`.

  The returned function raises `RewardFunctionFailed` and no other exception.

  Raises:
    ValueError: if there is no such function, or it does not take the arguments
      `question`, `texts` and `scores`; the message is one line.
  """
  module_name, colon, function_name = name.partition(':')
  if not (module_name and colon and function_name.isidentifier()):
    raise ValueError('must be module:function, such as my_rewards:brief')
  importlib.invalidate_caches()
  try:
    # The module is a program of the user, which may raise anything.
    module = importlib.import_module(module_name)
  except Exception as error:
    raise ValueError(f'cannot be imported: {_line(error)}') from error
  function = getattr(module, function_name, None)
  if not inspect.isroutine(function):
    found = sorted(key for key, x in vars(module).items() if callable(x))
    raise ValueError(
      f'{module_name} has no function {function_name}; it has '
      + (', '.join(found) or 'none')
    )
  try:
    inspect.signature(function).bind(*_ARGUMENTS)
  except TypeError as error:
    raise ValueError(
      f'must take the arguments {", ".join(_ARGUMENTS)}: {error}'
    ) from error

  def reward(question, texts, scores) -> float:
    try:
      value = function(question, texts, scores)
      # `float` would also parse a string, which is not a reward.
      number = float(value) if hasattr(value, '__float__') else math.nan
    except Exception as error:
      raise RewardFunctionFailed(
        f'env.reward_function={name}: fails on question {question.id!r} with '
        f'{_line(error)}'
      ) from error
    if not math.isfinite(number):
      raise RewardFunctionFailed(
        f'env.reward_function={name}: returned {value!r} for question '
        f'{question.id!r}, expected a finite number'
      )
    return number

  return reward


def find(name: str) -> RewardFunction | None:
  """Returns the function that `module:function` names; None for ''."""
  return load(name) if name else None


def try_once(
  name: str, environment: protocol.Environment, question: types.Question
) -> None:
  """Calls a function once with a trajectory of one empty, cut-off turn.

  Args:
    name: the function, as `module:function`; '' for no function.
    environment: the environment that gives the prompt and the scores.
    question: the question of the trajectory.

  Raises:
    RewardFunctionFailed: if the function fails.
  """
  function = find(name)
  if function is not None:
    prompt, texts = environment.prompt(question), ['']
    status = types.TrajectoryStatus.TRUNCATED_LENGTH
    episode = environment.episode(question)
    try:
      _, scores = episode.rewards(question, prompt, texts, status)
    finally:
      episode.close()
    function(question, texts, scores)


def _line(error: Exception) -> str:
  """Returns an error as one line, with the file and line that raised it."""
  frames = traceback.extract_tb(error.__traceback__)
  # If an import finds no module, the last frame is in Python's own code. Its
  # file and line tell the user nothing.
  where = ''
  if frames and not isinstance(error, ImportError):
    where = f' ({frames[-1].filename}:{frames[-1].lineno})'
  return f'{type(error).__name__}: {" ".join(str(error).split())}{where}'
