"""Gathers the trajectories of several hosts at the first host.

The first host computes the metrics of all trajectories as if it had collected
them itself, so a metric does not depend on the number of hosts. The other hosts
send only the data that metrics read: the trajectories, in which the length of
each array of tokens replaces the array.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stppo_jax import types
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.rollout import deliveries

Groups = list[list[types.Trajectory]]
# These counts are joined by their maximum over hosts, not by their sum.
# Latencies are percentiles, which do not add up. The hosts wait out an outage
# at the same time, and resample at the same time.
_LARGEST = (
  'retrieval/latency',
  'retrieval/outage',
  'rollout/resample_rounds',
)


def gather(
  hosts: hosts_lib.Hosts, groups: Groups, counts: Mapping[str, float]
) -> tuple[Groups, dict[str, float]]:
  """Returns the groups and the counts of all hosts, on the first host.

  Args:
    hosts: the hosts of the run.
    groups: the trajectories of this host.
    counts: the counts of this host by name, see `joined`.

  Returns:
    On the first host, the groups of all hosts in order, and the joined counts.
    The arrays of tokens in these groups have the right lengths, but no values.
    On other hosts, the given groups and counts.
  """
  plain = [[_to_plain(t) for t in group] for group in groups]
  # The trajectories are sent as JSON, because hosts exchange text and must not
  # unpickle data of other hosts.
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
  """Returns the counts of several hosts, joined into one value per name."""
  found = {}
  for name in dict.fromkeys(name for part in counts for name in part):
    values = [part.get(name, 0.0) for part in counts]
    found[name] = max(values) if name.startswith(_LARGEST) else sum(values)
  return found


def _to_plain(trajectory: types.Trajectory) -> dict[str, Any]:
  """Returns the data of a trajectory that metrics read, as a JSON value."""
  plain = deliveries.to_plain(trajectory, len)
  plain['expert_ids'] = None
  for turn, fields in zip(trajectory.turns, plain['turns'], strict=True):
    if turn.truncated_logprobs is not None:
      # Metrics read only the difference between the two log-probabilities. The
      # receiver gets zeros in place of `sampler_logprobs`, see `_values`.
      change = turn.truncated_logprobs - turn.sampler_logprobs
      fields['truncated_logprobs'] = change.tolist()
  return plain


def _values(held: Any) -> np.ndarray:
  """Returns an array: the list `held`, or zeros if `held` is their number."""
  # Metrics count tokens and do not read them, so zeros are enough.
  if isinstance(held, int):
    return np.zeros(held, np.float32)
  return np.asarray(held, np.float32)
