"""The section `alarms`: thresholds that metrics of a step are compared with.

`training/alarms.py` has the rules. The defaults were set so that healthy runs
of the quickstart are silent; another model and other questions may need others.
A threshold of inf or -inf silences its alarm.
"""

from typing import Any


def section() -> dict[str, Any]:
  """Returns the section: thresholds by the names of alarms, and OPTIONS."""
  return {
    # The largest share of repeated text: of policy tokens that, with the three
    # before them, are a sequence that the same turn has had before.
    'repetition': 0.5,
    'entropy': 0.01,  # the least entropy of the policy, in nats
    'turn_ratio': 5.0,  # the largest ratio of a turn
    'zero_variance': 0.9,  # the largest share of groups without variance
    'explained_variance': -0.5,  # the least explained variance of the values
    # The largest share of searches that find nothing, of ten or more.
    'empty_answers': 0.99,
    'finish_ratio': 0.2,  # the least share of trajectories with an answer
    'search_rate': 0.05,  # the least number of searches per trajectory
    'kl': 1.0,  # the largest divergence from the reference, nats per token
    # The largest share of trajectories that the infrastructure may fail.
    'infrastructure': 0.05,
    # The alarms that end the run, once its state is saved, with exit code 76.
    # A run must not learn from a retriever that never finds anything.
    'stop': ('empty_answers',),
    # How many steps in a row such an alarm rings before the run ends.
    'stop_after': 5,
  }


OPTIONS = ('stop', 'stop_after')
THRESHOLDS = tuple(key for key in section() if key not in OPTIONS)
