"""The lengths that batches are padded to."""

# Every length is another program to compile, of annotate and of update, and
# every share of loss positions of it (`pack.loss_positions`) one more.
MAX_LENGTHS = 8


def unit(bucket: int, *, max_length: int) -> int:
  """Returns the number of tokens that every batch's length is a multiple of.

  It is the least multiple of the bucket with which there are at most
  `MAX_LENGTHS` lengths.

  Args:
    bucket: tokens, `rollout.length_bucket`.
    max_length: tokens of the longest trajectory.
  """
  return -(-max_length // (MAX_LENGTHS * bucket)) * bucket
