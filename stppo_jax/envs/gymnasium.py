"""An adapter for text environments with the interface of Gymnasium.

    def make():
      return MyGame()

A function of the user, named in the config as `module:function`, makes an
environment. It has the methods `reset(seed=...)`, which returns a text and a
dict, and `step(text)`, which returns a text, a reward, whether the episode has
terminated, whether it was truncated, and a dict. The package `gymnasium` is not
needed, and what it makes fits.
"""

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence
import importlib
import math
from typing import Any
from typing import Self

from stppo_jax import types
from stppo_jax.envs import commands
from stppo_jax.envs import neutralisation
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.retrieval import protocol as retrieval

Status = types.TrajectoryStatus

BUILT_IN = f"""\
You act in an environment of text. {commands.RULES}
{prompts.PLACEHOLDER}
"""


class GymnasiumEnvironment(protocol.Environment):
  """Acts at most `max_turns` + 1 times in an environment of the user.

  A question's id is the seed of its episode. The score `return` is the sum of
  the environment's rewards, each of which is the reward of its turn.

  Args:
    make: makes an environment.
    max_turns: the number of actions that get an observation.
    prompt_template: a file with `{question}`, which becomes the first
      observation; '' for the built-in prompt.

  Raises:
    ValueError: if the file cannot be used.
  """

  stop_strings = commands.STOP_STRINGS
  tags = commands.TAGS
  main_score = 'return'
  needs_retriever = False

  def __init__(self, *, make: Any, max_turns: int, prompt_template: str):
    self._make = make
    self._max_turns = max_turns
    self._template = BUILT_IN
    if prompt_template:
      self._template = prompts.load_template(prompt_template)

  @classmethod
  def from_options(
    cls, options: Mapping[str, Any], retriever: retrieval.Retriever | None
  ) -> Self:
    """See `protocol.Environment`."""
    del retriever
    return cls(
      make=load(options['gymnasium']['make']),
      max_turns=options['max_turns'],
      prompt_template=options['prompt_template'],
    )

  @staticmethod
  def phrases(vocabulary: Sequence[str]) -> list[str]:
    """Returns the tags and the vocabulary."""
    return [*commands.TAGS, *vocabulary, commands.CORRECTION]

  @staticmethod
  def statistics(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
    """Returns no metrics."""
    del trajectories
    return {}

  def episode(self, question: types.Question) -> '_Episode':
    """Returns the environment of one trajectory."""
    made, _ = self._begin(question)
    return _Episode(made, self._max_turns)

  def prompt(self, question: types.Question) -> str:
    """Returns the prompt with the first observation."""
    made, text = self._begin(question)
    _close(made)
    text = neutralisation.neutralise_tags(text)
    return self._template.replace(prompts.PLACEHOLDER, text)

  def _begin(self, question: types.Question) -> tuple[Any, str]:
    """Returns an environment at its beginning, and the first observation."""
    made = self._make()
    text, _ = made.reset(seed=int(question.id))
    return made, str(text)


class _Episode(protocol.Episode):
  """The environment of one trajectory."""

  def __init__(self, made: Any, max_turns: int):
    self._made = made
    self._max_turns = max_turns
    self._return = 0.0

  async def step(self, question, turn_index, text):
    """See `protocol.Episode`."""
    del question
    command, reward, ended = commands.parse(text), 0.0, False
    if command is None:
      kind, news = protocol.INVALID, commands.correction()
    else:
      kind = 'command'
      # Beside the event loop, so that a slow one does not stop the others.
      answer = await asyncio.to_thread(self._made.step, command)
      seen, reward, terminated, truncated, _ = answer
      reward = float(reward)
      if not math.isfinite(reward):
        raise ValueError(f'the reward of {command!r} is {reward}')
      self._return += reward
      ended = terminated or truncated
      news = commands.observation(neutralisation.neutralise_tags(str(seen)))
    if ended:
      return protocol.Step(kind, None, Status.COMPLETED, reward)
    if turn_index >= self._max_turns:
      return protocol.Step(kind, None, Status.TRUNCATED_TURNS, reward)
    return protocol.Step(kind, news, None, reward)

  def rewards(self, question, prompt, texts, status):
    """See `protocol.Episode`; each turn has its reward already."""
    del question, prompt, texts
    _close(self._made)
    failed = status is Status.INFRA_ERROR
    return {}, {'return': 0.0 if failed else self._return}


def load(name: str) -> Any:
  """Returns the function `module:function` that makes an environment.

  Raises:
    ValueError: there is none; one line.
  """
  module, _, function = name.partition(':')
  try:
    found = getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      f'env.gymnasium.make={name!r}: must be module:function, a function that '
      f'makes an environment: {error}'
    ) from error
  return found


def _close(made: Any) -> None:
  """Closes an environment that can be closed."""
  if hasattr(made, 'close'):
    made.close()
