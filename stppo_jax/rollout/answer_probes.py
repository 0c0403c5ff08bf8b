"""Measures how likely the golden answer is before each turn.

B trajectories, L tokens, T turns. A probe is the part of a dialogue before one
of its turns, followed by `<answer>` and the golden answer. The mean
log-probability of the answer's tokens says how well the policy can answer from
the tokens that it has read. The information gain of a turn is the increase of
the answer's probability from before the turn to after the turn's observation:
IGPO, arXiv 2510.14967. We have added two rules of our own. A probe has only the
first golden answer, and a space stands between the tag and the answer.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stppo_jax import batch as batch_lib
from stppo_jax import types
from stppo_jax.envs import rewards as rewards_lib
from stppo_jax.rollout import collect

_TAG = '<answer>'


def build(
  trajectories: Sequence[types.Trajectory],
  tokenizer: collect.Tokenizer,
  *,
  num_turns: int,
  max_length: int,
) -> list[types.Trajectory]:
  """Returns T probes of each trajectory, one for each turn that it may have.

  Probe k consists of the dialogue before turn k, `<answer>` and the golden
  answer. It is empty if the trajectory has no turn k or failed, if the probe
  would be longer than `max_length`, or if there is no golden answer.

  Args:
    trajectories: dialogues of the search environment.
    tokenizer: the policy's tokenizer.
    num_turns: T, the most turns of a trajectory.
    max_length: the most tokens of a dialogue.
  """
  opening = tokenizer.encode_text(_TAG, tags=(_TAG,))
  probes = []
  for trajectory in trajectories:
    golden = next(iter(rewards_lib.golden_texts(trajectory.question)), '')
    answer = tokenizer.encode_text(f' {golden}')
    asks = golden and trajectory.is_valid
    read = trajectory.prompt_ids
    for turn in range(num_turns):
      exists = asks and turn < len(trajectory.turns)
      # `read` has the tokens that the policy has read before this turn.
      if exists and turn:
        asked = trajectory.turns[turn - 1]
        read = np.concatenate([read, asked.token_ids, asked.observation_ids])
      if len(read) + len(opening) + len(answer) > max_length:
        exists = False
      probes.append(
        _dialogue(
          trajectory.question,
          # A missing probe becomes an empty row. So each trajectory has T
          # probes, and results can have the shape [B, T].
          np.concatenate([read, opening]) if exists else read[:0],
          [answer] if exists else [],
        )
      )
  return probes


def _dialogue(question, prompt_ids, texts) -> types.Trajectory:
  turns = [
    types.Turn(x, np.zeros(len(x), np.float32), x[:0], 'answer') for x in texts
  ]
  return types.Trajectory(
    question, prompt_ids, tuple(turns), {}, types.TrajectoryStatus.COMPLETED
  )


def gains(
  logprobs: np.ndarray, lengths: npt.ArrayLike, num_turns: int
) -> np.ndarray:
  """Returns the information gain of each turn except turn T.

  Args:
    logprobs: the mean log-probability of the answer in each probe.
    lengths: the number of tokens of each probe; 0 if the probe is empty.
    num_turns: T, the number of probes of a trajectory.

  Returns:
    float [B, T - 1]: for turn k, p after the turn's observation minus p before
    the turn. p is the exponential of the mean log-probability of the answer.
    The gain is 0 if one of the two probes is empty. Otherwise it is nan if one
    of the two log-probabilities is nan.
  """
  p_BT = np.exp(logprobs.astype(np.float64)).reshape(-1, num_turns)
  exists_BT = (np.asarray(lengths) > 0).reshape(-1, num_turns)
  both_BT = exists_BT[:, 1:] & exists_BT[:, :-1]
  return np.where(both_BT, np.diff(p_BT, axis=1), 0.0)


def rewarded(
  batch: batch_lib.TokenBatch, gains_BT: np.ndarray, weight: float
) -> batch_lib.TokenBatch:
  """Returns the packed batch with the gains added to the rewards of turns.

  Args:
    batch: numpy arrays, see `pack.pack`.
    gains_BT: the gains of turns 1, 2, ... of each row.
    weight: the factor that a gain is multiplied with.
  """
  rewards_BL = np.array(batch.rewards_BL)
  for b, turn in np.argwhere(gains_BT != 0):
    last = np.flatnonzero(batch.turn_ids_BL[b] == turn + 1)[-1:]
    rewards_BL[b, last] += weight * gains_BT[b, turn]
  return batch.replace(rewards_BL=rewards_BL)
