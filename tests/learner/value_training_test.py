"""A value model that learns alone: its passes, its warm-up and its replay."""

import jax
import numpy as np
import pytest

from stppo_jax.configs import algorithms
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import value_training
from stppo_jax.models.hf import load
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.rl import estimator_needs
from tests.learner import trees
from tests.training import runs

_WITH_VALUES = [
  name
  for name, algorithm in algorithms.ALGORITHMS.items()
  if algorithm['advantage']['name'] in estimator_needs.VALUES
]


def _annotated(learner, state=None):
  state = state or learner.start()
  batch, _ = learner.annotate(
    state, runs.packed(), reference=learner.reference()
  )
  return state, batch


def _close(actual, expected):
  trees.assert_close(actual, expected, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize('core_rows', [0, 2])
def test_values_learn_alone_as_beside_the_policy(core_rows):
  config = runs.config(updates__core_rows=core_rows)
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  learner = learner_lib.Learner(config, runs.shape(config), mesh)
  # With rows for each core, another program sums the microbatches.
  assert (learner.sizes.num_workers > 1) == (core_rows > 0)
  state, batch = _annotated(learner)
  rows = learner.minibatches(len(batch.lengths_B), 0)[0]
  start = jax.device_get(state.policy)
  both, update = learner.update(state, batch, rows, 0)
  both = jax.device_get(both)
  alone, of_values = learner.update(
    learner.start(), batch, rows, 0, values_alone=True
  )
  trees.assert_equal(alone.policy, start)
  _close(alone.value, both.value)
  assert alone.value.updates == 1
  for name in ('critic/vf_loss', 'critic/grad_norm', 'update/skipped'):
    _close(of_values.metrics[name], update.metrics[name])


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', _WITH_VALUES)
def test_values_learn_alone_with_every_algorithm(algorithm):
  config = runs.config(algorithm, updates__value_epochs=1)
  learner = runs.learner(config)
  state, batch = _annotated(learner)
  before = jax.device_get(state)
  further = learner.minibatches(len(batch.lengths_B), 0, values_alone=True)
  state, _ = learner.update(state, batch, further[0], 0, values_alone=True)
  trees.assert_equal(state.policy, before.policy)
  assert state.value.updates == 1


def test_further_passes_follow_those_of_the_policy():
  config = runs.config(updates__num_epochs=2, updates__value_epochs=3)
  learner = runs.learner(config)
  rows = len(runs.packed().lengths_B)
  first = learner.minibatches(rows, 4)
  further = learner.minibatches(rows, 4, values_alone=True)
  per_epoch = rows // config.updates.minibatch_size
  assert len(first) == 2 * per_epoch and len(further) == 3 * per_epoch
  every = learner.minibatches(rows, 4, num_updates=5 * per_epoch)
  np.testing.assert_array_equal([*first, *further], every)


def test_the_warmup_ends_when_the_explained_variance_stops_rising():
  warmup = value_training.Warmup(steps=9, patience=2)
  explained = [-0.5, 0.1, 0.1, float('nan'), 0.3]
  ends = [warmup.observe(step, x) for step, x in enumerate(explained)]
  # Equal is no rise, and neither is a number that does not exist.
  assert ends == [False, False, False, True, False]
  assert (warmup.end, warmup.best, warmup.best_step) == (3, 0.1, 1)
  patient = value_training.Warmup(steps=3, patience=0)
  assert not any(patient.observe(step, -step) for step in range(5))
  assert patient.end == 3


@pytest.mark.slow
def test_a_value_model_starts_from_a_directory_of_its_own():
  quickstart = str(runs.REPO / 'assets' / 'quickstart')
  learner = runs.learner(runs.config(model__value_path=quickstart))
  state, batch = _annotated(learner)
  before = jax.device_get(state)
  theirs = load.read_params(quickstart, learner.models.value.config)
  for name in ('embedding', 'norm', 'layers'):
    trees.assert_equal(before.value.params[name], theirs[name])
  assert before.policy.params['embedding'].shape[1] == 16  # half as wide
  rows = learner.minibatches(len(batch.lengths_B), 0)[0]
  state, update = learner.update(state, batch, rows, 0)
  # Its head was 0, so that only the head has a gradient.
  assert update.metrics['critic/grad_norm'] > 0
  moved = np.any(state.value.params['scalar_head'] != 0)
  assert moved and state.policy.updates == state.value.updates == 1


@pytest.mark.slow
@pytest.mark.parametrize('bins', [2, 5])
@pytest.mark.parametrize('backbone', ['own', 'shared'])
def test_values_in_a_range_start_in_its_middle_and_learn(backbone, bins):
  learner = runs.learner(
    runs.config(
      loss__value_range=(-1.0, 3.0),
      loss__value_bins=bins,
      model__value_backbone=backbone,
      value_optimizer__warmup_updates=0,
      policy_optimizer__warmup_updates=0,
    )
  )
  state, batch = _annotated(learner)
  values_BL = jax.device_get(batch.values_BL)
  # The mean of several bins is a rounded sum.
  rtol = 0 if bins == 2 else 1e-6
  np.testing.assert_allclose(values_BL[batch.loss_mask_BL], 1.0, rtol=rtol)
  rows = learner.minibatches(len(batch.lengths_B), 0)[0]
  state, update = learner.update(state, batch, rows, 0)
  # All bins are equally likely, whatever the return is.
  np.testing.assert_allclose(
    update.metrics['critic/vf_loss'], np.log(bins), rtol=1e-6
  )
  _, after = _annotated(learner, state)
  assert np.ptp(jax.device_get(after.values_BL)[batch.loss_mask_BL]) > 0


def _numbered(learner, number):
  """Returns a batch in which all returns are a number."""
  packed = runs.packed()
  mask_BL = packed.loss_mask_BL
  returns_BL = np.full(mask_BL.shape, number, np.float32)
  return packed.replace(returns_BL=returns_BL, value_mask_BL=mask_BL)


def test_the_newest_collections_are_kept():
  learner = runs.learner(
    runs.config(updates__value_epochs=1, updates__value_replay=2)
  )
  replay = value_training.Replay(learner.config, learner.mesh)
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  wanted = shapes(
    value_training.abstract_collections(learner.config, learner.mesh)
  )
  for step, kept in enumerate([[], [0], [0, 1], [1, 2], [2, 3]]):
    collections = replay.before(step)
    assert [x.returns_BL[0, 0] for x in collections] == kept
    assert shapes(replay.collections) == wanted
    batch = _numbered(learner, step)
    for collection in collections:
      length = batch.tokens_BL.shape[1]
      tokens_BL = np.asarray(collection.tokens_BL)
      np.testing.assert_array_equal(tokens_BL[:, :length], batch.tokens_BL)
      assert not tokens_BL[:, length:].any()
      np.testing.assert_array_equal(collection.lengths_B, batch.lengths_B)
    replay.add(batch)


def test_without_replay_nothing_is_kept():
  learner = runs.learner(runs.config())
  replay = value_training.Replay(learner.config, learner.mesh)
  replay.add(_numbered(learner, 0))
  assert replay.collections == replay.before(1) == ()


@pytest.mark.parametrize('path', ['', str(runs.REPO / 'assets/quickstart')])
def test_more_than_two_bins_have_an_output_each(path):
  for bins, outputs in ((2, 1), (5, 5)):
    config = runs.config(
      loss__value_range=(0.0, 1.0),
      loss__value_bins=bins,
      model__value_path=path,
    )
    models = runs.learner(config).models
    assert models.value.config.value_outputs == outputs
    assert models.policy.config.value_outputs == 1


@pytest.mark.slow
@pytest.mark.parametrize('bins', [2, 5])
def test_a_kept_collection_teaches_what_its_batch_taught(bins):
  config = runs.config(
    updates__value_epochs=1,
    updates__value_replay=1,
    loss__value_range=(-1.0, 2.0),
    loss__value_bins=bins,
    loss__value_clip=0.01,
    env__max_length=runs.config().env.max_length + 16,
  )
  learner = runs.learner(config)
  replay = value_training.Replay(config, learner.mesh)
  _, batch = _annotated(learner)
  # So far from the present values, clipping removes nearly all gradients.
  batch = batch.replace(values_BL=batch.values_BL - 5.0)
  replay.add(batch)
  (kept,) = replay.before(1)
  assert kept.tokens_BL.shape[1] > batch.tokens_BL.shape[1]
  rows = learner.minibatches(len(batch.lengths_B), 0, values_alone=True)[0]
  states = [
    jax.device_get(
      learner.update(learner.start(), x, rows, 0, values_alone=True)
    )
    for x in (batch.replace(values_BL=None), kept, batch)
  ]
  _close(*states[:2])
  assert states[0][0].value.updates == 1
  clipped = [update.metrics['critic/vf_clipfrac'] for _, update in states]
  assert clipped[0] == clipped[1] == 0 < clipped[2]


@pytest.mark.slow
def test_a_resumed_run_repeats_the_same_collections(tmp_path):
  changes = {
    'updates__value_epochs': 1,
    'updates__value_replay': 2,
    'evaluate__every': 0,
  }
  whole, parts, alone = (tmp_path / name for name in ('whole', 'parts', 'none'))
  assert runs.train(whole, **changes, num_steps=4) == 0
  for num_steps in (1, 3, 4):
    assert runs.train(parts, **changes, num_steps=num_steps) == 0
  runs.train(alone, **changes | {'updates__value_replay': 0}, num_steps=4)
  values = [
    [line['critic/values/mean'] for line in runs.metrics(path)]
    for path in (whole, parts, alone)
  ]
  assert values[0] == values[1]
  # The second step is the first one that repeats a collection.
  equal = [x == y for x, y in zip(values[0], values[2])]
  assert equal == [True, True, False, False]
