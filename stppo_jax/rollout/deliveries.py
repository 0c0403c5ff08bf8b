"""Turns trajectories into messages between hosts, and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.parallel import transfer

Groups = list[list[types.Trajectory]]
# `Put` stores an array and returns a JSON value that stands for the array.
# `Take` returns the array for which such a value stands.
Put = Callable[[np.ndarray], Any]
Take = Callable[[Any], np.ndarray]
# The fields of a turn and of a trajectory that hold an array or None.
_OF_TURN = (
  'token_ids',
  'sampler_logprobs',
  'observation_ids',
  'truncated_logprobs',
)
_OF_TRAJECTORY = ('prompt_ids', 'expert_ids')


def packed(groups: Sequence[Sequence[types.Trajectory]]) -> transfer.Message:
  """Returns a message with groups of trajectories and all their arrays."""
  arrays: list[np.ndarray] = []

  def put(x: np.ndarray) -> int:
    arrays.append(x)
    return len(arrays) - 1

  plain = [[to_plain(t, put) for t in group] for group in groups]
  return transfer.Message(plain, arrays)


def unpacked(value: Any, arrays: Sequence[np.ndarray]) -> Groups:
  """Returns the groups of trajectories that a message contains."""
  take = arrays.__getitem__
  return [[from_plain(plain, take) for plain in group] for group in value]


def to_plain(trajectory: types.Trajectory, put: Put) -> dict[str, Any]:
  """Returns a trajectory as a JSON value.

  Each array is given to `put`, and the result of `put` replaces the array.
  """
  turns = [
    _fields(turn, _OF_TURN, put) | {'reward': _number(turn.reward)}
    for turn in trajectory.turns
  ]
  question = trajectory.question
  return _fields(trajectory, _OF_TRAJECTORY, put) | {
    'question': vars(question) | {'options': dict(question.options)},
    'turns': turns,
    'rewards': {k: _number(x) for k, x in trajectory.rewards.items()},
    'scores': {k: _number(x) for k, x in trajectory.scores.items()},
    'status': trajectory.status.value,
  }


def from_plain(plain: Mapping[str, Any], take: Take) -> types.Trajectory:
  """Returns the trajectory that `to_plain` has turned into a JSON value."""
  # JSON has no tuples, so the tuples of a question have come back as lists.
  question: dict[str, Any] = {
    name: tuple(x) if isinstance(x, list) else x
    for name, x in plain['question'].items()
  }
  turns: list[dict[str, Any]] = [
    _restored(turn, _OF_TURN, take) | {'passages': tuple(turn['passages'])}
    for turn in plain['turns']
  ]
  fields = _restored(plain, _OF_TRAJECTORY, take) | {
    'question': types.Question(**question),
    'turns': tuple(types.Turn(**turn) for turn in turns),
    'status': types.TrajectoryStatus(plain['status']),
  }
  return types.Trajectory(**fields)


def _fields(record: Any, names: Sequence[str], put: Put) -> dict[str, Any]:
  fields = vars(record)
  held = {n: put(fields[n]) for n in names if fields[n] is not None}
  return fields | held


def _restored(
  fields: Mapping[str, Any], names: Sequence[str], take: Take
) -> dict[str, Any]:
  held = {n: take(fields[n]) for n in names if fields[n] is not None}
  return {**fields, **held}


def _number(x: Any) -> Any:
  """Returns a numpy number as a Python number, which JSON can write."""
  return x.item() if isinstance(x, np.generic) else x
