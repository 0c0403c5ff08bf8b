"""Records of the host: questions, passages, turns and trajectories.

Nothing here imports jax. `rollout/pack.py` turns trajectories into arrays.

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
    golden_answers: the right answers; giving any one of them is right.
    data_set: the name under which its scores are reported, as in
      `val/{score}/{data_set}`.
    kind: 'open' (free text) or 'choice' (an option letter or its text).
    options: option letter to option text; empty unless kind is 'choice'.
    corpus: the path under which the retrieval server serves this question's
      passages, such as 'worlds/17'; '' for the server's own corpus.
    gold_passages: the ids of the passages that lead to the answer; empty if
      they are not known.
    hops: the number of facts that lead to the answer; 0 if it is not known.
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
  """One passage; `score` is its retrieval score, larger is better."""

  id: str
  title: str
  text: str
  score: float = 0.0


class TrajectoryStatus(enum.Enum):
  """How a trajectory ended.

  Truncated trajectories are trained on like completed ones. INFRA_ERROR means
  that the retriever or the engine failed: such a trajectory has weight 0 in
  every loss, advantage and metric but the count of its status.
  """

  COMPLETED = 'completed'
  TRUNCATED_LENGTH = 'truncated_length'
  TRUNCATED_TURNS = 'truncated_turns'
  INFRA_ERROR = 'infra_error'


@dataclasses.dataclass(frozen=True)
class GeneratedTurn:
  """A turn of one row, as the policy generated it.

  Attributes:
    token_ids: [L] int32; at least one wherever one fits.
    logprobs: [L] float32, under softmax(logits / temperature).
    truncated_logprobs: [L] float32, under the truncated distribution that was
      sampled from; None where the engine does not know it.
    stopped: whether a stop string or EOS ended the turn; False where a length
      limit did.
    version: number of training steps that made the policy that wrote it.
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
    token_ids: [L] int32, the tokens as they were sampled, with the closing tag
      or EOS.
    sampler_logprobs: [L] float32, the log-probability of each token in the
      sampler at the run's temperature, without truncation.
    observation_ids: [O] int32, the tokens of the environment's answer; may be
      empty.
    action: the environment's name for what the turn did; 'invalid' if it did
      nothing (`INVALID`).
    reward: the weighted reward of the turn itself, which is not part of the
      outcome reward.
    truncated_logprobs: [L] float32, the log-probability of each token in the
      truncated distribution (top-k, top-p, min-p) that it was sampled from;
      None if the engine does not report it.
    passages: the ids of the passages that the turn's search found.
    version: number of training steps that made the policy that wrote it. All
      tokens of a turn are of one policy, but a later turn may be of a newer one
      (`rollout.turn_swaps`).
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
  """A question, the turns that it led to, and their rewards.

  Attributes:
    question: the question that opened the dialogue.
    prompt_ids: int32, one dimension, the tokens before the first turn.
    turns: the turns in order.
    rewards: name to weighted reward; the outcome reward is their sum.
    status: how the trajectory ended.
    scores: name to unweighted score (exact match, F1, ...). Scores are reported
      and never trained on.
    expert_ids: [tokens, layers, experts per token] int16, the experts that each
      token visited in the sampler, with prompt and observations; None if the
      engine does not report them.
    cause: one line on what failed, of a trajectory with INFRA_ERROR; '' where
      it is not known.
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
    """Whether the trajectory weighs anything: no infrastructure failed it."""
    return self.status is not TrajectoryStatus.INFRA_ERROR

  @property
  def reward(self) -> float:
    """The outcome reward: the sum of `rewards`, without the turns' rewards."""
    return float(sum(self.rewards.values()))

  @property
  def turn_reward(self) -> float:
    """The sum of the turns' own rewards."""
    return float(sum(turn.reward for turn in self.turns))
