"""Annotated arrays by hand; models here return what they were given."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax.learner import annotate as annotate_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.models import heads
from tests import compilations
from tests.learner import trees
from tests.learner import updates
from tests.models import tiny
from tests.rl import batches

_TURN_IDS = np.array(
  [
    [0, 0, 1, 1, 0, 0, 2, 2],
    [0, 1, 1, 1, 0, 2, 0, 0],
    [0, 0, 1, 0, 2, 2, 2, 0],
    [0, 1, 1, 0, 0, 0, 0, 0],
  ],
  np.int32,
)
_FAILED = 2
_MASK = (_TURN_IDS > 0) & (np.arange(4) != _FAILED)[:, None]
_LAST = (0, 7), (1, 5), (3, 2)  # the last policy token of each healthy row
_REWARDS = 1.0, -0.5, 0.25
# Of most tests, which share a program.
_OPTIONS = {
  'bounds__name': 'by_reward',
  'objective__name': 'positive_examples',
  'kl__where': 'reward',
  'kl__estimator': 'k1',
}


class _ParamsModel:
  """A model that returns its parameters; the temperature divides log-probs."""

  head = 'vocabulary'
  config = tiny.model().config

  mesh = None
  value_range = -0.25, 0.75

  @property
  def plain_policy(self):
    return self

  def join_params(self, frozen, params):
    assert not frozen
    return params

  def token_outputs(self, params, tokens_BL, *, temperature, **arrays):
    del tokens_BL, arrays
    logprobs_BL, entropy_BL = params / temperature, jnp.zeros_like(params)
    return functional.TokenOutputs(logprobs_BL, entropy_BL, None, None)

  def logprobs_and_entropy(self, params, tokens_BL, *, temperature, **arrays):
    outputs = self.token_outputs(
      params, tokens_BL, temperature=temperature, **arrays
    )
    return outputs.logprobs_BL, outputs.entropy_BL

  def values(self, params, tokens_BL, **arrays):
    del tokens_BL, arrays
    return heads.Values(params, None)


def _case():
  """Returns a batch and the outputs of its models; garbage off the mask."""
  rng = np.random.default_rng(0)
  draw = lambda: rng.normal(size=_MASK.shape).astype(np.float32)
  garbage = lambda x: np.where(_MASK, x, np.float32(np.nan))
  old, reference, values = -np.abs(draw()), -np.abs(draw()), draw()
  rewards = np.zeros_like(old)
  for place, reward in zip(_LAST, _REWARDS):
    rewards[place] = reward
  return types.SimpleNamespace(
    old=garbage(old),
    reference=garbage(reference),
    values=garbage(values),
    sampler=old.copy(),
    rewards=rewards,
  )


@functools.cache
def _jitted():
  return jax.jit(
    functools.partial(
      annotate_lib.annotate,
      models=model_roles.Models(_ParamsModel(), _ParamsModel()),
      num_turns=2,
    )
  )


def _annotate(
  case,
  *,
  sampled_by=None,
  older=(),
  behind=None,
  groups=(0, 1, 2, 3),
  **changes,
):
  """Returns the annotated batch and metrics; for `behind` see TokenBatch."""
  batch = batch_lib.TokenBatch(
    tokens_BL=np.zeros(_MASK.shape, np.int32),
    lengths_B=np.full(len(_MASK), _MASK.shape[1], np.int32),
    turn_ids_BL=_TURN_IDS,
    loss_mask_BL=_MASK,
    sampler_logprobs_BL=case.sampler,
    rewards_BL=case.rewards,
    group_ids_B=np.array(groups, np.int32),
    staleness_BL=behind,
  )
  state = state_lib.TrainState(
    state_lib.ModelState(2.0 * case.old, None, np.int32(0)),
    state_lib.ModelState(case.values, None, np.int32(0)),
  )
  algorithm = batches.algorithm('st_ppo', **_OPTIONS | changes)
  batch, metrics = _jitted()(
    state,
    batch,
    algorithm,
    temperature=2.0,  # which divides the log-probabilities
    **jax.tree.map(
      lambda x: 2.0 * x,
      {'reference': case.reference, 'old': sampled_by, 'older': older},
    ),
  )
  return jax.device_get(batch), {k: float(v) for k, v in metrics.items()}


def _rewards_to_go(rewards_BL):
  """Returns the rewards to go at the policy tokens."""
  rewards_BL = np.where(_MASK, rewards_BL, 0)
  rewards_to_go_BL = np.cumsum(rewards_BL[:, ::-1], axis=1)[:, ::-1]
  return np.where(_MASK, rewards_to_go_BL, 0)


def _whitened(x_BL):
  chosen = x_BL[_MASK]
  white_BL = (x_BL - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
  return np.where(_MASK, white_BL, 0)


_IN_THE_LOSS = {'kl__where': 'loss', 'bounds__name': 'fixed'}


def test_returns_at_the_ends_of_the_range_are_not_outside():
  case = _case()
  for place, reward in zip(_LAST, (0.75, -0.25, 0.75)):
    case.rewards[place] = reward
  batch, metrics = _annotate(case, **_IN_THE_LOSS)
  low, high = _ParamsModel.value_range
  returns = np.asarray(batch.returns_BL)[_MASK]
  assert (returns < low).any() or (returns > high).any()  # by rounding
  assert metrics['critic/returns_outside'] == 0


@pytest.mark.parametrize('where', ['reward', 'loss'])
def test_advantages_and_metrics_are_those_computed_by_hand(where):
  case = _case()
  changes = _IN_THE_LOSS if where == 'loss' else {}
  batch, metrics = _annotate(
    case, **changes, kl__coefficient=0.3, objective__least=0.25
  )
  x_BL = np.where(_MASK, case.old - case.reference, 0)
  coefficient = 0.3 if where == 'reward' else 0.0
  rewards_BL = case.rewards - coefficient * x_BL
  # Gamma and lambda are 1: the return is the sum of the rewards to come.
  returns_BL = _rewards_to_go(rewards_BL)
  trees.assert_close(batch.returns_BL, returns_BL)
  values_BL = np.where(_MASK, case.values, 0)
  trees.assert_close(batch.advantages_BL, _whitened(returns_BL - values_BL))
  trees.assert_close(batch.old_logprobs_BL, np.where(_MASK, case.old, 0))
  trees.assert_close(batch.ref_logprobs_BL, np.where(_MASK, case.reference, 0))
  np.testing.assert_array_equal(batch.value_mask_BL, _MASK)
  outside = np.abs(returns_BL[_MASK] - 0.25) > 0.5
  assert 0 < outside.mean() < 1

  healthy = np.arange(len(_MASK)) != _FAILED
  of_rows = rewards_BL.sum(axis=1)[healthy]
  expected = {
    'critic/returns_outside': outside.mean(),
    'critic/rewards/mean': of_rows.mean(),
    'critic/rewards/max': of_rows.max(),
    'critic/kl': x_BL[_MASK].mean(),
    'critic/kl_coef': 0.3,
    'critic/values/mean': values_BL[_MASK].mean(),
    'actor/imitated': 2 / 3,  # 1.0 and 0.25, not -0.5
  }
  trees.assert_close({name: metrics[name] for name in expected}, expected)
  assert all(np.isfinite(list(metrics.values())))
  assert (batch.turn_z_BL is None) == (where == 'loss')  # not read there


def test_bounds_get_the_rewards_of_turns_without_a_penalty():
  case = _case()
  case.rewards[0, 3] = 1.0  # of its first turn
  batch, _ = _annotate(case, groups=(5, 5, 5, 6), kl__coefficient=0.3)
  expected = np.zeros(_MASK.shape)
  # 1 and 0 are half a unit from their mean, and their deviation is 1 / sqrt 2.
  expected[0, 2:4], expected[1, 1:4] = np.sqrt(0.5), -np.sqrt(0.5)
  trees.assert_close(batch.turn_z_BL[_MASK], expected[_MASK])


def test_the_denominator_of_a_turn_is_the_policy_that_wrote_it():
  case = _case()
  # The first turns are two steps old, the second ones of the present policy
  # (first row) or one step old. Nothing is three steps old.
  behind = np.where(_TURN_IDS == 1, 2, np.where(_TURN_IDS == 2, 1, 0))
  behind[0] = np.where(_TURN_IDS[0] == 1, 2, 0)
  older = [case.old - 1, case.old - 2, np.full_like(case.old, np.nan)]
  case.sampler = np.where(_MASK, case.old - behind, 0.0).astype(np.float32)
  case.sampler[0, 6] += 0.25  # in a turn that follows an older one
  # Nor is the policy that sampled the newest turns the one to be updated.
  sampled_by, case.old = case.old, case.old - 5
  batch, metrics = _annotate(
    case, sampled_by=sampled_by, older=older, behind=behind.astype(np.int32)
  )
  expected = np.where(_MASK, sampled_by - behind, 0)
  trees.assert_close(batch.old_logprobs_BL, expected)
  assert batch.staleness_BL is None
  # What the policy has moved is not what sampler and trainer differ by.
  swapped = (_MASK & (_TURN_IDS == 2)).sum()
  expected = {
    'staleness/logprob_abs_diff': 2.0,
    'staleness/logprob_abs_diff_mean': behind[_MASK].mean(),
    'staleness/turn/mean/weight_raw_max': np.exp(2),
    'mismatch/logprob_abs_diff': 0.25,
    'mismatch/after_swap/share': swapped / _MASK.sum(),
    'mismatch/after_swap/logprob_abs_diff': 0.25,
    'mismatch/after_swap/logprob_abs_diff_mean': 0.25 / swapped,
  }
  trees.assert_close({name: metrics[name] for name in expected}, expected)


def test_a_planted_mismatch_is_measured_exactly():
  case = _case()
  planted = {(0, 2): 0.5, (1, 5): -0.75, (3, 1): 0.125}
  for place, difference in planted.items():
    case.sampler[place] += difference
  case.sampler[_FAILED] += 9.0  # a failed row counts in nothing
  case.sampler[0, 0] += 9.0  # nor does what the policy did not write
  _, metrics = _annotate(case)
  x = np.array(list(planted.values()))
  trees.assert_close(metrics['mismatch/logprob_abs_diff'], 0.75)
  trees.assert_close(metrics['mismatch/weight_raw_max'], np.exp(0.75))
  # A planted number is alone in its trajectory.
  largest = 'mismatch/sequence/sum/weight_raw_max'
  trees.assert_close(metrics[largest], np.exp(0.75))
  k3 = (np.exp(-x) - 1 + x).sum() / _MASK.sum()
  trees.assert_close(metrics['mismatch/k3'], k3)


@functools.cache
def _compiled(rows, num_microbatches):
  """Returns the compiled `annotate` for a batch of some rows, and the batch."""
  # Only the policy's experts are replayed, so the critic is a quick stand-in.
  models = updates.transformers(**tiny.MIXTURE)._replace(
    value=updates.sums().value
  )
  batch = jax.tree.map(
    lambda x: np.concatenate([x] * (rows // updates.B)), updates.batch(models)
  )
  annotate = jax.jit(
    updates.annotate(models, routing_replay='trainer'),
    compiler_options=compilations.QUICK,
  )
  algorithm = batches.algorithm('st_ppo', kl__where='reward')
  reference = tiny.params(models.policy, 7)
  args = updates.train_state(models), batch, algorithm
  packed = updates.packed(batch, num_microbatches) if num_microbatches else None
  options = {'reference': reference, 'packed': packed}
  program = annotate.lower(*args, **options).compile()
  return program, functools.partial(program, *args, **options)


@pytest.mark.slow
def test_microbatches_change_nothing():
  whole, split = (
    jax.device_get(call()) for _, call in (_compiled(16, n) for n in (0, 4))
  )
  trees.assert_close(split, whole)
  assert split[0].expert_ids.dtype == np.int16


@pytest.mark.slow
def test_memory_is_that_of_one_microbatch():
  of_64, of_16 = (
    _compiled(rows, rows // 4)[0].memory_analysis().temp_size_in_bytes
    for rows in (64, 16)
  )
  assert of_64 < 2 * of_16


def test_weights_are_cast_outside_the_loop_over_microbatches():
  models = updates.sums(dtype='bfloat16')
  state, batch = updates.train_state(models), updates.batch(updates.sums())
  policy = state.policy.params
  program = jax.make_jaxpr(updates.annotate(models))(
    state,
    batch,
    batches.algorithm('st_ppo'),
    reference=policy,
    old=policy,
    packed=updates.packed(batch, 2),
  )
  loop, *_ = (e for e in program.eqns if e.primitive.name == 'scan')
  kinds = [x.aval.dtype for x in loop.invars]
  assert kinds.count(jnp.bfloat16) == 4 * len(jax.tree.leaves(policy))
  assert jnp.dtype('float32') not in kinds
