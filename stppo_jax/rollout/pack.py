"""Packs trajectories into the arrays of a batch.

B trajectories, L tokens, M loss positions, E experts to which a token is
routed.

Each of several hosts packs its own trajectories. The hosts agree on L and M. A
group, and a state (a question with the latest observation), gets the same
number as if a single host packed all rows.
"""

from collections.abc import Callable, Sequence
import hashlib
from typing import Any, NamedTuple

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import types
from stppo_jax.parallel import hosts as hosts_lib

# A function of a turn's tokens. It returns, for each token, the number of the
# token's sentence: 1, 2, ...
Sentences = Callable[[np.ndarray], np.ndarray]

# M is a multiple of about L / 4, because a program is compiled for each M.
_LOSS_BUCKETS = 4


class _Labels(NamedTuple):
  """Holds labels that identify a row's group and states.

  Attributes:
    group: the data set and the id of the question; ids are unique only within a
      data set.
    observations: for each turn, a digest of the observation before the turn.
  """

  group: tuple[str, str]
  observations: list[str]


class _TokenArrays(NamedTuple):
  """Holds one element per token: [L] for a trajectory, [B, L] for a batch.

  See the fields of the same names in `batch.TokenBatch`.
  """

  tokens: np.ndarray
  turn_ids: np.ndarray
  loss_mask: np.ndarray
  sampler_logprobs: np.ndarray
  rewards: np.ndarray
  state_ids: np.ndarray
  sentence_ids: np.ndarray | None
  staleness: np.ndarray | None


