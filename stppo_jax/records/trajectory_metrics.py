"""Computes the metrics of a collection, and the records of its trajectories."""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Protocol

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import types
from stppo_jax.records import token_records

_INFRA_ERROR = types.TrajectoryStatus.INFRA_ERROR
_TRUNCATED_TURNS = types.TrajectoryStatus.TRUNCATED_TURNS
_REPEATED = 4  # the length of the shortest repeated text, in tokens
# The share of failed turns with an action counts only if at least this number
# of such turns failed: a single turn may have failed because of its own query.
_FEWEST_FAILED_TURNS = 2


class Environment(Protocol):
  """The part of an environment that metrics need, see `envs/protocol.py`."""

  main_score: str

  @staticmethod
  def statistics(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
    """Returns metrics that only this environment has."""
    ...


@dataclasses.dataclass(frozen=True)
class Failures:
  """The trajectories and turns that failed because of the infrastructure.

  Attributes:
    rows, failed_rows: the number of trajectories, and of failed trajectories.
    action: the action with the largest share of failed turns; '' if no turn
      failed.
    turns, failed_turns: the number of turns with this action that needed an
      answer of the environment, and the number of such turns that failed. If
      `action` is INVALID, `turns` counts the turns with any action.
    cause: one line on the first failed trajectory whose cause is known; '' if
      no cause is known.
  """

  rows: int
  failed_rows: int
  action: str
  turns: int
  failed_turns: int
  cause: str

  @property
  def fraction(self) -> float:
    """The larger of the shares of failed trajectories and of failed turns.

    The share of turns counts too, because many trajectories that never search
    must not hide that every search fails. But if only one turn with `action`
    has failed, only the share of trajectories counts.
    """
    fraction = self.failed_rows / self.rows
    if self.failed_turns < _FEWEST_FAILED_TURNS:
      return fraction
    return max(fraction, self.failed_turns / self.turns)

  def __str__(self) -> str:
    line = (
      f'{self.failed_rows} of {self.rows} trajectories failed because of the '
      'infrastructure'
    )
    if self.failed_turns:
      line += f', {self.failed_turns} of {self.turns} turns ({self.action})'
    return f'{line}; the first cause: {self.cause or "not known"}'


def failures(trajectories: Sequence[types.Trajectory]) -> Failures:
  """Counts the failures of the infrastructure in a collection."""
  asked, unanswered = collections.Counter(), collections.Counter()
  for trajectory in trajectories:
    actions = [turn.action for turn in trajectory.turns]
    if trajectory.status is _TRUNCATED_TURNS:
      actions = actions[:-1]  # the last allowed turn gets no answer
    asked.update(actions)
    # If the last turn has an observation, the engine failed, not the turn.
    failed = trajectory.status is _INFRA_ERROR
    if failed and actions and not len(trajectory.turns[-1].observation_ids):
      unanswered[actions[-1]] += 1
  # If the environment raised an error, the action of the turn is not known and
  # is INVALID. The share of such turns is taken among all turns.
  asked[types.INVALID] = asked.total()
  action = max(
    unanswered, key=lambda name: unanswered[name] / asked[name], default=''
  )
  failed_rows = [t for t in trajectories if t.status is _INFRA_ERROR]
  return Failures(
    rows=len(trajectories),
    failed_rows=len(failed_rows),
    action=action,
    turns=asked[action],
    failed_turns=unanswered[action],
    cause=next((t.cause for t in failed_rows if t.cause), ''),
  )


def valid_fraction(trajectories: Sequence[types.Trajectory]) -> float:
  """Returns the share of trajectories without infrastructure failures."""
  return len(_valid(trajectories)) / len(trajectories)


def zero_variance(group: Sequence[types.Trajectory]) -> bool:
  """Returns whether all valid trajectories of a group have the same reward.

  The result is False if there are fewer than two valid trajectories. If it is
  True, all advantages of the group are 0. The reward of a trajectory includes
  its turn rewards. The rewards are compared in float32, which is the precision
  of the learner.
  """
  valid = _valid(group)
  # Sums that differ only by rounding in float64 are equal for the learner.
  totals = {np.float32(t.reward + t.turn_reward) for t in valid}
  return len(valid) >= 2 and len(totals) == 1


def count_tokens(trajectories: Sequence[types.Trajectory]) -> dict[str, float]:
  """Returns the number of policy tokens, and of tokens that repeat text.

  A token repeats text if the four tokens that end with it occur earlier in the
  same turn. The result counts only this host's tokens. Later the counts of all
  hosts are added up.
  """
  total = repeated = 0
  for trajectory in _valid(trajectories):
    for turn in trajectory.turns:
      ids = turn.token_ids.tolist()
      texts = list(zip(*(ids[start:] for start in range(_REPEATED))))
      total += len(ids)
      repeated += len(texts) - len(set(texts))
  return {
    'rollout/policy_tokens': float(total),
    'rollout/repeated_tokens': float(repeated),
  }


def measure_groups(
  groups: Sequence[Sequence[types.Trajectory]],
) -> dict[str, float]:
  """Returns the share of groups whose rewards have no variance.

  Only groups with at least two valid trajectories count. If there is no such
  group, the metric is absent.
  """
  uniform = [zero_variance(g) for g in groups if len(_valid(g)) >= 2]
  return {'rollout/zero_variance_groups': _mean(uniform)} if uniform else {}


def measure_staleness(
  trajectories: Sequence[types.Trajectory], step: int
) -> dict[str, float]:
  """Measures how old the policies are that wrote the turns of trajectories.

  Args:
    trajectories: the trajectories. The version of each turn is the number of
      training steps of the policy that wrote the turn.
    step: the number of training steps of the policy that is being trained.

  Returns:
    The mean and the maximum age of these policies, in steps, over all turns;
    and the mean number of policies that wrote one trajectory.
  """
  versions = [[turn.version for turn in t.turns] for t in trajectories]
  behind = [step - version for row in versions for version in row]
  return {
    'rollout/staleness': _mean(behind),
    'rollout/staleness_max': float(max(behind, default=0)),
    'rollout/versions': _mean([len({*row}) for row in versions if row]),
  }


def measure(
  trajectories: Sequence[types.Trajectory], environment: Environment
) -> dict[str, float]:
  """Returns rewards, scores, lengths, actions and statuses of a collection.

  Trajectories that failed because of the infrastructure count only in
  `rollout/status` and `rollout/valid_fraction`.

  Args:
    trajectories: the trajectories of the collection, at least one.
    environment: the environment, with its main score and its own statistics.
  """
  metrics = {
    f'rollout/status/{status.value}': float(
      sum(t.status is status for t in trajectories)
    )
    for status in types.TrajectoryStatus
  }
  valid = _valid(trajectories)
  metrics['rollout/valid_fraction'] = valid_fraction(trajectories)
  if not valid:
    return metrics
  metrics |= _describe('critic/score', [t.reward for t in valid])
  metrics |= _describe(
    'response_length',
    [sum(len(turn.token_ids) for turn in t.turns) for t in valid],
  )
  metrics |= _describe('num_turns', [len(t.turns) for t in valid])
  metrics |= _describe(
    'turn_length', [len(turn.token_ids) for t in valid for turn in t.turns]
  )
  tokens = collections.Counter()
  for t in valid:
    for number, turn in enumerate(t.turns, start=1):
      tokens[f'turn_length/tokens/turn_{number}'] += len(turn.token_ids)
  metrics |= {name: float(count) for name, count in tokens.items()}
  # The names of rewards are the same for all trajectories, see
  # `Episode.rewards`.
  for name in valid[0].rewards:
    metrics[f'reward/{name}/mean'] = _mean([t.rewards[name] for t in valid])
  metrics['reward/turns/mean'] = _mean([t.turn_reward for t in valid])
  for name in valid[0].scores:
    metrics[f'score/{name}/mean'] = _mean([t.scores[name] for t in valid])
  score = environment.main_score
  for data_set in sorted({t.question.data_set for t in valid}):
    metrics[f'train/{score}/{data_set}'] = _mean(
      [t.scores[score] for t in valid if t.question.data_set == data_set]
    )
  truncated = [
    turn.truncated_logprobs - turn.sampler_logprobs
    for t in valid
    for turn in t.turns
    if turn.truncated_logprobs is not None
  ]
  if truncated:
    # A truncated distribution, such as top-p, keeps a part of the probability.
    # The metric is the mean of -log of this part, which is 0 if the whole
    # distribution is kept.
    metrics['mismatch/truncation'] = _mean(np.concatenate(truncated))
  metrics |= environment.statistics(valid)
  metrics |= {
    'env/ratio_of_valid_action': _mean(
      [turn.action != types.INVALID for t in valid for turn in t.turns]
    ),
    'env/finish_ratio': _mean(
      [t.status is types.TrajectoryStatus.COMPLETED for t in valid]
    ),
  }
  return metrics


def record(
  trajectory: types.Trajectory,
  tokenizer,
  *,
  details: batch_lib.TokenDetails | None = None,
  row: int = 0,
) -> dict[str, Any]:
  """Returns a trajectory as plain data, for `trajectories-*.jsonl`.

  Args:
    trajectory: the trajectory.
    tokenizer: the tokenizer that decodes the trajectory.
    details: measurements of each token of some trajectories, with one row for
      each trajectory; None if nothing was measured.
    row: the row of this trajectory in `details`, which may lack the row.

  Returns:
    A dict with id, question, golden_answers, data_set, options of a choice
    question, prompt, turns (each with text, observation, action and reward),
    rewards, scores, status, and the cause of a failure. If `details` has the
    row, each turn that was trained on also has `tokens`, see
    `token_records.turn_records`.
  """
  question = trajectory.question
  tokens: list[dict[str, Any] | None] = [None] * len(trajectory.turns)
  if details is not None and row < len(details.loss_mask_BL):
    tokens = token_records.turn_records(trajectory, details, row, tokenizer)
  return {
    'id': question.id,
    'question': question.text,
    'golden_answers': list(question.golden_answers),
    'data_set': question.data_set,
    **({'options': dict(question.options)} if question.options else {}),
    'prompt': tokenizer.decode(trajectory.prompt_ids),
    'turns': [
      {
        'text': tokenizer.decode(turn.token_ids),
        'observation': tokenizer.decode(turn.observation_ids),
        'action': turn.action,
        'reward': float(turn.reward),
        **({'tokens': numbers} if numbers else {}),
      }
      for turn, numbers in zip(trajectory.turns, tokens)
    ],
    'rewards': _floats(trajectory.rewards),
    'scores': _floats(trajectory.scores),
    'status': trajectory.status.value,
    **({'cause': trajectory.cause} if trajectory.cause else {}),
  }


def records(
  trajectories: Sequence[types.Trajectory],
  tokenizer,
  details: batch_lib.TokenDetails | None = None,
) -> list[dict[str, Any]]:
  """Returns the record of each trajectory, see `record`.

  Row i of `details`, if it exists, belongs to trajectory i.
  """
  return [
    record(trajectory, tokenizer, details=details, row=row)
    for row, trajectory in enumerate(trajectories)
  ]


def _valid(
  trajectories: Sequence[types.Trajectory],
) -> list[types.Trajectory]:
  return [t for t in trajectories if t.status is not _INFRA_ERROR]


def _floats(numbers: Mapping[str, float]) -> dict[str, float]:
  return {name: float(value) for name, value in numbers.items()}


def _mean(values: Sequence[float] | np.ndarray) -> float:
  """Returns the mean of values, or 0 if there are no values."""
  return float(np.mean(values)) if len(values) else 0.0


def _describe(name: str, values: Sequence[float]) -> dict[str, float]:
  return {
    f'{name}/mean': _mean(values),
    f'{name}/max': float(np.max(values)) if len(values) else 0.0,
    f'{name}/min': float(np.min(values)) if len(values) else 0.0,
  }
