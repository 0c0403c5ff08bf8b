"""The only door from trajectories to arrays.

B trajectories, L tokens, M of which carry loss at most; of a mixture of
experts, N layers, E experts that a token visits.
"""

from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import types

# The tokens of a turn to the number of each one's sentence: 1, 2, ...
Sentences = Callable[[np.ndarray], np.ndarray]
_LOSS_BUCKETS = 4  # of a length: each other M is another program


def pack(
  trajectories: Sequence[types.Trajectory],
  *,
  length_bucket: int,
  sentences: Sentences | None = None,
  with_expert_ids: bool = False,
) -> batch_lib.TokenBatch:
  """Right-padded numpy arrays; lengths are a multiple of `length_bucket`.

  Rows keep their order. A row that ended in INFRA_ERROR keeps its tokens but
  an empty loss mask and no reward: it weighs nothing anywhere. What a turn
  earned stands on its last token, the outcome on the row's last policy token,
  where the two add up.

  Args:
    trajectories: the rows.
    length_bucket: tokens.
    sentences: see `sentences.SentenceSplitter`; without it the batch has no
      sentence ids.
    with_expert_ids: the batch has the experts that the sampler chose.

  Raises:
    ValueError: they are not known.
  """
  groups, states = {}, {}
  group_ids, rows = [], []
  for trajectory in trajectories:
    question = trajectory.question
    # Ids are unique within a data set only.
    key = question.data_set, question.id
    group_ids.append(groups.setdefault(key, len(groups)))
    rows.append(_row(trajectory, group_ids[-1], states, sentences))
  longest = max(len(row['tokens']) for row in rows)
  shape = (len(rows), -(-longest // length_bucket) * length_bucket)
  arrays = {
    name: np.zeros(shape, value.dtype) for name, value in rows[0].items()
  }
  for n, row in enumerate(rows):
    for name, value in row.items():
      arrays[name][n, : len(value)] = value
  return batch_lib.TokenBatch(
    expert_ids=_expert_ids(trajectories, shape) if with_expert_ids else None,
    loss_positions_BM=loss_positions(arrays['loss_mask']),
    lengths_B=np.array([len(row['tokens']) for row in rows], np.int32),
    group_ids_B=np.array(group_ids, np.int32),
    **{f'{name}_BL': array for name, array in arrays.items()},
  )


def _expert_ids(
  trajectories: Sequence[types.Trajectory], shape: tuple[int, int]
) -> np.ndarray:
  """int16 [B, L, N, E]; -1, the router's choice, at padding.

  And in rows that failed, or that nobody played: they carry no loss.
  """
  known = [t.expert_ids for t in trajectories if t.expert_ids is not None]
  lacking = [
    trajectory.question.id
    for trajectory in trajectories
    if trajectory.expert_ids is None and _trains(trajectory)
  ]
  if lacking or not known:
    raise ValueError(
      'the experts that the sampler chose are not known of '
      f'{len(lacking)} of {len(trajectories)} trajectories'
    )
  arrays = np.full((*shape, *known[0].shape[1:]), -1, np.int16)
  for n, trajectory in enumerate(trajectories):
    if _trains(trajectory):
      arrays[n, : len(trajectory.expert_ids)] = trajectory.expert_ids
  return arrays


def _trains(trajectory: types.Trajectory) -> bool:
  sound = trajectory.status is not types.TrajectoryStatus.INFRA_ERROR
  return sound and len(trajectory.turns) > 0


def loss_positions(loss_mask_BL: np.ndarray) -> np.ndarray:
  """int32 [B, M]: where each row's mask is true, in order, then L.

  M is the least of a quarter, half, three quarters and all of L that suffices.
  """
  length = loss_mask_BL.shape[1]
  counts_B = loss_mask_BL.sum(axis=1)
  bucket = -(-length // _LOSS_BUCKETS)
  size = min(max(-(-counts_B.max() // bucket), 1) * bucket, length)
  # Stable: true ones first, each kind in order.
  order_BL = np.argsort(~loss_mask_BL, axis=1, kind='stable')
  real_BM = np.arange(size) < counts_B[:, None]
  return np.where(real_BM, order_BL[:, :size], length).astype(np.int32)


def _row(
  trajectory: types.Trajectory,
  group_id: int,
  states: dict[tuple[int, bytes | None], int],
  sentences: Sentences | None,
) -> dict[str, np.ndarray]:
  """The arrays of one trajectory, unpadded; numbers the states it meets."""
  tokens, logprobs = [trajectory.prompt_ids], [_zeros(trajectory.prompt_ids)]
  turn_ids, state_ids, sentence_ids, rewards = (
    [_zeros(trajectory.prompt_ids)] for _ in range(4)
  )
  observation, num_sentences = None, 0  # nothing observed: the first turn
  for turn_id, turn in enumerate(trajectory.turns, start=1):
    written, told = turn.token_ids, turn.observation_ids
    state_id = states.setdefault((group_id, observation), len(states) + 1)
    tokens += [written, told]
    logprobs += [turn.sampler_logprobs, _zeros(told)]
    turn_ids += [np.full(len(written), turn_id), _zeros(told)]
    state_ids += [np.full(len(written), state_id), _zeros(told)]
    if sentences is not None:
      numbers = num_sentences + sentences(written)
      num_sentences = max(numbers, default=num_sentences)
      sentence_ids += [numbers, _zeros(told)]
    earned = _zeros(written)
    earned[-1:] = turn.reward
    rewards += [earned, _zeros(told)]
    observation = np.asarray(told, np.int32).tobytes()
  valid = trajectory.status is not types.TrajectoryStatus.INFRA_ERROR
  row = {
    'tokens': _joined(tokens, np.int32),
    'turn_ids': _joined(turn_ids, np.int32),
    'sampler_logprobs': _joined(logprobs, np.float32),
    'rewards': _joined(rewards, np.float32),
    'state_ids': _joined(state_ids, np.int32),
  }
  row['loss_mask'] = (row['turn_ids'] > 0) & valid
  if sentences is not None:
    row['sentence_ids'] = _joined(sentence_ids, np.int32)
  if valid:
    row['rewards'][np.flatnonzero(row['turn_ids'])[-1:]] += trajectory.reward
  else:
    row['rewards'][:] = 0.0
  return row


def _zeros(ids: np.ndarray) -> np.ndarray:
  return np.zeros(len(ids))


def _joined(parts: Sequence[np.ndarray], dtype) -> np.ndarray:
  return np.concatenate(parts).astype(dtype)
