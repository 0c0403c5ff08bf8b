"""Experts of the old policy, or of the sampler, forced in the update.

B trajectories, L tokens, E experts that a token visits, X experts.
"""

import functools

import jax
import numpy as np
import pytest

from stppo_jax import __main__
from stppo_jax.models import moe
from stppo_jax.rl import algorithm as algorithm_lib
from tests.learner import updates
from tests.models import tiny
from tests.training import runs

# One expert with a weight normalised to 1: the router only decides which
# expert a token visits.
CHOICE = {**tiny.MIXTURE, 'num_experts_per_tok': 1}
N, X = 2, tiny.MIXTURE['num_experts']
ALGORITHM = algorithm_lib.build_algorithm(runs.config('minirl').algorithm)
# Plain descent, and a load that weighs as much as the policy's loss.
HYPERPARAMETERS = updates.hyperparameters(load_balance=1.0)


def _models(**changes):
  return updates.Models(tiny.model(**changes), None)


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


@functools.cache
def _annotate(models, routing_replay):
  """Returns the compiled annotation, which several tests call."""
  return jax.jit(updates.annotate(models, routing_replay=routing_replay))


@functools.cache
def _token_outputs(policy):
  return jax.jit(functools.partial(policy.token_outputs, temperature=1.0))


@functools.cache
def _hidden_and_routing(policy):
  return jax.jit(policy.hidden_and_routing)


def _annotated(models, batch, routing_replay, params=None):
  state = updates.train_state(models)
  annotated, _ = _annotate(models, routing_replay)(
    state,
    batch,
    ALGORITHM,
    reference=state.policy.params,
    old=state.policy.params if params is None else params,
  )
  return jax.device_get(annotated)


def _log_ratio(policy, params, batch, **changes):
  """Returns the log-ratio of the policy to the annotated old one."""
  batch = batch.replace(**changes)
  outputs = _token_outputs(policy)(
    params,
    batch.tokens_BL,
    lengths_B=batch.lengths_B,
    expert_ids=batch.expert_ids,
  )
  difference_BL = outputs.logprobs_BL - batch.old_logprobs_BL
  return np.abs(np.where(batch.loss_mask_BL, difference_BL, 0.0)).max()


def _other_router(params):
  """Returns the weights with other experts as the likeliest."""
  mixture = params['layers']['moe']
  kernel = np.roll(mixture['router']['kernel'], 1, axis=-1)
  mixture = {**mixture, 'router': {'kernel': kernel}}
  return {**params, 'layers': {**params['layers'], 'moe': mixture}}


@pytest.mark.slow
def test_the_ratio_is_one_whatever_another_router_would_choose():
  models = _models(**CHOICE)
  params = updates.train_state(models).policy.params
  batch = _annotated(models, _batch(models), 'trainer')
  other = _other_router(params)
  assert _log_ratio(models.policy, params, batch) < 1e-6
  assert _log_ratio(models.policy, other, batch) < 1e-6
  assert _log_ratio(models.policy, other, batch, expert_ids=None) > 0.1


@pytest.mark.parametrize(
  'replay', (pytest.param('nowhere', marks=pytest.mark.slow), 'trainer')
)
def test_the_kept_experts_are_those_of_the_old_policy(replay):
  models = _models(**tiny.MIXTURE)
  old = tiny.params(models.policy, seed=5)
  batch = _batch(models)
  annotated = _annotated(models, batch, replay, old)
  _, routing = _hidden_and_routing(models.policy)(
    old, batch.tokens_BL, lengths_B=batch.lengths_B
  )
  np.testing.assert_array_equal(annotated.expert_visits_BX, routing.visits_BX)
  if replay == 'nowhere':
    assert annotated.expert_ids is None
  else:
    np.testing.assert_array_equal(annotated.expert_ids, routing.expert_ids)


@pytest.mark.slow
def test_the_experts_of_the_sampler_are_those_of_the_old_policy_too():
  models = _models(**tiny.MIXTURE)
  params = updates.train_state(models).policy.params
  batch = _batch(models, expert_ids=_expert_ids())
  annotated = _annotated(models, batch, 'sampler')
  np.testing.assert_array_equal(annotated.expert_ids, _expert_ids())
  assert _log_ratio(models.policy, params, annotated) < 1e-6
  own = {'expert_ids': None}
  assert _log_ratio(models.policy, params, annotated, **own) > 0.1


@pytest.mark.slow
def test_updates_replay_and_balance_the_load_however_they_are_cut():
  models = _models(**tiny.MIXTURE)
  batch = _batch(models, expert_ids=_expert_ids())
  batch = _annotated(models, batch, 'sampler')
  # No trajectory of a group of one has an advantage.
  batch = batch.replace(advantages_BL=updates.batch(models).advantages_BL)
  update = functools.partial(
    updates.update, ALGORITHM, batch, models, hyperparameters=HYPERPARAMETERS
  )
  whole, parts = update(), update(num_microbatches=4)
  rows = batch.loss_mask_BL.any(axis=1)
  _, routing = _hidden_and_routing(models.policy)(
    updates.train_state(models).policy.params,
    batch.tokens_BL,
    lengths_B=batch.lengths_B,
    expert_ids=batch.expert_ids,
  )
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
  flags = runs.flags(
    'minirl',
    num_steps=2,
    model__qkv_bias=False,
    model__qk_norm=True,
    model__num_experts=4,
    model__num_experts_per_tok=2,
    model__moe_intermediate_size=8,
    mesh__expert=expert,
    updates__routing_replay='sampler',
    evaluate__every=0,
  )
  assert __main__.main(['train', *flags, f'--workdir={tmp_path}']) == 0
  lines = [line for line in runs.metrics(tmp_path) if 'actor/pg_loss' in line]
  assert len(lines) == 2
  for line in lines:
    assert all(np.isfinite(x) for x in line.values() if isinstance(x, float))
    assert 1.9 < line['actor/load_balance'] < 4
    assert line['mismatch/logprob_abs_diff'] < 1e-5
