"""Dialogues and weights pass between hosts that learn and that collect."""

from concurrent import futures
import contextlib
import dataclasses
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.parallel import transfer
from stppo_jax.retrieval import protocol
from stppo_jax.rollout import collectors
from stppo_jax.rollout import deliveries
from stppo_jax.rollout import steps

_LEARNERS, _COLLECTORS, _GROUPS = 3, 2, 12


class _Whole(hosts_lib.Hosts):
  """A run of hosts that learn, and of others that collect."""

  collectors = _COLLECTORS

  def __init__(self, index):
    super().__init__(index, ['x'] * (_LEARNERS + _COLLECTORS))
    members = range(_LEARNERS), range(_LEARNERS, self.count)
    learns = index < _LEARNERS
    self.of_role = hosts_lib.Group(self, members[not learns], learns=learns)


def _trajectory(name, number):
  turn = types.Turn(
    token_ids=np.array([number, 2], np.int32),
    sampler_logprobs=np.array([-0.1, -1 / 3], np.float32),
    observation_ids=np.zeros(0, np.int32),
    action='search',
    reward=np.float32(0.1),
    truncated_logprobs=np.array([-0.1, -0.2], np.float32),
    passages=('p1', 'p2'),
    version=7,
  )
  last = dataclasses.replace(turn, truncated_logprobs=None, passages=())
  question = types.Question(
    name, 'Who?', ('a', 'ä'), 'set', options={'A': 'b'}, gold_passages=('p',)
  )
  return types.Trajectory(
    question=question,
    prompt_ids=np.arange(number, dtype=np.int32),
    turns=(turn, last),
    rewards={'em': np.float32(1 / 3)},
    status=types.TrajectoryStatus.TRUNCATED_LENGTH,
    scores={'em': 1, 'f1': 0.5},
    expert_ids=np.ones((2, 1, 1), np.int16),
    cause='none',
  )


def _group(name):
  return [_trajectory(name, number) for number in (3, 4)]


def _fields(record):
  """Returns the fields of a record as values that can be compared."""
  if dataclasses.is_dataclass(record):
    return {k: _fields(x) for k, x in vars(record).items()}
  if isinstance(record, tuple):
    return tuple(map(_fields, record))
  if isinstance(record, np.ndarray):
    return record.dtype.name, record.shape, record.tolist()
  return record


def test_nothing_of_a_trajectory_is_lost():
  group = _group('q')
  (found,) = deliveries.unpacked(*deliveries.packed([group]))
  assert list(map(_fields, found)) == list(map(_fields, group))


@dataclasses.dataclass
class _Steps:
  """Collects the groups of one host, of which the first one was replaced."""

  hosts: hosts_lib.Hosts
  num_groups: int = _GROUPS

  def collect_groups(self, step):
    mine = range(_GROUPS)[self.hosts.share(_GROUPS)]
    groups = [_group(f'{step}/{n}') for n in mine]
    first = [_group(f'old {step}/{mine[0]}'), *groups[1:]]
    return steps.Collection(groups, first, {'rollout/refilled_rows': 1.0})


@contextlib.contextmanager
def _run():
  """Yields what stands for the collectors on each learner, and deliveries."""
  with contextlib.ExitStack() as stack:
    servers = [
      stack.enter_context(
        contextlib.closing(transfer.Server('127.0.0.1', _COLLECTORS))
      )
      for _ in range(_LEARNERS)
    ]
    sides = [
      collectors.Collectors(
        server,
        lambda state: state,
        lambda params, with_base: ({'w': params}, {}),
        steps_ahead=1,
        old_is_sampled=True,
        swaps_turns=False,
        hosts=_Whole(n).of_role,
        environment=None,
        questions={},
      )
      for n, server in enumerate(servers)
    ]
    found = []
    for n in range(_LEARNERS, _LEARNERS + _COLLECTORS):
      client = transfer.Client([server.address for server in servers])
      stack.callback(client.close)
      hosts = _Whole(n).of_role
      found.append(collectors.Delivery(client, _Steps(hosts), hosts))
    yield sides, found


def test_each_learner_gets_the_groups_of_its_number():
  with _run() as (sides, found):
    for step in (0, 1):
      for delivery in found:
        delivery.collect(step)
    collected = []
    for side in sides:
      # The messages of a learner come one after the other, so if a later one is
      # there the earlier ones are, too.
      for message in side._messages('step 1'):
        message.result(10)
      collected.append(side.result(0))
    ids = [[t.question.id for t in x.trajectories] for x in collected]
    assert ids == [
      [f'0/{n}' for n in range(4 * k, 4 * k + 4) for _ in range(2)]
      for k in range(_LEARNERS)
    ]
    # Metrics describe the groups before some of them were replaced.
    first = [group[0].question.id for group in sides[1]._first_groups]
    assert first == ['0/4', '0/5', 'old 0/6', '0/7']
    assert collected[0].metrics == {
      'rollout/refilled_rows': 2.0,
      'hosts/steps_waiting': 2.0,
    }
    assert [len(x.seconds) for x in collected] == [_COLLECTORS, 0, 0]
    assert [x.metrics for x in collected[1:]] == [{}, {}]


def test_those_that_learn_hear_why_a_host_cannot_collect():
  with _run() as (sides, found):
    found[0].collect(0)
    error = protocol.RetrieverUnreachable('not ready')
    found[1].send_failure(0, error)
    for side in sides:
      with pytest.raises(collectors.CollectorFailed) as raised:
        side.result(0)
      assert str(raised.value) == (
        'host 4 (x): RetrieverUnreachable: not ready'
      )
      assert raised.value.exit_code == 75 and raised.value.saves


def test_hosts_that_collect_do_what_the_others_need():
  """A run resumes after five steps, and is evaluated after seven."""
  prefetchers = [mock.Mock() for _ in range(_COLLECTORS)]
  with _run() as (sides, found), futures.ThreadPoolExecutor() as threads:
    following = [
      threads.submit(
        collectors.follow,
        delivery._client,
        prefetcher,
        delivery,
        lambda params: ({'val/em': float(params)}, [_trajectory('q', 3)]),
        joined=lambda trained, base: trained['w'],
        steps_ahead=1,
      )
      for prefetcher, delivery in zip(prefetchers, found, strict=True)
    ]
    for side in sides:
      side.restore(5, [jnp.float32(4.5)])
      side.schedule(5, jnp.float32(5.5))
      assert side.old_policy(5) == 4.5
      side.schedule(6, jnp.float32(6.5))
      assert side.old_policy(6) == 5.5
    evaluated = [
      threads.submit(side.evaluate, jnp.float32(7.5)) for side in sides
    ]
    for side, future in zip(sides, evaluated, strict=True):
      metrics, trajectories = future.result(30)
      assert metrics == {'val/em': 7.5}
      assert len(trajectories) == (_COLLECTORS if side is sides[0] else 0)
      side.close()
    for future in following:
      future.result(30)
  for prefetcher in prefetchers:
    assert prefetcher.mock_calls == [
      mock.call.restore(5, [4.5]),
      mock.call.schedule(5, 5.5),
      mock.call.result(5),
      mock.call.schedule(6, 6.5),
      mock.call.result(6),
      mock.call.drain(),
    ]
