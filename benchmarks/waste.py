"""Counts which share of the work of annotate and update is needed.

    python -m benchmarks.waste

The packer of a run packs minibatches of trajectories with random lengths, for
several numbers of shards. Packed rows have padding, so they have more tokens
and take more operations than their trajectories need. `tokens` is the number of
tokens of the trajectories divided by the number of tokens of the packed rows.
Products with weights have the same quotient. `all` is the number of needed
operations divided by the number of computed operations, with attention and
logits, for a policy of 1.5 billion weights. The attention of a row is counted
as if each token saw all earlier tokens of the row, though a token does not see
the tokens of other trajectories. `before` is like `tokens`, but trajectories
are not packed: each is padded to the longest trajectory of the step. Nothing is
timed.

Lengths are log-normal with sigma 0.6. Lengths outside 300 to 4,096 tokens are
drawn again. A third of the tokens are policy tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks import measure
from stppo_jax.learner import packing
from stppo_jax.models import config as model_config
from stppo_jax.models import flops

SHORTEST, LONGEST, SIGMA = 300, 4096, 0.6
NUM_ROWS = 512  # the number of trajectories of a step
MEDIANS = (900, 1300, 1800)
SHAPE = model_config.ModelConfig(
  vocab_size=151936,
  hidden_size=1536,
  intermediate_size=8960,
  num_layers=28,
  num_heads=12,
  num_kv_heads=2,
  head_dim=128,
  rope_theta=1e6,
  rms_norm_eps=1e-6,
  qkv_bias=True,
  tie_embeddings=True,
)
HEADER = (
  'median',
  'shards',
  'minibatch',
  'row',
  'tokens, update',
  'tokens, annotate',
  'goal',
  'all, update',
  'before',
  'sizes',
)


class Case(NamedTuple):
  """A way to pack the minibatches of a step.

  Attributes:
    num_shards: the number of shards of a minibatch.
    minibatch: the number of trajectories of a minibatch.
    row_length: the number of tokens of a packed row.
    goal: the least share of tokens of an update that should be needed.
  """

  num_shards: int
  minibatch: int
  row_length: int
  goal: float


CASES = (
  Case(1, 256, 4096, 0.9),
  Case(8, 256, 4096, 0.9),
  Case(16, 256, 4096, 0.8),
  Case(64, 512, 4096, 0.7),
  Case(64, 512, 5120, 0.7),
)


class Useful(NamedTuple):
  """The shares of a pass that are needed.

  Attributes:
    tokens: the needed share of tokens, and of products with weights.
    all: the needed share of all operations.
    before: the needed share of tokens if each trajectory has a row of its own,
      as long as the longest trajectory of the step.
    size: the numbers on which the shape of the compiled program depends.
  """

  tokens: float
  all: float
  before: float
  size: tuple[int, ...]


def lengths(median: int, *, seed: int, count: int = NUM_ROWS) -> np.ndarray:
  """Returns the number of tokens of each of `count` random trajectories."""
  rng = np.random.default_rng(seed)
  drawn = np.exp(rng.normal(np.log(median), SIGMA, 20 * count)).astype(int)
  return drawn[(drawn >= SHORTEST) & (drawn <= LONGEST)][:count]


def useful(lengths_B: np.ndarray, rows: np.ndarray, case: Case) -> Useful:
  """Returns the needed shares of a pass over some trajectories of a step.

  Args:
    lengths_B: the number of tokens of each trajectory of the step.
    rows: the indices of the trajectories of the pass.
    case: how the trajectories are packed.
  """
  losses_B = lengths_B // 3
  sizes = packing.Sizes(case.num_shards, case.row_length, 1, 1)
  _, packed = packing.plan(rows, lengths_B, losses_B, sizes)
  n, _, b = packed.rows.shape
  num_rows = n * packed.num_rows * case.num_shards
  tokens = int(lengths_B[rows].sum())
  needed, _ = flops.forward_operations(
    SHAPE, lengths_B[rows].tolist(), int(losses_B[rows].sum())
  )
  computed, _ = flops.forward_operations(
    SHAPE, [case.row_length] * num_rows, num_rows * packed.num_losses
  )
  return Useful(
    tokens / (num_rows * case.row_length),
    needed / computed,
    tokens / (len(rows) * int(lengths_B.max())),
    (n, packed.num_rows, b, packed.num_losses),
  )


def run(*, steps: int) -> tuple[str, bool]:
  """Returns the table, and whether all goals are reached.

  Args:
    steps: the number of random steps that each line is a mean of.
  """
  lines, best = [], {}
  for median in MEDIANS:
    for case in CASES:
      updates, passes = [], []
      for seed in range(steps):
        lengths_B = lengths(median, seed=seed)
        order = np.random.default_rng((seed, 1)).permutation(NUM_ROWS)
        for rows in np.split(order, NUM_ROWS // case.minibatch):
          updates.append(useful(lengths_B, rows, case))
        passes.append(useful(lengths_B, np.arange(NUM_ROWS), case))
      tokens, every, before = np.mean([x[:3] for x in updates], axis=0)
      # If the tokens of a shard fill some rows and a small part of a further
      # row, rows of another length waste less. So the best length counts.
      key = median, case.num_shards
      best[key] = max(best.get(key, -1.0), tokens - case.goal)
      sizes = {x.size for x in (*updates, *passes)}
      lines.append(
        (
          *map(str, (median, case.num_shards, case.minibatch, case.row_length)),
          f'{tokens:.2f}',
          f'{np.mean([x.tokens for x in passes]):.2f}',
          f'{case.goal:.2f}',
          f'{every:.2f}',
          f'{before:.2f}',
          str(len(sizes)),
        )
      )
  return measure.table(HEADER, lines), min(best.values()) >= 0


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the shares, and whether the goals are reached."""
  flags = measure.start(measure.parser('waste', steps=20), arguments)
  table, good = run(steps=flags.steps)
  print(f'{table}\n\n{"goals reached" if good else "a goal is missed"}')


if __name__ == '__main__':
  main()
