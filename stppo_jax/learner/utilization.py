"""The shares of the devices' peak that updates use."""

from typing import NamedTuple


class Counts(NamedTuple):
  """Operations of a batch, counted by `models.operations`.

  Attributes:
    policy: operations of a forward pass of the policy.
    value: operations of a forward pass of a value model.
    policy_again, value_again: what their backward passes compute again.
  """

  policy: float
  value: float
  policy_again: float
  value_again: float


def shares(
  counts: Counts,
  *,
  peak_operations: float,
  has_value_model: bool,
  trains_adapters: bool,
  extra_pass: bool,
) -> dict[str, float]:
  """Returns `perf/mfu` and `perf/hfu` of an epoch.

  The first counts what the formulas need, the second also what is computed
  again because it was not kept.

  Args:
    counts: the operations of the batch.
    peak_operations: operations that the devices do at their peak in the time of
      an epoch.
    has_value_model: whether the value model has a backbone of its own.
    trains_adapters: whether the weights of the backbone are frozen.
    extra_pass: whether one more forward pass of the policy collects statistics
      of the minibatch.
  """
  # A backward pass has a product for the gradient of the input and one for that
  # of the weights, which frozen weights do not need.
  passes = 2 if trains_adapters else 3
  needed = passes * (counts.policy + counts.value * has_value_model)
  again = counts.policy_again + counts.value_again * has_value_model
  again += counts.policy * extra_pass
  return {
    'perf/mfu': needed / peak_operations,
    'perf/hfu': (needed + again) / peak_operations,
  }
