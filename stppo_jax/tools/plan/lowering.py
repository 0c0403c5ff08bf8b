"""Lowers the programs of a learner from shapes, without making arrays."""

from typing import Any

import jax
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import packing as packing_lib
from stppo_jax.parallel import sharding


def lower_annotate(
  learner: learner_lib.Learner, packed: batch_lib.TokenBatch
) -> Any:
  """Lowers the program `annotate` for the shapes of a packed batch."""
  state, reference = learner.abstract_start()
  return learner.programs.annotate.lower(
    state,
    _laid_out(learner, packed),
    learner.algorithm,
    reference=reference,
    packed=_full_rows(
      learner, packed, len(packed.lengths_B), learner.annotate_sizes
    ),
  )


def lower_update(
  learner: learner_lib.Learner, packed: batch_lib.TokenBatch
) -> Any:
  """Lowers the program `update` for the shapes of a packed batch.

  Args:
    learner: the learner.
    packed: the shapes of a packed batch, with at least as many rows as a
      minibatch.
  """
  state, reference = learner.abstract_start()
  batch, _ = jax.eval_shape(
    learner.programs.annotate,
    state,
    packed,
    learner.algorithm,
    reference=reference,
  )
  return learner.programs.updating.update.lower(
    state.with_frozen({}),
    state.frozen,
    _laid_out(learner, batch),
    _full_rows(
      learner, packed, learner.config.updates.minibatch_size, learner.sizes
    ),
    # The hyperparameters of a step after the value warm-up, in which both
    # models learn.
    learner.hyperparameters(learner.warmup.end),
  )


def _full_rows(
  learner: learner_lib.Learner,
  packed: batch_lib.TokenBatch,
  count: int,
  sizes: packing_lib.Sizes,
) -> packing_lib.Packed:
  """Returns the packing of `count` trajectories of the full length.

  If `updates.row_length` is larger than the length of a trajectory, a row may
  hold several trajectories. Otherwise each trajectory fills a row.
  """
  assert packed.loss_positions_BM is not None
  length = packed.tokens_BL.shape[1]
  row_length = max(learner.config.updates.row_length, length)
  return packing_lib.plan(
    np.arange(count),
    np.full(count, length),
    np.full(count, packed.loss_positions_BM.shape[1]),
    sizes._replace(row_length=row_length),
  )


def _laid_out(
  learner: learner_lib.Learner, batch: batch_lib.TokenBatch
) -> batch_lib.TokenBatch:
  """Returns the shapes of a batch with the sharding of its rows attached."""
  rows = sharding.batch_sharding(learner.mesh)
  return sharding.with_layout(batch, jax.tree.map(lambda _: rows, batch))
