"""Host-side records: what is asked, what was written, how it ended.

Nothing here knows of jax. `rollout/pack.py` turns these into device arrays.
"""

from collections.abc import Mapping
import dataclasses
import enum

import numpy as np


@dataclasses.dataclass(frozen=True)
class Question:
  """One question with its golden answers.

  Attributes:
    id: unique within its data set.
    text: the question in plain words.
    golden_answers: any of these is right.
    data_set: name under which its scores are reported (`val/em/{data_set}`).
    kind: 'open' (free text) or 'choice' (an option letter or its text).
    options: option letter to option text; empty unless kind is 'choice'.
    corpus: path under which the retrieval server serves this question's
      passages, such as 'worlds/17'; '' is the server's own corpus.
  """

  id: str
  text: str
  golden_answers: tuple[str, ...]
  data_set: str
  kind: str = 'open'
  options: Mapping[str, str] = dataclasses.field(default_factory=dict)
  corpus: str = ''


@dataclasses.dataclass(frozen=True)
class Passage:
  """One retrieved passage; `score` is the retriever's, larger is better."""

  id: str
  title: str
  text: str
  score: float = 0.0


class TrajectoryStatus(enum.Enum):
  """How a trajectory ended. Truncated trains; INFRA_ERROR weighs nothing."""

  COMPLETED = 'completed'
  TRUNCATED_LENGTH = 'truncated_length'
  TRUNCATED_TURNS = 'truncated_turns'
  INFRA_ERROR = 'infra_error'


@dataclasses.dataclass(frozen=True)
class Turn:
  """What the policy wrote in one go, and the observation that followed.

  Attributes:
    token_ids: [N] int32, as sampled, the closing tag or EOS included.
    sampler_logprobs: [N] float32, log-probability of each sampled token under
      the sampler at the run's temperature, untruncated.
    observation_ids: [M] int32, what the environment answered; may be empty.
    action: 'search', 'answer' or 'invalid', as the environment read the turn.
    reward: what the turn itself earned, already weighted; no part of the
      outcome.
    truncated_logprobs: [N] float32, under the truncated distribution (top-k,
      top-p, min-p) that was sampled from; None where that is not known.
  """

  token_ids: np.ndarray
  sampler_logprobs: np.ndarray
  observation_ids: np.ndarray
  action: str
  reward: float = 0.0
  truncated_logprobs: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """A question, the turns it led to, and what they were worth.

  Attributes:
    question: the question asked.
    prompt_ids: [P] int32, the tokens before the first turn.
    turns: in order; T <= max_turns + 1.
    rewards: named float parts, already weighted; their sum is the outcome.
    status: how it ended.
    scores: named, unweighted measures (exact match, F1, ...) for reports.
    version: number of the step whose policy wrote it, 0 for the start.
    expert_ids: [tokens, layers, experts of a token] int16, the experts that
      each token visited in the sampler, prompt and observations included; None
      where that is not known.
  """

  question: Question
  prompt_ids: np.ndarray
  turns: tuple[Turn, ...]
  rewards: Mapping[str, float]
  status: TrajectoryStatus
  scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
  version: int = 0
  expert_ids: np.ndarray | None = None

  @property
  def reward(self) -> float:
    """The outcome reward: the sum of its parts, without the turns' rewards."""
    return float(sum(self.rewards.values()))

  @property
  def turn_reward(self) -> float:
    """What the turns themselves earned, all together."""
    return float(sum(turn.reward for turn in self.turns))
