import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.rollout import answer_probes
from stppo_jax.rollout import pack
from tests.rollout import dialogues

_STATUS = types.TrajectoryStatus
_QUESTION = types.Question('q', 'Capital?', ('Paris', 'Lutetia'), 'nq')


class _Tokenizer:
  """Has a token for each character, and 9 for the tag."""

  def encode_text(self, text, *, tags=()):
    if text in tags:
      return np.array([9], np.int32)
    assert text in (' Paris', ' ')
    return np.array([70, 71], np.int32)


def _trajectory(*turns, question=_QUESTION, **options):
  turns = [(ids, [0] * len(ids), observation) for ids, observation in turns]
  return dialogues.trajectory(
    turns, question=question, rewards={'exact_match': 1.0}, **options
  )


_ASKED = _trajectory(([10, 11], [50]), ([12], [51, 52]), ([13], []))


def _build(*trajectories, max_length=99):
  return answer_probes.build(
    trajectories, _Tokenizer(), num_turns=4, max_length=max_length
  )


def _tokens(probe):
  read = [int(x) for x in probe.prompt_ids]
  return read, [int(x) for turn in probe.turns for x in turn.token_ids]


def test_probes_ask_for_the_answer_before_every_turn():
  assert [_tokens(probe) for probe in _build(_ASKED)] == [
    ([1, 2, 9], [70, 71]),
    ([1, 2, 10, 11, 50, 9], [70, 71]),
    ([1, 2, 10, 11, 50, 12, 51, 52, 9], [70, 71]),
    ([], []),
  ]


@pytest.mark.parametrize(
  ('trajectory', 'max_length', 'lengths'),
  [
    (_ASKED, 11, [5, 8, 11, 0]),
    (_ASKED, 10, [5, 8, 0, 0]),
    (_trajectory(([10], [50]), status=_STATUS.INFRA_ERROR), 99, [0] * 4),
    (
      _trajectory(([10], []), question=types.Question('q', '?', (), 'nq')),
      99,
      [0] * 4,
    ),
  ],
)
def test_probes_without_room_or_answer_have_no_token(
  trajectory, max_length, lengths
):
  probes = _build(_ASKED, trajectory, max_length=max_length)
  packed = pack.pack(probes, length_bucket=4)
  assert list(packed.lengths_B[4:]) == lengths
  assert list(packed.loss_mask_BL.sum(1)[4:]) == [2 * (x > 0) for x in lengths]


def test_gains_are_differences_of_the_probability():
  logprobs = np.log([0.1, 0.4, 0.2, 1.0, 0.5, 0.25, 1.0, 1.0])
  lengths = np.array([3, 5, 7, 0, 3, 5, 0, 0])
  np.testing.assert_allclose(
    answer_probes.gains(logprobs, lengths, 4),
    [[0.3, -0.2, 0], [-0.25, 0, 0]],
    atol=1e-12,
  )


def test_gains_are_rewards_on_the_last_token_of_their_turns():
  failed = _trajectory(([10], [50]), ([11], []), status=_STATUS.INFRA_ERROR)
  batch = pack.pack([_ASKED, failed], length_bucket=4)
  gains = np.array([[0.3, -0.2, 0], [0, 0, 0]])
  rewards_BL = answer_probes.rewarded(batch, gains, 2.0).rewards_BL
  expected = np.zeros(rewards_BL.shape)
  # Tokens: 2 of the prompt, 2 of turn 1, 1 read, 1 of turn 2, 2 read, turn 3.
  expected[0, [3, 5, 8]] = 0.6, -0.4, 1.0
  np.testing.assert_allclose(rewards_BL, expected, rtol=1e-6)
  assert batch.rewards_BL[0, 3] == 0  # what was packed stays as it was
