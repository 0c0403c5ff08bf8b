"""Turns trajectories into messages between hosts, and back.

Nothing is lost: where a step is collected makes no difference to its batch.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.parallel import transfer

Groups = list[list[types.Trajectory]]
# The fields that hold an array, or None.
_OF_TURN = (
  'token_ids',
  'sampler_logprobs',
  'observation_ids',
  'truncated_logprobs',
)
_OF_TRAJECTORY = ('prompt_ids', 'expert_ids')


def packed(groups: Sequence[Sequence[types.Trajectory]]) -> transfer.Message:
  """Returns a message with groups of trajectories."""
  arrays: list[np.ndarray] = []
  plain = [[_to_plain(t, arrays) for t in group] for group in groups]
  return transfer.Message(plain, arrays)


def unpacked(value: Any, arrays: Sequence[np.ndarray]) -> Groups:
  """Returns the groups of trajectories of a message."""
  return [[_from_plain(plain, arrays) for plain in group] for group in value]


def _to_plain(
  trajectory: types.Trajectory, arrays: list[np.ndarray]
) -> dict[str, Any]:
  turns = [
    _numbered(turn, _OF_TURN, arrays) | {'reward': _number(turn.reward)}
    for turn in trajectory.turns
  ]
  question = trajectory.question
  return _numbered(trajectory, _OF_TRAJECTORY, arrays) | {
    'question': vars(question) | {'options': dict(question.options)},
    'turns': turns,
    'rewards': {k: _number(x) for k, x in trajectory.rewards.items()},
    'scores': {k: _number(x) for k, x in trajectory.scores.items()},
    'status': trajectory.status.value,
  }


def _from_plain(
  plain: Mapping[str, Any], arrays: Sequence[np.ndarray]
) -> types.Trajectory:
  question: dict[str, Any] = {
    name: tuple(x) if isinstance(x, list) else x
    for name, x in plain['question'].items()
  }
  turns: list[dict[str, Any]] = [
    _restored(turn, _OF_TURN, arrays) | {'passages': tuple(turn['passages'])}
    for turn in plain['turns']
  ]
  fields = _restored(plain, _OF_TRAJECTORY, arrays) | {
    'question': types.Question(**question),
    'turns': tuple(types.Turn(**turn) for turn in turns),
    'status': types.TrajectoryStatus(plain['status']),
  }
  return types.Trajectory(**fields)


def _numbered(
  record: Any, names: Sequence[str], arrays: list[np.ndarray]
) -> dict[str, Any]:
  """Returns the fields of a record, with numbers in place of arrays."""
  fields = dict(vars(record))
  for name in names:
    if fields[name] is not None:
      arrays.append(fields[name])
      fields[name] = len(arrays) - 1
  return fields


def _restored(
  fields: Mapping[str, Any], names: Sequence[str], arrays: Sequence[np.ndarray]
) -> dict[str, Any]:
  found = {n: fields[n] for n in names if fields[n] is not None}
  return {**fields, **{name: arrays[n] for name, n in found.items()}}


def _number(x: Any) -> Any:
  """Returns a number as JSON can write it; an integer stays one."""
  return x.item() if isinstance(x, np.generic) else x
