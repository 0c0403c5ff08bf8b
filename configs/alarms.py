"""The section `alarms`: thresholds for the metrics of a step.

`training/alarms.py` has the rules. With the default thresholds, no alarm rings
in healthy runs of the quickstart. Another model or other questions may need
other thresholds. A threshold of inf or -inf silences its alarm.
"""

from typing import Any


def section() -> dict[str, Any]:
  """Returns the section: the alarms' thresholds, and when alarms end a run."""
  return {
    # The largest share of repeated text: the share of policy tokens that end a
    # sequence of four tokens which occurred earlier in the same turn.
    'repetition': 0.5,
    'entropy': 0.01,  # the least entropy of the policy, in nats
    'turn_ratio': 5.0,  # the largest ratio of a turn
    'zero_variance': 0.9,  # the largest share of groups without variance
    'explained_variance': -0.5,  # the least explained variance of the values
    # The largest share of searches that find nothing, if a step has ten
    # searches or more.
    'empty_answers': 0.99,
    'finish_ratio': 0.2,  # the least share of trajectories with an answer
    'search_rate': 0.05,  # the least number of searches per trajectory
    'kl': 1.0,  # the largest divergence from the reference, nats per token
    # The largest share of trajectories that the infrastructure makes fail.
    'infrastructure': 0.05,
    # The alarms that end the run, once its state is saved, with exit code 76.
    # A run must not learn from a retriever that never finds anything.
    'stop': ('empty_answers',),
    # The number of steps in a row in which such an alarm rings before the run
    # ends.
    'stop_after': 5,
  }


OPTIONS = ('stop', 'stop_after')
THRESHOLDS = tuple(key for key in section() if key not in OPTIONS)
