"""Every pass over whole sequences is told where they end.

Kernels of accelerators skip what follows; here passes are traced, not run.
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
def told(monkeypatch):
  """The lengths that attention was told, one entry a pass."""
  told = []
  plain = attention.WHOLE['xla']

  def record(size, lengths_B, mesh):
    told.append(lengths_B)
    return plain(size, lengths_B, mesh)

  monkeypatch.setitem(attention.WHOLE, 'xla', record)
  return told


def _check(told, *, passes, rows):
  assert len(told) >= passes  # some are traced for their shapes alone, too
  assert all(x is not None and x.shape == (rows,) for x in told)


@pytest.mark.parametrize(('num_microbatches', 'passes'), [(1, 2), (2, 3)])
def test_an_update(told, num_microbatches, passes):
  models = updates.transformers()
  update = functools.partial(
    update_lib.update, spec=updates.spec(models, num_microbatches)
  )
  batch = updates.batch(models)
  told.clear()  # of making the batch
  jax.eval_shape(
    update,
    updates.train_state(models),
    batch,
    batches.algorithm('st_ppo'),
    updates.hyperparameters(),
  )
  # Policy and value; several microbatches are scored before, for statistics.
  _check(told, passes=passes, rows=updates.B // num_microbatches)


def test_annotating(told):
  models = updates.transformers()
  state, batch = updates.train_state(models), updates.batch(models)
  told.clear()
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
  # The current policy, its value model, the denominator's and the reference.
  _check(told, passes=4, rows=updates.B)
