"""Models are given the lengths of the rows in every pass.

Kernels of accelerators skip the padding; here passes are traced, not run.
"""

import functools

import jax
import pytest

from stppo_jax.learner import policy_loss
from stppo_jax.learner import step as step_lib
from stppo_jax.models import functional
from tests.learner import updates
from tests.rl import batches


@pytest.fixture
def lengths():
  """Returns a list that gets the lengths that models receive, by pass."""
  return []


def _models(lengths):
  """Returns small models that record the lengths they are given."""

  class Recording(functional.Model):
    def hidden_and_routing(
      self, params, tokens_BL, *, lengths_B=None, **arrays
    ):
      lengths.append(lengths_B)
      return super().hidden_and_routing(
        params, tokens_BL, lengths_B=lengths_B, **arrays
      )

  return updates.Models(
    *(Recording(x.config, x.head) for x in updates.transformers()[:2])
  )


def _check(lengths, *, passes, rows):
  assert len(lengths) >= passes  # some are traced for their shapes alone, too
  assert all(x is not None and x.shape == (rows,) for x in lengths)


def test_an_update_passes_the_lengths(lengths):
  models = _models(lengths)
  update = functools.partial(
    step_lib.update,
    method=policy_loss.METHOD,
    spec=updates.spec(models),
    optimizers=updates.OPTIMIZERS,
  )
  batch = updates.batch(models)
  lengths.clear()  # forget the passes that made the batch
  jax.eval_shape(
    update,
    updates.train_state(models),
    {},
    batch,
    updates.with_algorithm(
      updates.HYPERPARAMETERS, batches.algorithm('st_ppo')
    ),
  )
  _check(lengths, passes=2, rows=updates.B)  # policy and value


def test_annotating_passes_the_lengths(lengths):
  models = _models(lengths)
  state, batch = updates.train_state(models), updates.batch(models)
  lengths.clear()
  jax.eval_shape(
    updates.annotate(models),
    state,
    batch,
    batches.algorithm('st_ppo'),
    reference=state.policy.params,
    old=state.policy.params,
  )
  # The current policy, its value model, the older policy and the reference.
  _check(lengths, passes=4, rows=updates.B)
