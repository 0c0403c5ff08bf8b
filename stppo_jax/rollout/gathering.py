"""Gathers the trajectories of several hosts at the first one.

The first host measures all trajectories as if it had collected them itself: so
a metric does not depend on the number of hosts. It gets what metrics read of a
trajectory, which is everything but the values of tokens.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.parallel import hosts as hosts_lib

Groups = list[list[types.Trajectory]]
# Of these, the largest of all hosts counts: percentiles do not add up, and
# hosts wait for an outage or collect further rounds side by side.
_LARGEST = (
  'retrieval/latency',
  'retrieval/outage',
  'rollout/resample_rounds',
)


def gather(
  hosts: hosts_lib.Hosts, groups: Groups, counts: Mapping[str, float]
) -> tuple[Groups, dict[str, float]]:
  """Returns the groups and the counts of all hosts to the first one.

  Args:
    hosts: the hosts of the run.
    groups: trajectories of this host.
    counts: numbers that hosts add up, by name.

  Returns:
    On the first host, all groups in order, whose arrays of tokens have the
    right lengths and no values, and the joined counts; elsewhere what was
    given.
  """
  plain = [[_to_plain(t) for t in group] for group in groups]
  # As JSON: hosts exchange text, and nothing that one host sends is unpickled.
  parts = hosts.gather('collection', {'groups': plain, 'counts': dict(counts)})
  if parts is None:
    return groups, dict(counts)
  every = [
    [_from_plain(t) for t in group]
    for part in parts
    for group in part['groups']
  ]
  return every, joined([part['counts'] for part in parts])


def joined(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the counts of several hosts as those of all."""
  found = {}
  for name in dict.fromkeys(name for part in counts for name in part):
    values = [part.get(name, 0.0) for part in counts]
    found[name] = max(values) if name.startswith(_LARGEST) else sum(values)
  return found


def _to_plain(trajectory: types.Trajectory) -> dict[str, Any]:
  """Returns what metrics read of a trajectory, as JSON can write it."""
  question = trajectory.question
  return {
    'question': dataclasses.asdict(dataclasses.replace(question, options={})),
    'prompt': len(trajectory.prompt_ids),
    'turns': [
      {
        'tokens': len(turn.token_ids),
        'observation': len(turn.observation_ids),
        'action': turn.action,
        'version': turn.version,
        'reward': float(turn.reward),
        # Only this difference of the log-probabilities is in a metric.
        'truncation': None
        if turn.truncated_logprobs is None
        else (turn.truncated_logprobs - turn.sampler_logprobs).tolist(),
      }
      for turn in trajectory.turns
    ],
    'rewards': {name: float(x) for name, x in trajectory.rewards.items()},
    'status': trajectory.status.value,
    'scores': {name: float(x) for name, x in trajectory.scores.items()},
    'cause': trajectory.cause,
  }


def _from_plain(plain: Mapping[str, Any]) -> types.Trajectory:
  question = plain['question']
  golden_answers = tuple(question['golden_answers'])
  return types.Trajectory(
    question=types.Question(**{**question, 'golden_answers': golden_answers}),
    prompt_ids=np.zeros(plain['prompt'], np.int32),
    turns=tuple(_turn(turn) for turn in plain['turns']),
    rewards=plain['rewards'],
    status=types.TrajectoryStatus(plain['status']),
    scores=plain['scores'],
    cause=plain['cause'],
  )


def _turn(plain: Mapping[str, Any]) -> types.Turn:
  truncation = plain['truncation']
  return types.Turn(
    # Zeros of the right lengths: metrics count tokens and do not read them.
    token_ids=np.zeros(plain['tokens'], np.int32),
    sampler_logprobs=np.zeros(plain['tokens'], np.float32),
    observation_ids=np.zeros(plain['observation'], np.int32),
    action=plain['action'],
    version=plain['version'],
    reward=plain['reward'],
    truncated_logprobs=None
    if truncation is None
    else np.asarray(truncation, np.float32),
  )
