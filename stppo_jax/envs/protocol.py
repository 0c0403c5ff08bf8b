"""The protocol of an environment, which speaks text and never sees token ids.

The collector samples a turn, decodes it for `step`, tokenises the observation
apart from the turn, and appends it. `rewards` scores the trajectory at its end.
Everything else that a run needs, such as where a turn ends and which score to
report, is a class attribute. So an environment is one class in one file and one
line of `environments.ENVIRONMENTS`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Protocol, Self

from stppo_jax import types
from stppo_jax.retrieval import protocol as retrieval

# The action of a turn without a valid action, and that of a turn which answers.
# An environment is free to choose the names of its other actions.
INVALID = types.INVALID
ANSWER = 'answer'
_LARGEST_REWARD = 3.4e38  # training stores rewards as float32


@dataclasses.dataclass(frozen=True)
class Observation:
  """The environment's answer to a turn.

  Only `body` is cut where `max_observation_tokens` requires it, so a closing
  tag in `suffix` is always there.

  Attributes:
    prefix: the environment's own words; its tags may become added tokens of the
      tokenizer.
    body: untrusted text, which never becomes an added token.
    suffix: the environment's own words after the body.
  """

  prefix: str
  body: str
  suffix: str

  @property
  def text(self) -> str:
    """The whole observation, uncut."""
    return self.prefix + self.body + self.suffix


@dataclasses.dataclass(frozen=True)
class Step:
  """The result of one turn.

  Attributes:
    action: the name of the turn's action; INVALID if it has none.
    observation: the text that follows the turn; None if the trajectory ends
      here.
    status: how the trajectory ended; None while it goes on.
    reward: the weighted reward of this turn, without the outcome of the
      trajectory.
    cause: one line on the failure if the status is INFRA_ERROR, else ''.
    passages: the ids of the passages that the turn found.
  """

  action: str
  observation: Observation | None
  status: types.TrajectoryStatus | None
  reward: float = 0.0
  cause: str = ''
  passages: tuple[str, ...] = ()


class Episode(Protocol):
  """Answers the turns of one trajectory and rewards it."""

  async def step(
    self, question: types.Question, turn_index: int, text: str
  ) -> Step:
    """Returns the action, the observation and the reward of one turn.

    Args:
      question: the question of the trajectory.
      turn_index: the number of the turn, from 0.
      text: the text that the policy wrote in this turn.
    """
    ...

  def rewards(
    self,
    question: types.Question,
    prompt: str,
    texts: Sequence[str],
    status: types.TrajectoryStatus,
  ) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the rewards and the scores of a trajectory that has ended.

    It is called once for each trajectory, however it ended.

    Args:
      question: the question of the trajectory.
      prompt: the text that `prompt` returned.
      texts: the policy's turns, without observations.
      status: how the trajectory ended.

    Returns:
      Named, weighted rewards, whose sum is the outcome, and named, unweighted
      scores for reports, `main_score` among them. The names are the same for
      every trajectory. All are 0 after INFRA_ERROR.
    """
    ...

  def close(self) -> None:
    """Releases what the episode has opened, such as a game of its own.

    It is called once for each trajectory. A step may still be running if the
    trajectory was interrupted. An environment that returns itself from
    `episode` serves further trajectories after this call.
    """


class Environment(Episode, Protocol):
  """Opens dialogues with questions, answers their turns and rewards them.

  An exception in `prompt`, `step` or `rewards` ends only its own trajectory,
  with INFRA_ERROR. An exception with an `exit_code` ends the run.

  Attributes:
    stop_strings: the first of them that the policy completes ends its turn.
    tags: strings that structure every dialogue. A tokenizer may have added
      tokens for them, and a BPE tokenizer made for this environment is trained
      on them too.
    main_score: the score that evaluations report, as
      `val/{main_score}/{data_set}`.
    needs_retriever: whether `from_options` needs a retriever, so that passages
      must be served before.
    tools: the functions that the policy can call, as its chat template expects
      them (see `tool.Tool.description`).
  """

  stop_strings: tuple[str, ...]
  tags: tuple[str, ...]
  main_score: str
  needs_retriever: bool = False
  tools: Sequence[Mapping[str, Any]] = ()

  @classmethod
  def from_options(
    cls, options: Mapping[str, Any], retriever: retrieval.Retriever | None
  ) -> Self:
    """Builds the environment of a run.

    Args:
      options: the section `env` of the config, of which an environment reads
        its own keys.
      retriever: finds passages; None unless `needs_retriever`.

    Raises:
      ValueError: if an option has a bad value; the message is one line.
    """
    ...

  @staticmethod
  def phrases(vocabulary: Sequence[str]) -> list[str]:
    """Returns the strings that get a token of their own, in order.

    Args:
      vocabulary: the strings of the questions and passages.
    """
    ...

  @staticmethod
  def statistics(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
    """Returns the metrics that only this environment has.

    Args:
      trajectories: at least one; none of them ended in INFRA_ERROR.
    """
    del trajectories
    return {}

  def episode(self, question: types.Question) -> Episode:
    """Returns the object that answers the turns of one trajectory.

    An environment with a state between turns returns a new object for each
    trajectory, and needs no `step` and `rewards` of its own. Other environments
    return themselves.
    """
    del question
    return self

  def prompt(self, question: types.Question) -> str:
    """Returns the user message that opens a trajectory."""
    ...


def asks(action: str) -> bool:
  """Returns whether turns with this action ask the environment anything."""
  return action not in (ANSWER, INVALID)


def mean_turns(trajectories: Sequence[types.Trajectory], action: str) -> float:
  """Returns the mean number of turns of a trajectory that have this action.

  Args:
    trajectories: at least one.
    action: the name of the action.
  """
  turns = [turn for trajectory in trajectories for turn in trajectory.turns]
  return sum(turn.action == action for turn in turns) / len(trajectories)


def check_reward(name: str, reward: float) -> None:
  """Checks that a reward can be trained on.

  Args:
    name: the name of the reward, for the message.
    reward: the reward.

  Raises:
    ValueError: if it is nan, or infinite in float32; the message is one line.
  """
  # In this form nan is refused too: every comparison with it is false.
  if not abs(reward) <= _LARGEST_REWARD:
    raise ValueError(f'the reward {name} is {reward}, expected a finite number')
