"""Gathers the trajectories of several hosts at the first one.

The first host measures all trajectories as if it had collected them itself, so
a metric does not depend on the number of hosts. The others send it what metrics
read: the trajectories, with the length of an array of tokens in its place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.rollout import deliveries

Groups = list[list[types.Trajectory]]
# Of these numbers the largest of all hosts is taken, and not the sum:
# percentiles do not add up, and hosts wait for an outage or collect further
# rounds at the same time.
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
    [deliveries.from_plain(t, _values) for t in group]
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
  plain = deliveries.to_plain(trajectory, len)
  plain['expert_ids'] = None
  for turn, fields in zip(trajectory.turns, plain['turns'], strict=True):
    if turn.truncated_logprobs is not None:
      # Metrics read only the difference between the two. `_values` makes zeros
      # of the other one.
      change = turn.truncated_logprobs - turn.sampler_logprobs
      fields['truncated_logprobs'] = change.tolist()
  return plain


def _values(held: Any) -> np.ndarray:
  """Returns the array that a length or a list of values stands for."""
  # Zeros of the right length: metrics count tokens and do not read them.
  if isinstance(held, int):
    return np.zeros(held, np.float32)
  return np.asarray(held, np.float32)
