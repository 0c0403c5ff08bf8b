"""A run is refused, or its faults are named, before it or in its first step.

Data that it cannot use and devices that are too small are told before anything
is written; on the first step, rounding passes, and everything else does not.
"""

import json
import math

import ml_collections
import pytest

from stppo_jax import __main__
from stppo_jax.parallel import memory
from stppo_jax.tools.plan import plan
from stppo_jax.training import checks
from stppo_jax.training import components
from stppo_jax.training import engines
from tests.training import runs

_FILES = {
  'data__name': 'jsonl',
  'data__train': 'train.jsonl',
  'data__corpus': 'corpus.jsonl',
  'data__tokenizer_vocab_size': 300,
  'env__max_length': 1200,
  'env__max_turn_tokens': 8,
  'evaluate__every': 0,
  'rollout__length_bucket': 1200,
}
_QUESTION = {'dataset': 'own', 'kind': 'open', 'answers': ['x']}


def _write(folder, questions, name='train.jsonl'):
  lines = [
    json.dumps({**_QUESTION, 'id': str(n), **question})
    for n, question in enumerate(questions)
  ]
  folder.mkdir(exist_ok=True)
  (folder / name).write_text('\n'.join(lines), encoding='utf-8')
  passage = {'id': '1', 'title': 'A', 'text': 'text'}
  (folder / 'corpus.jsonl').write_text(json.dumps(passage), encoding='utf-8')


def _train(folder, **changes):
  return runs.train(
    folder / 'run', **{**_FILES, 'data__root': str(folder / 'data'), **changes}
  )


@pytest.mark.parametrize('name', ['train', 'evaluation'])
def test_prompts_that_are_all_too_long_are_refused(tmp_path, capsys, name):
  _write(tmp_path / 'data', [{'question': 'q?'}] * 16)
  long = 'why ' * 300
  _write(
    tmp_path / 'data',
    [{'question': f'{long}{n}?'} for n in range(16)],
    f'{name}.jsonl',
  )
  changes = {f'data__{name}': f'{name}.jsonl'}
  assert _train(tmp_path, **changes) == 2
  (line,) = capsys.readouterr().err.splitlines()
  count = 16 if name == 'train' else 8  # evaluate.num_questions
  assert line.startswith(f'data.{name}') and f'{count} of {count}' in line
  assert not (tmp_path / 'run').exists()


def test_prompts_that_are_too_long_and_passages_not_there_are_counted(
  tmp_path, capsys
):
  questions = [{'question': 'q?', 'gold_pids': ['1']}] * 14
  questions += [{'question': 'why ' * 300, 'gold_pids': ['1', 'p9']}] * 2
  _write(tmp_path / 'data', questions)
  flags = runs.flags(**_FILES, data__root=tmp_path / 'data')
  assert __main__.main(['doctor', *flags]) == 0
  out, _ = capsys.readouterr()
  assert 'data.train: 2 of 16 prompts' in out
  assert 'data.train: 2 of 16 questions' in out and "'p9'" in out


# Weights are larger than what a batch needs.
_LARGE = {
  'model__hidden_size': 256,
  'model__intermediate_size': 2048,
  'model__num_layers': 4,
  'updates__head_chunk': 16,
}


def _check_memory(config, limit):
  found = components.build(config)
  checks.check_memory(config, found.learner, found.placement, limit)


def test_memory_that_is_not_known_refuses_nothing():
  assert memory.device_limit() is None  # as on every CPU
  _check_memory(runs.config(), None)


