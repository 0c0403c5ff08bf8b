"""The lab collects, annotates and updates like a step of a run."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from benchmarks import learners
from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax.learner import value_training
from stppo_jax.parallel import distributed
from stppo_jax.parallel import sharding
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.rollout import pack
from stppo_jax.tools.lab import collection
from stppo_jax.tools.lab import estimates
from stppo_jax.tools.lab import saved_batch
from stppo_jax.workdir import run_record
from tests.training import runs

_COEFFICIENT = 0.5  # of the KL penalty, in the checkpoint
_SAMPLED = {'oracle_values_BL', 'oracle_variances_BL', 'oracle_counts_BL'}
_OF_VALUES = {'values_BL', 'old_values_BL'}


@pytest.fixture(scope='module')
def config():
  return runs.config()


@pytest.fixture(scope='module')
def collected(config):
  """Returns the saved batch of the first step of a run."""
  return collection.collect(config, workdir=None, num_updates=None)


@pytest.fixture(scope='module')
def learner(config):
  """Returns the learner of that run."""
  return runs.learner(config)


def _files(folder):
  return {
    str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
    for path in folder.rglob('*')
  }


def test_a_collection_has_every_array_of_the_file(collected):
  assert {*collected, *_SAMPLED} == {*saved_batch.ARRAY_KINDS}
  needs = dict.fromkeys(collected, 'it')
  chosen = saved_batch.select(collected, needs, dtype=np.float32)
  mask, ids = collected['loss_mask_BL'], collected['turn_ids_BL']
  assert mask.sum() > 100
  np.testing.assert_array_equal(mask, ids > 0)  # nothing has failed
  for name in ('sentence_ids_BL', 'state_ids_BL'):
    np.testing.assert_array_equal(collected[name] > 0, mask)
  assert saved_batch.num_turns(chosen) <= 3
  sampled = collected['sampler_logprobs_BL'] - collected['old_logprobs_BL']
  assert np.abs(sampled[mask]).max() < 1e-4
  assert _moved(collected, 'logprobs') > 1e-4
  assert collected['lengths_B'].shape == collected['group_ids_B'].shape == (16,)


@pytest.mark.slow
def test_sampled_values_are_added_and_change_nothing_else(config, collected):
  again = collection.collect(
    config, workdir=None, num_updates=None, continuations=2
  )
  for name, array in collected.items():
    np.testing.assert_array_equal(again[name], array, err_msg=name)
  assert again.keys() - collected.keys() == _SAMPLED
  counts, ids = again['oracle_counts_BL'], again['turn_ids_BL']
  # Before every turn, and before its last token.
  before = np.pad(ids, ((0, 0), (1, 1)))
  first, last = ids > before[:, :-2], (ids > 0) & (ids != before[:, 2:])
  np.testing.assert_array_equal(counts, np.where(first | last, 2, 0))


@pytest.mark.slow
def test_a_collection_is_annotated_and_updated_like_a_step(
  config, collected, learner
):
  names = [f.name for f in dataclasses.fields(batch_lib.TokenBatch)[:9]]
  names.remove('sentence_ids_BL')  # a run of this algorithm has none
  packed = batch_lib.TokenBatch(
    **{name: collected[name] for name in names},
    loss_positions_BM=pack.loss_positions(collected['loss_mask_BL']),
  )
  state = learner.start()
  batch, _ = learner.annotate(state, packed, reference=learner.reference())
  state, _ = learners.update_epochs(learner, state, batch, 0)
  batch = jax.device_get(batch)
  for name in ('old_logprobs_BL', 'ref_logprobs_BL', 'advantages_BL'):
    np.testing.assert_array_equal(collected[name], getattr(batch, name))
  np.testing.assert_array_equal(collected['old_values_BL'], batch.values_BL)
  tokens_BL, _ = distributed.from_local_rows(
    (packed.tokens_BL, None), sharding.batch_sharding(learner.mesh)
  )
  updated = jax.device_get(learner.token_outputs(state, tokens_BL))
  np.testing.assert_array_equal(collected['logprobs_BL'], updated.logprobs_BL)
  np.testing.assert_array_equal(
    collected['values_BL'], updated.values.values_BL
  )
  params = jax.device_get(state).policy.params
  logprobs, entropy = learner.policy.logprobs_and_entropy(
    params, collected['tokens_BL'], temperature=config.rollout.temperature
  )
  mask = collected['loss_mask_BL']
  for name, expected in (('logprobs_BL', logprobs), ('entropy_BL', entropy)):
    np.testing.assert_allclose(
      collected[name][mask], np.asarray(expected)[mask], atol=2e-6
    )
  # The update changed them by more than that.
  assert _moved(collected, 'logprobs') > 1e-4


def _moved(arrays, name):
  moved = arrays[f'{name}_BL'] - arrays[f'old_{name}_BL']
  return np.abs(moved[arrays['loss_mask_BL']]).max()


@pytest.mark.slow
def test_the_newest_checkpoint_samples_and_no_file_is_changed(
  config, collected, learner, tmp_path
):
  start = learner.start()
  params = jax.tree.map(lambda x: 1.1 * x, start.policy.params)
  policy = dataclasses.replace(start.policy, params=params)
  # The run kept collections for its value model; the config here keeps none.
  kept = value_training.Replay(
    runs.config(updates__value_epochs=1, updates__value_replay=1), learner.mesh
  )
  state = dataclasses.replace(start, policy=policy, replayed=kept.collections)
  run_record.record_config(config.to_dict(), tmp_path)
  saved = checkpoint.Checkpointer(tmp_path)
  saved.save(1, state, {'kl_coefficient': _COEFFICIENT})
  saved.save(2, start, {'kl_coefficient': 1.0}, waits=True)
  saved.close()
  for path in (tmp_path / 'checkpoints/2').rglob('d/*'):
    path.write_bytes(b'damaged')  # so step 1 is read
  before = _files(tmp_path)
  later = collection.collect(config, workdir=tmp_path, num_updates=1)
  assert _files(tmp_path) == before
  assert not np.array_equal(later['tokens_BL'], collected['tokens_BL'])
  # The reference is the start, not the sampling policy; so there is a KL
  # penalty, which the returns contain.
  mask = later['loss_mask_BL']
  apart = later['old_logprobs_BL'] - later['ref_logprobs_BL']
  assert np.abs(apart[mask]).max() > 1e-4
  assert later['kl_coefficient'] == np.float64(_COEFFICIENT)
  kl = config.algorithm.kl
  assert collected['kl_coefficient'] == kl.coefficient
  assert kl.where == 'reward'
  penalized = estimates.penalized(
    later, estimator=kl.estimator, coefficient=_COEFFICIENT
  )
  estimator = estimates.build_estimator(config.algorithm.advantage)
  found = estimates.estimate(estimator, penalized)
  for name in ('advantages_BL', 'returns_BL'):
    assert np.abs(later[name]).max() > 0
    np.testing.assert_allclose(found.arrays[name], later[name], atol=1e-5)
  assert _moved(later, 'logprobs') > 1e-4 and _moved(later, 'values') > 1e-6


@pytest.mark.slow
def test_an_algorithm_without_values_has_none_in_the_file():
  config = runs.config('so_grpo', rollout__group_size=4)
  found = collection.collect(config, workdir=None, num_updates=0)
  assert set(saved_batch.ARRAY_KINDS) - set(found) == _OF_VALUES | _SAMPLED
  assert np.bincount(found['group_ids_B']).tolist() == [4] * 4
  mask = found['loss_mask_BL']
  assert _moved(found, 'logprobs') < 2e-6  # no update, no step
  assert all(
    np.isfinite(x[mask]).all() for n, x in found.items() if n[-3:] == '_BL'
  )


def test_a_start_that_does_not_exist_yet_is_one_line(tmp_path):
  config, begun = runs.config(sft__before_training=True), tmp_path / 'begun'
  run_record.record_config(config.to_dict(), begun)
  for workdir, expected in (
    (None, '^--workdir: missing; '),
    (tmp_path, f'^no run of train in {tmp_path}$'),
    (begun, f'^{begun}/start: missing, the run has not begun$'),
  ):
    with pytest.raises(exits.Misconfigured, match=expected):
      collection.collect(config, workdir=workdir, num_updates=math.inf)
