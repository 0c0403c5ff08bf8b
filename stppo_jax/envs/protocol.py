"""The protocol of an environment, which reads and writes text, not token ids.

The collector samples a turn, decodes its tokens and passes the text to `step`.
Then it tokenises the observation, separately from the turn, and appends these
tokens to the trajectory. At the end, `rewards` scores the trajectory.
Everything else that a run needs, such as the strings that end a turn and the
score that is reported, is a class attribute. So an environment is one class in
one file and one line of `environments.ENVIRONMENTS`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Protocol, Self

from stppo_jax import types
from stppo_jax.retrieval import protocol as retrieval

# The action of a turn without a valid action, and the action of a turn that
# answers. An environment is free to choose the names of its other actions.
INVALID = types.INVALID
ANSWER = 'answer'
_LARGEST_REWARD = 3.4e38  # training stores rewards as float32


@dataclasses.dataclass(frozen=True)
class Observation:
  """The environment's answer to a turn.

  If the observation is longer than `max_observation_tokens`, only `body` is
  cut, so a closing tag in `suffix` is never lost.

  Attributes:
    prefix: the environment's own words. Tags in the prefix may become added
      tokens of the tokenizer.
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
    action: the name of the turn's action; INVALID if the turn has no valid
      action.
    observation: the text that follows the turn; None if the trajectory ends
      here.
    status: how the trajectory ended; None while it goes on.
    reward: the weighted reward of this turn, without the outcome reward of the
      trajectory.
    cause: one line about the failure if the status is INFRA_ERROR, else ''.
    passages: the ids of the passages that a search in this turn found.
  """

  action: str
  observation: Observation | None
  status: types.TrajectoryStatus | None
  reward: float = 0.0
  cause: str = ''
  passages: tuple[str, ...] = ()


class Episode(Protocol):
  """Answers the turns of one trajectory and rewards the trajectory."""

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

    The method is called once for each trajectory, whatever its status.

    Args:
      question: the question of the trajectory.
      prompt: the text that `prompt` returned.
      texts: the policy's turns, without observations.
      status: how the trajectory ended.

    Returns:
      Two dicts. The first has the weighted rewards by name; their sum is the
      outcome reward. The second has the unweighted scores that are reported,
      by name, with `main_score` among them. The names are the same for every
      trajectory. After INFRA_ERROR all rewards and scores are 0.
    """
    ...

  def close(self) -> None:
    """Releases what the episode has opened, such as a game of its own.

    The method is called once for each trajectory. If the trajectory was
    interrupted, a step may still be running. If `episode` returns the
    environment itself, further trajectories use the environment after this
    call.
    """


class Environment(Episode, Protocol):
  """Opens dialogues with questions, answers turns and gives rewards.

  An exception in `prompt`, `step` or `rewards` ends only its own trajectory,
  with INFRA_ERROR. An exception with an `exit_code` ends the run.

  Attributes:
    stop_strings: the strings that end a turn. A turn ends as soon as the policy
      has written one of these strings.
    tags: strings that structure every dialogue. A tokenizer may have added
      tokens for the tags. A BPE tokenizer that is made for this environment is
      trained on the tags, too.
    main_score: the score that evaluations report, as
      `val/{main_score}/{data_set}`.
    needs_retriever: whether `from_options` needs a retriever. If so, passages
      must be served before the environment is built.
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
      options: the section `env` of the config, from which an environment reads
        its own keys.
      retriever: the retriever that finds passages; None if `needs_retriever` is
        False.

    Raises:
      ValueError: if an option has a bad value; the message is one line.
    """
    ...

  @staticmethod
  def phrases(vocabulary: Sequence[str]) -> list[str]:
    """Returns the strings that get a token of their own, in a fixed order.

    Args:
      vocabulary: the strings of the questions and passages.
    """
    ...

  @staticmethod
  def statistics(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
    """Returns the metrics that only this environment has.

    Args:
      trajectories: at least one trajectory; none of them ended in INFRA_ERROR.
    """
    del trajectories
    return {}

  def episode(self, question: types.Question) -> Episode:
    """Returns the object that answers the turns of one trajectory.

    An environment that keeps a state between turns returns a new object for
    each trajectory, and needs no `step` and no `rewards` of its own. An
    environment without such a state returns itself.
    """
    del question
    return self

  def prompt(self, question: types.Question) -> str:
    """Returns the user message that opens a trajectory."""
    ...


def asks(action: str) -> bool:
  """Returns whether an action is neither an answer nor invalid."""
  return action not in (ANSWER, INVALID)


def mean_turns(trajectories: Sequence[types.Trajectory], action: str) -> float:
  """Returns the mean number of turns with the given action per trajectory.

  Args:
    trajectories: at least one trajectory.
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
    ValueError: if the reward is nan, or infinite in float32; the message is one
      line.
  """
  # The `not` refuses nan too, because every comparison with nan is false.
  if not abs(reward) <= _LARGEST_REWARD:
    raise ValueError(f'the reward {name} is {reward}, expected a finite number')