def test_the_line_names_what_would_fit(tmp_path, monkeypatch, capsys):
  config = runs.config(**_LARGE)
  made = plan.make(config, length=128, loss_fraction=0.5)
  need = sum(made.held.sizes.values()) + made.estimated['gradients']
  _check_memory(config, need)
  with pytest.raises(checks.DoesNotFit):
    _check_memory(config, need - 1)

  def refused(limit):
    """Returns the line of a run on devices of so many bytes."""
    monkeypatch.setattr(memory, 'device_limit', lambda: limit)
    assert runs.train(tmp_path / 'run', **_LARGE) == 2
    assert not (tmp_path / 'run').exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line

  line = refused(need // 2)
  for size in (need, need // 2):
    assert f'{size / 2**30:.2g} GiB' in line
  assert ' for policy optimizer, ' in line
  assert line.endswith('--config.mesh.data=1 --config.mesh.fsdp=-1')
  assert 'use more devices' in refused(1)


def _slots(**changes):
  """Returns a function from bytes of a device to the slots of a host."""
  config = runs.config(rollout__trajectories_per_step=96, **changes)
  found = components.build(config)

  def slots(limit):
    fitting = checks.sized(config, found.learner, found.placement, limit)
    assert fitting.rollout.slots in (0, components.num_slots(fitting, 1))
    return components.num_slots(fitting, 1)

  return config, found, slots


def test_as_many_slots_as_fit_are_filled_in_equal_waves():
  config, found, slots = _slots()
  held = checks.held_memory(config, found.learner, found.placement)
  whole = engines.slot_memory(config, found.learner.policy, found.placement)
  cache = held.collecting[engines.CACHE]
  beside = sum(held.collecting.values()) - cache
  # On 8 devices, a wave has a multiple of 8 slots. 88 would be 88 + 8.
  for room, expected in (
    (1, 96),
    (95 / 96, 48),
    (0.5, 48),
    (0.4, 32),
    (0.3, 24),
    (0.24, 16),  # neither four waves of 24 nor five, in which devices share 20
    (0.2, 16),
    (0.1, 8),
    (0, 8),
  ):
    assert slots((beside + room * whole) / 0.9 + 1) == expected, room
  assert slots(None) == 96  # as on a CPU
  # Slots of the config are kept, and a group is not divided.
  assert _slots(rollout__slots=48)[-1](1) == 48
  assert _slots(rollout__group_size=3)[-1](1) == 24


def test_the_collections_that_values_repeat_take_memory():
  changes = {'env__max_length': 100, 'rollout__length_bucket': 64}
  sizes = []
  for count in (0, 2):
    config = runs.config(
      updates__value_epochs=1, updates__value_replay=count, **changes
    )
    found = components.build(config)
    held = checks.held_memory(config, found.learner, found.placement)
    sizes.append(held.learns)
  rows = config.rollout.trajectories_per_step
  # On each of 8 devices: two collections, 10 bytes for each of 128 tokens of a
  # row, and 4 for its length.
  assert sizes[1] - sizes[0] == 2 * rows * (128 * 10 + 4) // 8


def _metrics(mean, tail):
  return {
    'mismatch/logprob_abs_diff_mean': mean,
    'mismatch/logprob_abs_diff_p99': tail,
  }


def _check_mismatch(metrics, *, limit, dtype):
  config = ml_collections.ConfigDict(
    {'rollout': {'mismatch_limit': limit}, 'model': {'dtype': dtype}}
  )
  checks.check_mismatch(config, metrics)


@pytest.mark.parametrize(
  ('dtype', 'mean', 'tail'),
  [
    ('float32', 0.0, 0.0),
    ('float32', 3e-6, 2e-5),
    ('bfloat16', 0.01, 0.1),
  ],
)
def test_rounding_is_agreement(dtype, mean, tail):
  _check_mismatch(_metrics(mean, tail), limit=-1.0, dtype=dtype)


@pytest.mark.parametrize(
  ('mean', 'tail'),
  [(1.1, 2.0), (0.5, 10.1), (math.inf, 2.0), (math.nan, 2.0), (0.5, math.nan)],
)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_anything_else_is_one_line(dtype, mean, tail):
  metrics = _metrics(mean, tail)
  with pytest.raises(checks.Disagreement) as caught:
    _check_mismatch(metrics, limit=-1.0, dtype=dtype)
  assert caught.value.exit_code == 2
  (line,) = str(caught.value).splitlines()
  assert f'_mean is {mean:.3g}' in line and f'_p99 is {tail:.3g}' in line
  assert f'model.dtype={dtype}' in line
  with pytest.raises(checks.Disagreement, match='by rollout.mismatch_l'):
    _check_mismatch(metrics, limit=1.0, dtype=dtype)
  _check_mismatch(metrics, limit=0.0, dtype=dtype)  # switched off
