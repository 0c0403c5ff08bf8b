"""What the collector asks of an environment. It speaks text, never token ids.

The collector samples a turn, decodes it for `step`, tokenises the observation
on its own and appends it; `rewards` closes the trajectory.
"""

from collections.abc import Sequence
import dataclasses
from typing import Protocol

from stppo_jax import types


@dataclasses.dataclass(frozen=True)
class Observation:
  """What the environment answered.

  Cut to `max_observation_tokens` inside `body` only, so that a closing tag in
  `suffix` is always there.
  """

  prefix: str
  body: str
  suffix: str

  @property
  def text(self) -> str:
    """The observation uncut."""
    return self.prefix + self.body + self.suffix


@dataclasses.dataclass(frozen=True)
class Step:
  """How the environment read one turn.

  Attributes:
    action: 'search', 'answer' or 'invalid'.
    observation: what follows the turn; None when the trajectory ends here.
    status: how the trajectory ended; None while it goes on.
    reward: what this turn earned, whatever the outcome; already weighted.
  """

  action: str
  observation: Observation | None
  status: types.TrajectoryStatus | None
  reward: float = 0.0


class Environment(Protocol):
  """Asks a question, answers turns, rewards what was written.

  Attributes:
    max_turns: searches allowed; one last generation follows them.
  """

  max_turns: int

  def prompt(self, question: types.Question) -> str:
    """The user message that opens a trajectory."""
    ...

  async def step(
    self, question: types.Question, turn_index: int, text: str
  ) -> Step:
    """Answers one turn.

    Args:
      question: the question asked.
      turn_index: from 0; `max_turns` is the last generation.
      text: all that the policy wrote in this turn and nothing else.
    """
    ...

  def rewards(
    self,
    question: types.Question,
    prompt: str,
    texts: Sequence[str],
    status: types.TrajectoryStatus,
  ) -> tuple[dict[str, float], dict[str, float]]:
    """Rewards and scores of a trajectory that has ended.

    Args:
      question: the question asked.
      prompt: as `prompt` gave it.
      texts: what the policy wrote, turn by turn, without observations.
      status: how it ended.

    Returns:
      Weighted reward parts, whose sum is the outcome, and unweighted scores
      for reports. All 0 after INFRA_ERROR.
    """
    ...
