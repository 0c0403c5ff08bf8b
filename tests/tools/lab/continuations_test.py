"""Values are sampled where they can be, and a failure ends a continuation."""

import asyncio
import dataclasses
from unittest import mock

import numpy as np
import pytest

from stppo_jax import exits
from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.tools.lab import continuations
from tests.training import runs


@pytest.mark.parametrize(
  ('algorithm', 'count', 'changes', 'named'),
  [
    ('st_ppo', 1, {}, '--continuations=1'),
    ('st_ppo', 5, {}, '--continuations=5'),
    ('st_ppo', 2, {'algorithm__advantage__gamma': 0.9}, 'gamma=0.9'),
    ('bilevel_ppo', 2, {}, 'gamma_turn=0.95'),
    ('st_ppo', 2, {'env__rewards__information_gain': 1.0}, 'information_gain'),
  ],
)
def test_values_that_cannot_be_sampled_are_refused(
  algorithm, count, changes, named
):
  config = runs.config(algorithm, **changes)
  with pytest.raises(exits.Misconfigured, match=named) as caught:
    continuations.check(config, count, slots=8)
  assert '\n' not in str(caught.value)


def test_what_can_be_sampled_is_not_refused():
  config = runs.config()
  continuations.check(config, 4, slots=8)
  continuations.check(config, 5, slots=0)  # a remote engine has no slots


def _prefix():
  ids, zeros = np.arange(2, dtype=np.int32), np.zeros(2, np.float32)
  turn = types.Turn(ids, zeros, ids, 'search', 0.0)
  question = types.Question('q', 'text', ('x',), 'set')
  trajectory = types.Trajectory(
    question, ids, (turn, turn), {}, types.TrajectoryStatus.COMPLETED, {}, 0
  )
  return continuations.prefixes([trajectory])[2]  # before the second turn


def _continued(step):
  """Returns the step of a continuation whose recorded turn is answered so."""
  inner = mock.Mock(spec=protocol.Episode)
  inner.step = mock.AsyncMock(return_value=step)
  environment = mock.Mock(tags=(), tools=(), episode=lambda _: inner)
  tokenizer = mock.Mock(decode=str)
  adapted, _ = continuations.continuing(environment, tokenizer)
  question = mock.Mock(prefix=_prefix())
  episode = adapted.episode(question)
  return asyncio.run(episode.step(question, 0, 'new')), inner


def test_recorded_turns_are_answered_before_the_first_new_one():
  observation = protocol.Observation('', 'o', '')
  step, inner = _continued(protocol.Step('search', observation, None))
  assert step.status is None
  assert [call.args[1] for call in inner.step.await_args_list] == [0, 1]


def test_a_continuation_fails_if_a_recorded_turn_does():
  failed = protocol.Step(
    'search', None, types.TrajectoryStatus.INFRA_ERROR, cause='timeout'
  )
  step, inner = _continued(failed)
  assert step.status is types.TrajectoryStatus.INFRA_ERROR
  assert step.cause == 'timeout' and inner.step.await_count == 1
  ended = dataclasses.replace(
    failed, status=types.TrajectoryStatus.COMPLETED, cause=''
  )
  step, _ = _continued(ended)
  assert step.status is types.TrajectoryStatus.INFRA_ERROR and step.cause
