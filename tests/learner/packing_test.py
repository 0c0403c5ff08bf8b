"""Trajectories that share rows give the numbers of rows of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax import batch as batch_lib
from stppo_jax.configs import algorithms
from stppo_jax.learner import annotate
from stppo_jax.learner import forward
from stppo_jax.learner import packing
from stppo_jax.models import attention
from stppo_jax.models import fused_attention
from stppo_jax.rollout import pack
from tests import compilations
from tests.learner import updates
from tests.models import cudnn
from tests.models import tiny
from tests.rl import batches

_ROW, _ROWS, _TIMES = 30, 2, 2  # tokens of a row, rows, microbatches
_B, _L = updates.B, updates.L


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('num_shards', [1, 8])
@pytest.mark.parametrize(
  ('max_rows', 'num_workers'), [(0, 1), (1, 1), (2, 2), (9, 1)]
)
def test_every_sequence_has_a_place_of_its_own(
  seed, num_shards, max_rows, num_workers
):
  rng = np.random.default_rng(seed)
  lengths, losses = rng.integers(0, 101, 96), rng.integers(0, 30, 96)
  rows = rng.permutation(96)[:64]
  sizes = packing.Sizes(num_shards, 100, max_rows, num_workers)
  order, made = packing.plan(rows, lengths, losses, sizes)
  assert sorted(order) == sorted(rows)
  n, S, b = made.rows.shape
  assert S == num_shards and n % num_workers == 0
  assert not max_rows or made.num_rows <= max_rows
  shards = order.reshape(S, -1)
  found, summed = [], 0
  for i, s in np.ndindex(n, S):
    taken = np.zeros(made.num_rows * 100, int)
    loss = np.zeros(made.num_rows, int)
    assert (np.diff(made.starts[i, s]) >= 0).all()
    for place, start in zip(made.rows[i, s], made.starts[i, s]):
      if place < shards.shape[1]:
        number = shards[s, place]
        found.append(number)
        end = start + lengths[number]
        taken[start:end] += 1
        assert not lengths[number] or start // 100 == (end - 1) // 100
        loss[min(start // 100, made.num_rows - 1)] += losses[number]
      else:
        assert start == taken.size
    assert taken.max() <= 1 and loss.max() <= made.num_losses
    summed += taken.sum()
  assert sorted(found) == sorted(rows) and summed == lengths[rows].sum()


def test_shards_get_equal_shares_of_the_tokens():
  rng = np.random.default_rng(0)
  lengths = np.exp(rng.normal(7, 0.6, 256)).clip(300, 4096).astype(int)
  sizes = packing.Sizes(8, 4096, 1, 1)
  order, made = packing.plan(np.arange(256), lengths, lengths // 3, sizes)
  tokens = lengths[order].reshape(8, -1).sum(1)
  assert tokens.max() - tokens.min() < 0.02 * tokens.mean()
  computed = len(made.rows) * made.num_rows * 4096
  assert tokens.mean() > 0.85 * computed


@pytest.mark.parametrize(
  ('count', 'expected'), [(0, 0), (1, 1), (15, 15), (17, 18), (65, 72)]
)
def test_sizes_are_few(count, expected):
  assert packing.rounded(count) == expected
  assert len({packing.rounded(n) for n in range(64, 128)}) == 9


@functools.cache
def _batch(models, dtype=np.float32):
  """Returns a batch with a few tokens behind the last of the loss mask."""
  batch = updates.batch(models)
  ends_B = np.max((np.arange(_L) + 1) * batch.loss_mask_BL, axis=1)
  lengths_B = np.random.default_rng(0).integers(ends_B, _L + 1)
  batch = batch.replace(
    lengths_B=lengths_B.astype(np.int32),
    loss_positions_BM=pack.loss_positions(batch.loss_mask_BL),
  )
  cast = lambda x: x.astype(dtype) if x.dtype == np.float32 else x
  return jax.tree.map(cast, batch)


def _random_packing(lengths_B, seed) -> batch_lib.Packing:
  """Returns trajectories in a random order, each in a random row with room."""
  rng = np.random.default_rng(seed)
  starts = np.full((_TIMES, 1, _B), _ROWS * _ROW)
  free = np.full(_TIMES * _ROWS, _ROW)
  placed = [[] for _ in range(_TIMES)]
  for number in rng.permutation(_B):
    row = rng.choice(np.flatnonzero(free >= lengths_B[number]))
    start = row % _ROWS * _ROW + _ROW - free[row]
    placed[row // _ROWS].append((start, number))
    free[row] -= lengths_B[number]
  rows = np.full_like(starts, _B)
  for n, pairs in enumerate(map(sorted, placed)):
    starts[n, 0, : len(pairs)], rows[n, 0, : len(pairs)] = zip(*pairs)
  return batch_lib.Packing(rows, starts, _ROWS, _ROW, _ROW)


def _errors(found, expected, models):
  """Returns the distance of each gradient, in norms of the gradient."""
  leaves = (
    jax.tree.leaves(updates.gradients(x, models)) for x in (found, expected)
  )
  return [
    float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in zip(*leaves)
  ]


def _check(name, models, packings, tolerance, dtype=np.float32, **changes):
  """Compares updates on packed rows with one in which each row is alone."""
  algorithm, batch = batches.algorithm(name, **changes), _batch(models, dtype)
  if models.policy.config.num_experts:
    visits_BX = np.arange(6.0 * _B, dtype=np.float32).reshape(_B, 6)
    batch = batch.replace(expert_visits_BX=visits_BX)
  state = jax.tree.map(
    lambda x: x.astype(dtype) if x.dtype == np.float32 else x,
    updates.train_state(models),
  )
  compiled = updates.compiled(models, updates.method(algorithm))
  weighed = updates.hyperparameters(load_balance=0.1)
  inputs = updates.with_algorithm(weighed, algorithm)
  expected = updates.update(
    algorithm,
    batch.replace(loss_positions_BM=None),
    models,
    state=state,
    hyperparameters=weighed,
  )
  for packed in packings:
    found = updates.result(*compiled(state, {}, batch, inputs, packed))
    assert found.metrics.keys() == expected.metrics.keys()
    for key, value in expected.metrics.items():
      np.testing.assert_allclose(
        found.metrics[key], value, tolerance, tolerance, err_msg=key
      )
    assert max(_errors(found, expected, models)) < tolerance


def _random_packings(models, count):
  lengths_B = _batch(models).lengths_B
  return [_random_packing(lengths_B, seed) for seed in range(count)]


@pytest.mark.parametrize(
  ('outputs', 'count'), [(1, 20), pytest.param(3, 1, marks=pytest.mark.slow)]
)
def test_random_packings_change_nothing(outputs, count):
  models = updates.sums()
  if outputs > 1:
    value = models.value
    shape = dataclasses.replace(value.config, value_outputs=outputs)
    value = dataclasses.replace(value, config=shape, value_range=(-1.0, 1.0))
    models = models._replace(value=value)
  _check('st_ppo', models, _random_packings(models, count), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['st_ppo', 'grpo', 'token_ppo'])
def test_200_random_packings_change_nothing_in_tiles(name, monkeypatch):
  monkeypatch.setattr(attention, '_CPU_TILE', 8)
  models = updates.transformers(rope_theta=5000.0)  # programs of its own
  if name == 'grpo':
    models = updates.Models(models.policy, None)
  _check(name, models, _random_packings(models, 200), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('experts', [False, True])
def test_the_float64_numbers_are_the_same(experts, monkeypatch):
  monkeypatch.setattr(jnp, 'float32', jnp.float64)  # what models add up in
  monkeypatch.setattr(attention, '_CPU_TILE', 8)
  changes = tiny.MIXTURE if experts else {}
  with jax.enable_x64(True):
    models = updates.transformers(dtype='float64', **changes)
    packings = _random_packings(models, 20)
    _check('st_ppo', models, packings, 1e-11, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize('name', algorithms.ALGORITHMS)
def test_every_algorithm_may_be_packed(name):
  models = updates.sums()
  if not batches.algorithm(name).uses_values:
    models = updates.policy_alone()
  _check(name, models, _random_packings(models, 2), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('kernel', ['splash', 'cudnn'])
def test_kernels_compute_packed_rows(kernel, monkeypatch):
  monkeypatch.setitem(
    attention.IMPLEMENTATIONS,
    'splash',
    functools.partial(fused_attention.splash, interpret=True),
  )
  monkeypatch.setattr(jax.nn, 'dot_product_attention', cudnn.stand_in)
  models = updates.transformers(attention=kernel)
  _check('st_ppo', models, _random_packings(models, 5), 1e-5)


@functools.cache
def _outputs(model):
  @jax.jit
  def outputs(tokens_BL, batch, order, made):
    inputs = forward.inputs_of(batch.replace(tokens_BL=tokens_BL))
    one = jax.tree.map(lambda x: x[0], made)
    chosen = jax.tree.map(lambda x: x[order], inputs)
    return forward.token_outputs(
      model,
      updates.params(model, 1),
      chosen._replace(packing=one, loss_positions_BM=None),
      temperature=1.0,
    )

  return outputs


@pytest.mark.parametrize(
  'experts', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_a_token_changes_its_own_trajectory_only(experts):
  model = updates.transformers(**(tiny.MIXTURE if experts else {})).policy
  batch = _batch(updates.sums())
  sizes = packing.Sizes(1, 2 * _L, 0, 1)
  order, made = packing.plan(
    np.arange(_B), batch.lengths_B, batch.lengths_B, sizes
  )
  order = order[made.rows[0, 0]]
  assert made.num_rows < _B and len(order) == _B
  outputs = lambda tokens_BL: jax.device_get(
    _outputs(model)(tokens_BL, batch, order, made)
  )
  before = outputs(batch.tokens_BL)
  for number in range(_B):
    tokens_BL = batch.tokens_BL.copy()
    tokens_BL[number, : batch.lengths_B[number]] += 1
    tokens_BL %= model.config.vocab_size
    after = outputs(tokens_BL)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after)):
      differs = np.any(np.reshape(x != y, (_B, -1)), axis=1)
      assert not differs[order != number].any()
    logprobs = before.logprobs_BL, after.logprobs_BL
    assert np.any(logprobs[0] != logprobs[1])
  assert not np.any(before.logprobs_BL[:, 0])


@pytest.mark.parametrize(
  'experts', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_annotating_packed_rows_gives_the_same_batch(experts):
  models = updates.sums()
  if experts:
    policy = updates.transformers(**tiny.MIXTURE).policy
    models = models._replace(policy=policy)
  batch = _batch(updates.sums())
  state = updates.train_state(models)
  annotated = jax.jit(
    updates.annotate(
      models, routing_replay='trainer' if experts else 'nowhere'
    ),
    compiler_options=compilations.QUICK,
  )
  expected, found = (
    annotated(
      state,
      batch,
      batches.algorithm('st_ppo'),
      reference=state.policy.params,
      packed=packed,
    )
    for packed in (None, updates.packed(batch, 2, row_length=_ROW))
  )
  expected, found = jax.device_get((expected, found))
  text = np.arange(_L)[None] < batch.lengths_B[:, None]
  for name in ('values_BL', 'expert_ids'):
    x, y = (getattr(of, name) for of in (found[0], expected[0]))
    if x is not None:
      np.testing.assert_allclose(x[text], y[text], 1e-5, 1e-6, err_msg=name)
  same = {'values_BL': None, 'expert_ids': None}
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6),
    (found[0].replace(**same), found[1]),
    (expected[0].replace(**same), expected[1]),
  )


@pytest.mark.slow
def test_mean_logprobs_are_those_of_rows_of_their_own():
  models = updates.sums()
  batch = _batch(models)
  state = updates.train_state(models)
  means = jax.jit(
    functools.partial(annotate.mean_logprobs, models=models, temperature=0.7),
    compiler_options=compilations.QUICK,
  )(
    state.params,
    forward.inputs_of(batch),
    updates.packed(batch, 2, row_length=_ROW),
  )
  logprobs_BL = forward.token_outputs(
    models.policy,
    state.policy.params,
    forward.Inputs(batch.tokens_BL),
    temperature=0.7,
  ).logprobs_BL
  for mean, logprobs, mask in zip(means, logprobs_BL, batch.loss_mask_BL):
    expected = logprobs[mask].mean() if mask.any() else 0.0
    np.testing.assert_allclose(mean, expected, rtol=1e-5)