def pack(
  trajectories: Sequence[types.Trajectory],
  *,
  length_bucket: int,
  sentences: Sentences | None = None,
  with_expert_ids: bool = False,
  step: int | None = None,
  hosts: hosts_lib.Hosts = hosts_lib.ALONE,
) -> batch_lib.TokenBatch:
  """Returns a batch of trajectories as right-padded numpy arrays.

  The rows of the batch are the trajectories, in the given order. A row that
  ended in INFRA_ERROR keeps its tokens, but its loss mask is empty and its
  rewards are 0, so it has no weight in the update. The reward of a turn is put
  at the turn's last token, and the outcome reward at the row's last policy
  token. If both are at the same token, they are added.

  Args:
    trajectories: the trajectories of this host; at least one.
    length_bucket: a number of tokens; L is a multiple of it.
    sentences: see `SentenceSplitter`; if None, the batch has no sentence ids.
    with_expert_ids: whether the batch has the experts that the sampler chose.
    step: the number of training steps that made the policy that learns. If it
      is given, the batch has `staleness_BL`: by how many steps the policy that
      wrote a turn is older than the policy that learns.
    hosts: the hosts whose rows together make a batch.

  Raises:
    ValueError: if `with_expert_ids` is set and these experts are not known.
  """
  labels = [_labels(trajectory) for trajectory in trajectories]
  sizes = [_sizes(trajectory) for trajectory in trajectories]
  lengths, losses = zip(*sizes)
  # The hosts agree on shapes before they run a program together: with different
  # shapes they would wait for each other for ever.
  mine = {'labels': labels, 'length': max(lengths), 'losses': max(losses)}
  parts = hosts.exchange('rows', mine)
  numbered = _number([part['labels'] for part in parts])
  group_ids, state_ids = numbered[hosts.index]
  rows = [
    _token_arrays(*row, sentences, step) for row in zip(trajectories, state_ids)
  ]
  longest = max(part['length'] for part in parts)
  most_losses = max(part['losses'] for part in parts)
  shape = (len(rows), -(-longest // length_bucket) * length_bucket)
  stacked = _TokenArrays(*(_stacked(column, shape) for column in zip(*rows)))
  # The type is `Any`, because `TokenBatch` is annotated with jax arrays, which
  # the numpy arrays become later.
  fields: dict[str, Any] = {
    'loss_positions_BM': loss_positions(stacked.loss_mask, most_losses),
    'lengths_B': np.array(lengths, np.int32),
    'group_ids_B': np.array(group_ids, np.int32),
  }
  if with_expert_ids:
    fields['expert_ids'] = _expert_ids(trajectories, shape)
  for name, array in stacked._asdict().items():
    fields[f'{name}_BL'] = array
  return batch_lib.TokenBatch(**fields)


def _stacked(column: Sequence[Any], shape: tuple[int, int]) -> Any:
  """Returns the arrays of all trajectories as one array, padded with 0.

  If the arrays are None, the result is None.
  """
  if column[0] is None:
    return None
  stacked_BL = np.zeros(shape, column[0].dtype)
  for n, x_L in enumerate(column):
    stacked_BL[n, : len(x_L)] = x_L
  return stacked_BL


def _expert_ids(
  trajectories: Sequence[types.Trajectory], shape: tuple[int, int]
) -> np.ndarray:
  """Returns the experts that the sampler chose for each token.

  Returns:
    int16 [B, L, layers, E]. At padding, and in rows without loss (rows that
    failed or have no turn), it is -1, which leaves the choice to the router.
  """
  known = [t.expert_ids for t in trajectories if t.expert_ids is not None]
  missing = [t for t in trajectories if _trains(t) and t.expert_ids is None]
  if missing or not known:
    raise ValueError(
      f'{len(missing)} of {len(trajectories)} trajectories lack the experts '
      'that the sampler chose'
    )
  expert_ids = np.full((*shape, *known[0].shape[1:]), -1, np.int16)
  for n, trajectory in enumerate(trajectories):
    if _trains(trajectory) and trajectory.expert_ids is not None:
      expert_ids[n, : len(trajectory.expert_ids)] = trajectory.expert_ids
  return expert_ids


def _trains(trajectory: types.Trajectory) -> bool:
  return trajectory.is_valid and len(trajectory.turns) > 0


def loss_positions(loss_mask_BL: np.ndarray, most: int = 0) -> np.ndarray:
  """Returns the positions of each row's loss tokens, padded with L.

  The result is int32 [B, M]. M is a quarter, a half, three quarters or all of
  L, whichever is the smallest that suffices.

  Args:
    loss_mask_BL: the tokens that are trained on.
    most: the largest number of such tokens in a row of any host. The rows of
      the mask are counted anyway, so `most` may be 0 without other hosts.
  """
  length = loss_mask_BL.shape[1]
  counts_B = loss_mask_BL.sum(axis=1)
  bucket = -(-length // _LOSS_BUCKETS)
  most = max(most, counts_B.max())
  size = min(max(-(-most // bucket), 1) * bucket, length)
  # A stable sort puts the true positions first, and keeps their order.
  order_BL = np.argsort(~loss_mask_BL, axis=1, kind='stable')
  real_BM = np.arange(size) < counts_B[:, None]
  return np.where(real_BM, order_BL[:, :size], length).astype(np.int32)


def _labels(trajectory: types.Trajectory) -> _Labels:
  """Returns the labels of a row."""
  question = trajectory.question
  # Digests are short, which matters because hosts exchange the labels of all
  # rows. The first turn of a dialogue follows the prompt, and its label is '',
  # which no digest equals.
  observations = [''] + [
    hashlib.blake2b(
      np.asarray(turn.observation_ids, np.int32).tobytes(), digest_size=16
    ).hexdigest()
    for turn in trajectory.turns
  ]
  return _Labels((question.data_set, question.id), observations[:-1])


def _sizes(trajectory: types.Trajectory) -> tuple[int, int]:
  """Returns how many tokens a row has, and how many of them have a loss."""
  policy = sum(len(turn.token_ids) for turn in trajectory.turns)
  others = sum(len(turn.observation_ids) for turn in trajectory.turns)
  length = len(trajectory.prompt_ids) + policy + others
  return length, policy if trajectory.is_valid else 0


def _number(
  parts: Sequence[Sequence[Sequence[Any]]],
) -> list[tuple[list[int], list[list[int]]]]:
  """Returns the group numbers and the state numbers of the rows of each host.

  Groups and states are numbered in the order in which they first appear. A
  state is a question together with the latest observation.
  """
  groups, states = {}, {}
  numbered = []
  for part in parts:
    group_ids, state_ids = [], []
    for group, observations in part:
      group_id = groups.setdefault(tuple(group), len(groups))
      group_ids.append(group_id)
      # States are numbered from 1, because 0 marks tokens that the policy did
      # not write.
      state_ids.append(
        [
          states.setdefault((group_id, observation), len(states) + 1)
          for observation in observations
        ]
      )
    numbered.append((group_ids, state_ids))
  return numbered


def _token_arrays(
  trajectory: types.Trajectory,
  row_state_ids: Sequence[int],
  sentences: Sentences | None,
  step: int | None,
) -> _TokenArrays:
  """Returns the arrays of one trajectory.

  Args:
    trajectory: the trajectory.
    row_state_ids: for each turn, the number of the state in which it began.
    sentences, step: see `pack`.
  """
  # Every list gets an array for the prompt, and then two arrays for each turn:
  # one for its tokens and one for its observation. All lists grow together, so
  # that index l of each joined list belongs to token l.
  tokens = [trajectory.prompt_ids]
  logprobs, turn_ids, state_ids, sentence_ids, rewards, staleness = (
    [_zeros(trajectory.prompt_ids)] for _ in range(6)
  )
  num_sentences = 0
  for turn_id, turn in enumerate(trajectory.turns, start=1):
    zeros = _zeros(turn.observation_ids)
    state_id = row_state_ids[turn_id - 1]
    turn_reward = _zeros(turn.token_ids)
    # If the turn is empty, the slice is empty, and no token gets the reward.
    turn_reward[-1:] = turn.reward
    tokens += [turn.token_ids, turn.observation_ids]
    logprobs += [turn.sampler_logprobs, zeros]
    turn_ids += [np.full(len(turn.token_ids), turn_id), zeros]
    state_ids += [np.full(len(turn.token_ids), state_id), zeros]
    rewards += [turn_reward, zeros]
    if step is not None:
      behind = np.full(len(turn.token_ids), step - turn.version)
      staleness += [behind, zeros]
    if sentences is not None:
      numbers = num_sentences + sentences(turn.token_ids)
      num_sentences = max(numbers, default=num_sentences)
      sentence_ids += [numbers, zeros]
  turn_ids_L = _joined(turn_ids, np.int32)
  rewards_L = _joined(rewards, np.float32)
  is_policy_L = turn_ids_L > 0
  # If the policy wrote nothing, the slice is empty, and no token gets the
  # reward.
  if trajectory.is_valid:
    rewards_L[np.flatnonzero(is_policy_L)[-1:]] += trajectory.reward
  else:
    rewards_L[:] = 0.0
  return _TokenArrays(
    tokens=_joined(tokens, np.int32),
    turn_ids=turn_ids_L,
    loss_mask=is_policy_L & trajectory.is_valid,
    sampler_logprobs=_joined(logprobs, np.float32),
    rewards=rewards_L,
    state_ids=_joined(state_ids, np.int32),
    sentence_ids=None if sentences is None else _joined(sentence_ids, np.int32),
    staleness=None if step is None else _joined(staleness, np.int32),
  )


def _zeros(ids: np.ndarray) -> np.ndarray:
  return np.zeros(len(ids))


def _joined(arrays: Sequence[np.ndarray], dtype) -> np.ndarray:
  return np.concatenate(arrays).astype(dtype)


# The most batch lengths in a run. The programs that annotate and update are
# compiled for every batch length, and for every number of loss positions at
# that length (see `loss_positions`).
MAX_LENGTHS = 8


def unit(bucket: int, *, max_length: int) -> int:
  """Returns a number of tokens that divides the length of every batch.

  The number is the smallest multiple of `bucket` with which batches have at
  most `MAX_LENGTHS` different lengths.

  Args:
    bucket: a number of tokens, `rollout.length_bucket`.
    max_length: the number of tokens of the longest trajectory.
  """
  return -(-max_length // (MAX_LENGTHS * bucket)) * bucket


_ENDS = b'.?!\n'


class SentenceSplitter:
  """Maps the tokens of a turn to the numbers of their sentences.

  The rule is our own choice. A sentence ends at `.`, `?`, `!` or a line break
  of the decoded turn. The token that contains such a character is the last
  token of the sentence, whatever else it contains. Every such character ends a
  sentence, including the periods in "3.14" and "...". But a token with several
  of them ends one sentence only.

  The bytes of a token are enough to find the ends. The four characters are
  ASCII, and no byte of a longer UTF-8 character is ASCII. So the rule also
  works where a character is spread over several tokens.

  Args:
    token_bytes: the bytes that each id adds to the text, see
      `sampling.tokenizer.Tokenizer.token_bytes`. Higher ids, which a padded
      vocabulary has, add no bytes.
  """

  def __init__(self, token_bytes: Sequence[bytes]):
    ends = [any(end in piece for end in _ENDS) for piece in token_bytes]
    # The last entry is for ids beyond `token_bytes`, which end no sentence.
    self._ends_V = np.array([*ends, False])

  def __call__(self, token_ids: np.ndarray) -> np.ndarray:
    """Returns int32 [L], the number of each token's sentence: 1, 2, ..."""
    closes_L = self._ends_V[np.minimum(token_ids, len(self._ends_V) - 1)]
    return (1 + np.cumsum(closes_L) - closes_L).astype(np.int32)
