"""Host-side records: questions, passages, turns and trajectories.

This module does not import jax. `rollout/pack.py` turns trajectories into
arrays.

L tokens that the policy wrote in a turn, O tokens of an observation.
"""

from collections.abc import Mapping
import dataclasses
import enum

import numpy as np

# The action of a turn without a valid action.
INVALID = 'invalid'


@dataclasses.dataclass(frozen=True)
class Question:
  """One question with its golden answers.

  Attributes:
    id: unique within its data set.
    text: the question in plain words.
    golden_answers: the right answers; each of them counts as right.
    data_set: the name under which the question's scores are reported, as in
      `val/{score}/{data_set}`.
    kind: 'open' (free text) or 'choice' (an option letter or its text).
    options: option letter to option text; empty unless kind is 'choice'.
    corpus: the path under which the retrieval server serves this question's
      passages, such as 'worlds/17'; '' selects the server's default corpus.
    gold_passages: the ids of the passages that lead to the answer; empty if
      they are not known.
    hops: the number of facts that lead to the answer; 0 if unknown.
  """

  id: str
  text: str
  golden_answers: tuple[str, ...]
  data_set: str
  kind: str = 'open'
  options: Mapping[str, str] = dataclasses.field(default_factory=dict)
  corpus: str = ''
  gold_passages: tuple[str, ...] = ()
  hops: int = 0


@dataclasses.dataclass(frozen=True)
class Passage:
  """One passage; a larger `score` means a better match with the query."""

  id: str
  title: str
  text: str
  score: float = 0.0


class TrajectoryStatus(enum.Enum):
  """How a trajectory ended.

  Truncated trajectories are trained on like completed trajectories.
  INFRA_ERROR means that the retriever or the engine failed. Such a trajectory
  has weight 0 in every loss, advantage and metric. The only exception is the
  metric that counts the trajectories of each status.
  """

  COMPLETED = 'completed'
  TRUNCATED_LENGTH = 'truncated_length'
  TRUNCATED_TURNS = 'truncated_turns'
  INFRA_ERROR = 'infra_error'


@dataclasses.dataclass(frozen=True)
class GeneratedTurn:
  """A turn of one trajectory, as the policy generated it.

  Attributes:
    token_ids: [L] int32; L is at least 1 if the length limit leaves room for a
      token.
    logprobs: [L] float32, the tokens' log-probabilities under
      softmax(logits / temperature).
    truncated_logprobs: [L] float32, the tokens' log-probabilities under the
      truncated distribution that was sampled from; None if the engine does not
      report them.
    stopped: whether a stop string or EOS ended the turn; False if a length
      limit ended it.
    version: the number of training steps of the policy that wrote the turn.
  """

  token_ids: np.ndarray
  logprobs: np.ndarray
  truncated_logprobs: np.ndarray | None
  stopped: bool
  version: int = 0


@dataclasses.dataclass(frozen=True)
class Turn:
  """One turn of the policy and the observation that followed it.

  Attributes:
    token_ids: [L] int32, the sampled tokens, including the closing tag or EOS.
    sampler_logprobs: [L] float32, the log-probability of each token in the
      sampler at the run's temperature, without truncation.
    observation_ids: [O] int32, the tokens of the environment's answer; may be
      empty.
    action: the environment's name of the action that the turn took; `INVALID`
      if the turn has no valid action.
    reward: the turn's own weighted reward, which is not part of the outcome
      reward.
    truncated_logprobs: [L] float32, the log-probability of each token in the
      truncated distribution (top-k, top-p, min-p) that it was sampled from;
      None if the engine does not report it.
    passages: the ids of the passages that the turn's search found.
    version: the number of training steps of the policy that wrote the turn. One
      policy writes all tokens of a turn. A newer policy may write a later
      turn (`rollout.turn_swaps`).
  """

  token_ids: np.ndarray
  sampler_logprobs: np.ndarray
  observation_ids: np.ndarray
  action: str
  reward: float = 0.0
  truncated_logprobs: np.ndarray | None = None
  passages: tuple[str, ...] = ()
  version: int = 0


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """A question, the turns of its dialogue, and the outcome's rewards.

  Attributes:
    question: the question that opened the dialogue.
    prompt_ids: int32, one dimension, the tokens before the first turn.
    turns: the turns in order.
    rewards: reward name to weighted reward; the outcome reward is their sum.
    status: how the trajectory ended.
    scores: score name to unweighted score (exact match, F1, ...). Scores are
      reported and never trained on.
    expert_ids: [tokens, layers, experts per token] int16, the experts that each
      token visited in the sampler, for the tokens of prompt, turns and
      observations; None if the engine does not report them.
    cause: one line that says what failed in a trajectory with INFRA_ERROR; ''
      if the cause is not known, and for all other trajectories.
  """

  question: Question
  prompt_ids: np.ndarray
  turns: tuple[Turn, ...]
  rewards: Mapping[str, float]
  status: TrajectoryStatus
  scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
  expert_ids: np.ndarray | None = None
  cause: str = ''

  @property
  def is_valid(self) -> bool:
    """Whether the trajectory has weight: its status is not INFRA_ERROR."""
    return self.status is not TrajectoryStatus.INFRA_ERROR

  @property
  def reward(self) -> float:
    """The outcome reward: the sum of `rewards`, without rewards of turns."""
    return float(sum(self.rewards.values()))

  @property
  def turn_reward(self) -> float:
    """The sum of the turns' own rewards."""
    return float(sum(turn.reward for turn in self.turns))
