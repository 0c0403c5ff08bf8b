"""Attention receives the lengths of the rows in every pass.

Kernels of accelerators skip the padding; here passes are traced, not run.
"""

import functools

import jax
import pytest

from stppo_jax.learner import annotate
from stppo_jax.learner import update as update_lib
from stppo_jax.models import attention
from tests.learner import updates
from tests.rl import batches


@pytest.fixture
def lengths(monkeypatch):
  """Returns a list that gets the lengths that attention receives, by pass."""
  lengths = []
  plain = attention.IMPLEMENTATIONS['xla']

  def record(size, lengths_B, mesh):
    lengths.append(lengths_B)
    return plain(size, lengths_B, mesh)

  monkeypatch.setitem(attention.IMPLEMENTATIONS, 'xla', record)
  return lengths


def _check(lengths, *, passes, rows):
  assert len(lengths) >= passes  # some are traced for their shapes alone, too
  assert all(x is not None and x.shape == (rows,) for x in lengths)


@pytest.mark.parametrize(('num_microbatches', 'passes'), [(1, 2), (2, 3)])
def test_an_update_passes_the_lengths(lengths, num_microbatches, passes):
  models = updates.transformers()
  update = functools.partial(
    update_lib.update, spec=updates.spec(models, num_microbatches)
  )
  batch = updates.batch(models)
  lengths.clear()  # forget the passes that made the batch
  jax.eval_shape(
    update,
    updates.train_state(models),
    batch,
    batches.algorithm('st_ppo'),
    updates.hyperparameters(),
  )
  # Policy and value; with several microbatches also the pass for statistics.
  _check(lengths, passes=passes, rows=updates.B // num_microbatches)


def test_annotating_passes_the_lengths(lengths):
  models = updates.transformers()
  state, batch = updates.train_state(models), updates.batch(models)
  lengths.clear()
  jax.eval_shape(
    functools.partial(
      annotate.annotate,
      models=models,
      temperature=1.0,
      num_turns=updates.NUM_TURNS,
    ),
    state,
    batch,
    batches.algorithm('st_ppo'),
    reference=state.policy.params,
    old=state.policy.params,
  )
  # The current policy, its value model, the older policy and the reference.
  _check(lengths, passes=4, rows=updates.B)
