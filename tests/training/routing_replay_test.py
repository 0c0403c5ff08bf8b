"""Experts of the old policy, or of the sampler, forced in the update.

B trajectories, L tokens, E experts that a token visits, X experts.
"""

import functools

import jax
import numpy as np
import pytest

from stppo_jax.models import moe
from stppo_jax.rl import algorithm as algorithm_lib
from tests.learner import updates
from tests.models import tiny
from tests.training import runs

N, X = 2, tiny.MIXTURE['num_experts']
ALGORITHM = algorithm_lib.build_algorithm(runs.config('minirl').algorithm)
# Plain descent, and a load that weighs as much as the policy's loss.
HYPERPARAMETERS = updates.hyperparameters(load_balance=1.0)


def _models():
  return updates.Models(tiny.model(**tiny.MIXTURE), None)


def _batch(models, **arrays):
  """Returns a packed batch with padding and one row that failed."""
  batch = updates.batch(models)
  lengths_B = batch.lengths_B - np.arange(updates.B, dtype=np.int32) % 3
  mask_BL = batch.loss_mask_BL & (np.arange(updates.L) < lengths_B[:, None])
  mask_BL[2] = False
  return batch.replace(lengths_B=lengths_B, loss_mask_BL=mask_BL, **arrays)


def _expert_ids():
  """Returns random expert ids, as if a sampler had chosen them."""
  every = np.broadcast_to(np.arange(X), (updates.B, updates.L, N, X))
  ids = np.random.default_rng(0).permuted(every, axis=-1)
  return ids[..., :2].astype(np.int16)


def _routing(models, params, batch):
  _, routing = jax.jit(models.policy.hidden_and_routing)(
    params,
    batch.tokens_BL,
    lengths_B=batch.lengths_B,
    expert_ids=batch.expert_ids,
  )
  return routing


def _annotated(models, batch, replay, old):
  state = updates.train_state(models)
  annotate = jax.jit(updates.annotate(models, routing_replay=replay))
  annotated, _ = annotate(
    state, batch, ALGORITHM, reference=state.policy.params, old=old
  )
  return jax.device_get(annotated)


@pytest.mark.parametrize(
  'replay',
  [
    'trainer',
    pytest.param('nowhere', marks=pytest.mark.slow),
    pytest.param('sampler', marks=pytest.mark.slow),
  ],
)
def test_the_kept_experts_are_those_of_the_old_policy(replay):
  models = _models()
  old = tiny.params(models.policy, seed=5)
  ids = _expert_ids() if replay == 'sampler' else None
  batch = _batch(models, expert_ids=ids)
  annotated = _annotated(models, batch, replay, old)
  routing = _routing(models, old, batch)
  np.testing.assert_array_equal(annotated.expert_visits_BX, routing.visits_BX)
  if replay == 'nowhere':
    assert annotated.expert_ids is None
  else:
    np.testing.assert_array_equal(annotated.expert_ids, routing.expert_ids)
  if ids is None:
    return
  np.testing.assert_array_equal(annotated.expert_ids, ids)
  outputs = jax.jit(
    functools.partial(models.policy.token_outputs, temperature=1.0)
  )
  for forced in (ids, None):
    found = outputs(
      old, batch.tokens_BL, lengths_B=batch.lengths_B, expert_ids=forced
    )
    log_ratio_BL = found.logprobs_BL - annotated.old_logprobs_BL
    largest = np.abs(log_ratio_BL[batch.loss_mask_BL]).max()
    assert largest > 0.1 if forced is None else largest < 1e-6


@pytest.mark.slow
def test_updates_replay_and_balance_the_load_however_they_are_cut():
  models = _models()
  params = updates.train_state(models).policy.params
  batch = _batch(models, expert_ids=_expert_ids())
  batch = _annotated(models, batch, 'sampler', params)
  # No trajectory of a group of one has an advantage.
  batch = batch.replace(advantages_BL=updates.batch(models).advantages_BL)
  update = functools.partial(
    updates.update, ALGORITHM, batch, models, hyperparameters=HYPERPARAMETERS
  )
  whole, parts = update(), update(num_microbatches=4)
  rows = batch.loss_mask_BL.any(axis=1)
  routing = _routing(models, params, batch)
  wanted = moe.load_balance(
    routing.visits_BX[rows].sum(axis=0),
    routing.probs_BX[rows].sum(axis=0),
    np.float32(N * batch.lengths_B[rows].sum()),
  )
  np.testing.assert_allclose(
    whole.metrics['actor/load_balance'], wanted, rtol=1e-5
  )
  updates.assert_same(parts, whole, models)
  for bound in ('min', 'max'):
    assert abs(whole.metrics[f'ratio/token/{bound}'] - 1) < 1e-6
  without = update(hyperparameters=updates.hyperparameters(load_balance=0.0))
  change, _ = updates.gradients(whole, models)
  rest, _ = updates.gradients(without, models)
  router = lambda gradient: gradient['layers']['moe']['router']['kernel']
  assert np.abs(router(change) - router(rest)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize('expert', [1, 4])
def test_a_run_replays_the_experts_of_its_engine(tmp_path, expert):
  changes = dict(
    algorithm='minirl',
    num_steps=2,
    **runs.EXPERTS,
    mesh__expert=expert,
    updates__routing_replay='sampler',
    evaluate__every=0,
  )
  assert runs.train(tmp_path, **changes) == 0
  lines = [line for line in runs.metrics(tmp_path) if 'actor/pg_loss' in line]
  assert len(lines) == 2
  for line in lines:
    assert all(np.isfinite(x) for x in line.values() if isinstance(x, float))
    assert 1.9 < line['actor/load_balance'] < 4
    assert line['mismatch/logprob_abs_diff'] < 1e-5
