"""The batch of a step has the information gains of its turns."""

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.training import build
from stppo_jax.workdir import agreement
from tests.training import runs
from tests.workdir import two_hosts

_WEIGHT = 10.0
_METRIC = 'information_gain/not_finite'


class _Tokenizer:
  def encode_text(self, text, *, tags=()):
    del tags
    return np.arange(len(text.split()), dtype=np.int32)


class _Learner:
  """Finds the answer likelier in every further probe of a row."""

  def __init__(self, *probabilities):
    self._probabilities = probabilities

  def mean_logprobs(self, state, probes):
    del state
    rows = len(probes.lengths_B) // len(self._probabilities)
    return np.log(np.tile(self._probabilities, rows))


def _trajectory(*golden):
  ids = np.array([1, 2], np.int32)
  turns = [
    types.Turn(ids, np.zeros(2, np.float32), ids, 'search') for _ in range(2)
  ]
  question = types.Question('q', 'Capital?', golden, 'nq')
  return types.Trajectory(
    question, ids, tuple(turns), {}, types.TrajectoryStatus.COMPLETED
  )


def _pack(trajectories, learner, hosts=hosts_lib.ALONE):
  return build.pack_step(
    trajectories,
    None,
    0,
    config=runs.config(env__rewards__information_gain=_WEIGHT),
    tokenizer=_Tokenizer(),
    learner=learner,
    sentences=None,
    hosts=hosts,
  )


@pytest.mark.parametrize(
  ('second', 'reward', 'lost'), [(0.5, 4.0, 0), (np.nan, 0.0, 1)]
)
def test_gains_that_are_not_finite_are_counted_and_no_rewards(
  second, reward, lost
):
  batch, metrics = _pack([_trajectory('Paris')], _Learner(0.1, second, 0.9))
  expected = np.zeros(batch.rewards_BL.shape)
  expected[0, 3] = reward  # two tokens of the prompt, two of the first turn
  np.testing.assert_allclose(batch.rewards_BL, expected, rtol=1e-6)
  assert metrics == {_METRIC: lost}


@pytest.mark.parametrize('hosts', [hosts_lib.ALONE, two_hosts.TwoHosts()])
def test_a_step_without_golden_answers_asks_nothing(hosts):
  batch, metrics = _pack([_trajectory()], learner=None, hosts=hosts)
  assert not batch.rewards_BL.any()
  assert metrics == {_METRIC: 0}


def test_a_host_without_a_probe_asks_with_the_others():
  hosts = two_hosts.TwoHosts(
    probes=True, rows=lambda mine: mine | {'length': 9}
  )
  batch, _ = _pack([_trajectory()], _Learner(0.1, 0.5, 0.9), hosts)
  assert not batch.rewards_BL.any()
  # The shapes are compared before the first program, and before the second.
  assert [what for what, _, _ in hosts.heard] == [
    *('rows', 'program', 'probes', 'rows', 'program', 'gains')
  ]


def test_hosts_compare_the_shapes_of_their_probes():
  def other_tokens(mine):
    if mine['the program'] != 'information gain':
      return mine
    return mine | {'the part of tokens_BL': 'int32[3, 64]'}

  hosts = two_hosts.TwoHosts(program=other_tokens)
  with pytest.raises(agreement.HostsDiffer, match='tokens_BL differs'):
    _pack([_trajectory('Paris')], learner=None, hosts=hosts)
