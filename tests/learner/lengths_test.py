"""Models are given the lengths of the rows in every pass.

Kernels of accelerators skip the padding; here passes are traced, not run.
"""

import jax

from tests.learner import updates
from tests.rl import batches


def _check(lengths, *, passes):
  assert len(lengths) >= passes  # some are traced for their shapes alone, too
  assert all(x is not None and x.shape == (updates.B,) for x in lengths)


def test_an_update_passes_the_lengths():
  lengths = []
  updates.traced(updates.hooked(lengths.append), updates.batch())
  _check(lengths, passes=2)  # policy and value


def test_annotating_passes_the_lengths():
  lengths = []
  models = updates.hooked(lengths.append)
  state, batch = updates.train_state(models), updates.batch()
  jax.eval_shape(
    updates.annotate(models),
    state,
    batch,
    batches.algorithm('st_ppo'),
    reference=state.policy.params,
    old=state.policy.params,
  )
  # The current policy, its value model, the older policy and the reference.
  _check(lengths, passes=4)
