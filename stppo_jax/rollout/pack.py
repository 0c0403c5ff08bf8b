"""The only door from trajectories to arrays.

B trajectories, L tokens.
"""

from collections.abc import Sequence

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import types


def pack(
  trajectories: Sequence[types.Trajectory], *, length_bucket: int
) -> batch_lib.TokenBatch:
  """Right-padded numpy arrays; lengths are a multiple of `length_bucket`.

  Rows keep their order. A row that ended in INFRA_ERROR keeps its tokens but
  an empty loss mask and no reward: it weighs nothing anywhere.
  """
  rows = [_row(trajectory) for trajectory in trajectories]
  longest = max(len(row['tokens']) for row in rows)
  shape = (len(rows), -(-longest // length_bucket) * length_bucket)
  arrays = {
    name: np.zeros(shape, value.dtype) for name, value in rows[0].items()
  }
  for n, row in enumerate(rows):
    for name, value in row.items():
      arrays[name][n, : len(value)] = value
  groups = {}
  return batch_lib.TokenBatch(
    tokens_BL=arrays['tokens'],
    lengths_B=np.array([len(row['tokens']) for row in rows], np.int32),
    turn_ids_BL=arrays['turn_ids'],
    loss_mask_BL=arrays['loss_mask'],
    sampler_logprobs_BL=arrays['sampler_logprobs'],
    rewards_BL=arrays['rewards'],
    group_ids_B=np.array(
      [
        # Ids are unique within a data set only.
        groups.setdefault((question.data_set, question.id), len(groups))
        for question in (trajectory.question for trajectory in trajectories)
      ],
      np.int32,
    ),
  )


def _row(trajectory: types.Trajectory) -> dict[str, np.ndarray]:
  """The arrays of one trajectory, unpadded."""
  parts = [(trajectory.prompt_ids, 0, np.zeros(len(trajectory.prompt_ids)))]
  for turn_id, turn in enumerate(trajectory.turns, start=1):
    parts.append((turn.token_ids, turn_id, turn.sampler_logprobs))
    ids = turn.observation_ids
    parts.append((ids, 0, np.zeros(len(ids))))
  turn_ids = np.concatenate([np.full(len(ids), k) for ids, k, _ in parts])
  valid = trajectory.status is not types.TrajectoryStatus.INFRA_ERROR
  loss_mask = (turn_ids > 0) & valid
  rewards = np.zeros(len(turn_ids), np.float32)
  if loss_mask.any():
    rewards[np.flatnonzero(loss_mask)[-1]] = trajectory.reward
  return {
    'tokens': np.concatenate([ids for ids, _, _ in parts]).astype(np.int32),
    'turn_ids': turn_ids.astype(np.int32),
    'loss_mask': loss_mask,
    'sampler_logprobs': np.concatenate([x for _, _, x in parts]).astype(
      np.float32
    ),
    'rewards': rewards,
  }
