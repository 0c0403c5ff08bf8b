"""An adapter for text environments with the interface of Gymnasium.

    def make():
      return MyGame()

A function of the user, named in the config as `module:function`, makes an
environment. The environment has the methods `reset(seed=...)`, which returns a
text and a dict, and `step(text)`, which returns a text, a reward, whether the
episode has terminated, whether it was truncated, and a dict. Environments of
the package `gymnasium` can be used, but the package is not needed.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import importlib
import threading
from typing import Any, Self

from stppo_jax import text as text_lib
from stppo_jax import types
from stppo_jax.envs import game_text
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.retrieval import protocol as retrieval

Status = types.TrajectoryStatus

THREAD_NAME = 'gymnasium'  # the name of threads that call the environments

BUILT_IN = f"""\
You act in an environment of text. {game_text.RULES}
{prompts.PLACEHOLDER}
"""


class GymnasiumEnvironment(protocol.Environment):
  """Lets the policy act up to `max_turns` + 1 times in a user's environment.

  A question's id is the seed of its episode. The reward of a turn is the reward
  that the user's environment gives for the command of the turn. The score
  `return` is the sum of these rewards.

  Args:
    make: the user's function that makes an environment.
    max_turns: the number of actions that get an observation.
    prompt_template: a file in which `{question}` is replaced by the first
      observation; '' for the built-in prompt.
    timeout: the seconds that `make` and `reset` may take together, and the
      seconds that a call of `step` may take.

  Raises:
    ValueError: if the file of the prompt cannot be used.
  """

  stop_strings = game_text.STOP_STRINGS
  tags = game_text.TAGS
  main_score = 'return'

  def __init__(
    self, *, make: Any, max_turns: int, prompt_template: str, timeout: float
  ):
    self._make = make
    self._timeout = timeout
    self._max_turns = max_turns
    self._template = prompts.load_template(prompt_template, BUILT_IN)

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
      timeout=options['gymnasium']['timeout'],
    )

  @staticmethod
  def phrases(vocabulary: Sequence[str]) -> list[str]:
    """See `protocol.Environment`.

    The strings are tags, `vocabulary` and the correction.
    """
    return [*game_text.TAGS, *vocabulary, game_text.CORRECTION]

  def episode(self, question: types.Question) -> '_Episode':
    """Returns the episode of one trajectory, in an environment of its own."""
    made, _ = self._begin(question)
    return _Episode(made, self._max_turns, self._timeout)

  def prompt(self, question: types.Question) -> str:
    """Returns the prompt with the first observation."""
    # The trajectories of a group share a prompt, but each trajectory acts in an
    # environment of its own, which `episode` makes. The environment made here
    # only gives the first observation, which is the same for all of them.
    made, text = self._begin(question)
    _close(made)
    text = text_lib.neutralise_tags(text)
    return self._template.replace(prompts.PLACEHOLDER, text)

  def _begin(self, question: types.Question) -> tuple[Any, str]:
    """Returns a new environment and its first observation.

    Raises:
      TimeoutError: if the environment does not start in time; the message is
        one line.
    """

    def begin() -> tuple[Any, str]:
      made = self._make()
      text, _ = made.reset(seed=int(question.id))
      return made, str(text)

    begun = _start(begin)
    try:
      return begun.result(self._timeout)
    except TimeoutError:
      # A TimeoutError that the user's code raised is passed on unchanged.
      if begun.done() and begun.exception():
        raise
      begun.add_done_callback(_close_late)
      raise TimeoutError(_too_long('make and reset', self._timeout)) from None


class _Episode(protocol.Episode):
  """The episode of one trajectory, in an environment of its own."""

  def __init__(self, made: Any, max_turns: int, timeout: float):
    self._made = made
    self._max_turns = max_turns
    self._timeout = timeout
    self._return = 0.0
    self._last: futures.Future | None = None  # the last call of `step`

  async def step(self, question, turn_index, text):
    """See `protocol.Episode`."""
    del question
    command, reward, ended = game_text.parse(text), 0.0, False
    if command is None:
      kind, news = protocol.INVALID, game_text.correction()
    else:
      kind = 'command'
      seen, reward, terminated, truncated, _ = await self._act(command)
      reward = float(reward)
      protocol.check_reward(f'of {command!r}', reward)
      self._return += reward
      ended = terminated or truncated
      news = game_text.observation(text_lib.neutralise_tags(str(seen)))
    if ended:
      return protocol.Step(kind, None, Status.COMPLETED, reward)
    if turn_index >= self._max_turns:
      return protocol.Step(kind, None, Status.TRUNCATED_TURNS, reward)
    return protocol.Step(kind, news, None, reward)

  def rewards(self, question, prompt, texts, status):
    """See `protocol.Episode`; only turns have rewards, the outcome has none."""
    del question, prompt, texts
    failed = status is Status.INFRA_ERROR
    return {}, {'return': 0.0 if failed else self._return}

  def close(self) -> None:
    """Closes the environment, now or as soon as its running step has ended."""
    if self._last is None:
      _close(self._made)
    else:
      self._last.add_done_callback(lambda _: _close(self._made))

  async def _act(self, command: str) -> tuple:
    """Calls `step` of the environment and returns the result.

    Raises:
      TimeoutError: if the step takes too long; the message is one line.
    """
    # A thread runs the step, so that a slow step does not block the event loop.
    self._last = _start(lambda: self._made.step(command))
    try:
      return await asyncio.wait_for(
        asyncio.wrap_future(self._last), self._timeout
      )
    except TimeoutError:
      # A TimeoutError that the user's code raised is passed on unchanged.
      if self._last.done() and self._last.exception():
        raise
      raise TimeoutError(_too_long('step', self._timeout)) from None


def load(name: str) -> Any:
  """Returns the function `module:function` that makes an environment.

  Raises:
    ValueError: if there is no such function; the message is one line.
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


def _start(call: Callable[[], Any]) -> futures.Future:
  """Starts a call on a new thread, and returns the future of its result.

  There is no pool of threads, because calls that never return would use up the
  threads of a pool, and the process would wait for these threads when it ends.
  """
  future: futures.Future = futures.Future()
  # A future that is running cannot be cancelled, so `run` can always set its
  # result.
  future.set_running_or_notify_cancel()

  def run() -> None:
    try:
      future.set_result(call())
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
  return future


def _too_long(method: str, timeout: float) -> str:
  return f'{method}: no result within env.gymnasium.timeout={timeout:g} s'


def _close_late(begun: futures.Future) -> None:
  """Closes an environment whose start took so long that the caller gave up."""
  if begun.exception() is None:
    made, _ = begun.result()
    _close(made)


def _close(made: Any) -> None:
  """Closes an environment if it has the method `close`."""
  if hasattr(made, 'close'):
    made.close()
