"""Runs of adapters, and of one backbone with both heads."""

import dataclasses
import signal

import jax
import numpy as np
import pytest

from stppo_jax.learner import value_training
from stppo_jax.models.hf import load
from stppo_jax.parallel import memory
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.rollout import prefetch
from stppo_jax.training import checkpoint_state
from tests.training import faults
from tests.training import runs

_STEPS = 2
_SHARED = {'model__value_backbone': 'shared'}


def _changes(changes):
  return changes | {'num_steps': _STEPS, 'evaluate__every': 0}


def _train(workdir, changes, act=None):
  return runs.train(workdir, act, **_changes(changes))


def _cut_train(workdir, changes):
  """Trains the same run, interrupted in its first step and resumed."""
  send = faults.send_at(('updated', 1), signal.SIGTERM)
  assert _train(workdir, changes, send) == 75
  assert len(runs.metrics(workdir)) == 1
  assert _train(workdir, changes) == 0


def _learner(changes):
  return runs.learner(runs.config(**_changes(changes)))


def _save(learner, checkpointer, step, state, record):
  """Saves a state like a run that does not collect ahead."""
  collector = prefetch.Prefetcher(
    None, None, learner.copy_policy, steps_ahead=0, num_steps=1, loop=None
  )
  replay = value_training.Replay(learner.config, learner.mesh)
  checkpoints = checkpoint_state.TrainCheckpoints(learner, collector, replay)
  arrays, ours = checkpoints.content(step, state)
  checkpointer.save(step, arrays, record | ours, waits=True)


def _newest(workdir, changes):
  """Returns (learner, start, newest state, its host record) of a run."""
  learner = _learner(changes)
  start = learner.start()
  checkpoints = checkpoint.Checkpointer(workdir, read_only=True)
  step, state, host = checkpoint_state.newest(checkpoints, learner, start)
  checkpoints.close()
  assert step == _STEPS
  return learner, start, state, host


def _size(x):
  return np.abs(np.asarray(x)).max()


@pytest.mark.slow
@pytest.mark.parametrize(
  'changes',
  [
    runs.LORA,
    _SHARED,
    runs.LORA | _SHARED | {'mesh__fsdp': 2, 'rollout__tensor': 2},
    runs.LORA | {'rollout__steps_ahead': 1},
    {'model__value_path': str(runs.REPO / 'assets' / 'quickstart')},
  ],
  ids=['adapters', 'shared', 'both, cut', 'ahead', 'another value model'],
)
def test_a_run_is_the_same_when_cut_in_two(changes, tmp_path):
  whole, cut = tmp_path / 'whole', tmp_path / 'cut'
  assert _train(whole, changes) == 0
  _cut_train(cut, changes)
  assert runs.repeated(cut) == runs.repeated(whole)
  assert runs.weights(cut) == runs.weights(whole)

  shared = 'model__value_backbone' in changes
  lines = runs.metrics(whole)
  for line in lines:
    # Engine and learner compute with other programs, and with other layouts.
    assert line['mismatch/logprob_abs_diff'] < 1e-5
    assert line['update/skipped'] == 0 and np.isfinite(line['critic/vf_loss'])
    assert ('critic/grad_norm' in line) != shared  # of an optimiser
  assert lines[0]['critic/kl'] == 0  # the reference is the start
  # The second step was collected ahead, with the start too.
  ahead = 'rollout__steps_ahead' in changes
  assert (lines[1]['critic/kl'] == 0) == ahead

  learner, start, state, host = _newest(whole, changes)
  head = state.policy if shared else state.value
  # No answer is right, so the only reward is the KL penalty.
  assert (_size(head.params['scalar_head']) == 0) == ahead
  merged = jax.device_get(learner.merged_params(state.params))
  exported = load.read_params(whole / 'policy', learner.policy.config)
  jax.tree.map(np.testing.assert_array_equal, exported, merged)
  if 'model__lora__rank' in changes:
    # Only what has adapters moved, and the base is no part of a checkpoint.
    jax.tree.map(np.testing.assert_array_equal, state.frozen, start.frozen)
    moved = jax.tree.map(lambda a, b: _size(a - b) > 0, merged, state.frozen)
    layers = moved.pop('layers')
    adapted = {'q_proj', 'o_proj', 'up_proj'}
    assert {n for n, x in layers.items() if any(x.values())} == adapted
    assert not any(jax.tree.leaves(moved))
    assert len(host['base_fingerprints']) == len(jax.tree.leaves(merged))
  else:
    assert not state.frozen and 'base_fingerprints' not in host


@pytest.mark.slow
def test_it_does_not_matter_whether_the_base_is_gathered_once(
  tmp_path, monkeypatch
):
  changes = runs.LORA | {'mesh__fsdp': 4, 'updates__microbatch_size': 8}
  assert _train(tmp_path / 'once', changes) == 0
  monkeypatch.setattr(memory, 'leaves_room', lambda mesh, size: False)
  assert _train(tmp_path / 'often', changes) == 0
  once, often = (runs.repeated(tmp_path / x) for x in ('once', 'often'))
  assert len(once) == len(often) == _STEPS
  for line, other in zip(once, often):
    assert line == pytest.approx(other, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_another_base_is_refused(tmp_path):
  learner = _learner(runs.LORA)
  start = learner.start()
  checkpoints = checkpoint.Checkpointer(tmp_path)
  _save(learner, checkpoints, 3, start, {'a': 1})
  step, state, host = checkpoint_state.newest(checkpoints, learner, start)
  assert step == 3 and state.frozen is start.frozen and host['a'] == 1
  norm = {'scale': 1.5 * start.frozen['norm']['scale']}
  other = dataclasses.replace(start, frozen=start.frozen | {'norm': norm})
  with pytest.raises(
    checkpoint_state.OtherBase, match='step 3 was trained with other'
  ) as caught:
    checkpoint_state.newest(checkpoints, learner, other)
  checkpoints.close()
  assert caught.value.exit_code == 2 and '\n' not in str(caught.value)


@pytest.mark.slow
def test_frozen_weights_have_the_dtype_of_the_computation():
  changes = {'model__dtype': 'bfloat16'}
  kinds = lambda tree: {leaf.dtype.name for leaf in jax.tree.leaves(tree)}
  assert kinds(_learner(changes).reference()) == {'bfloat16'}
  learner = _learner(changes | runs.LORA)
  start = learner.start()
  assert kinds(start.frozen) == {'bfloat16'}
  assert kinds((start.policy.params, start.value.params)) == {'float32'}
  adapted = learner.merged_params(start.params)['layers']['q_proj']['kernel']
  assert adapted.dtype == np.float32
