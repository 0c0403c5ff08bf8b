"""The local engine equals repeated whole forward passes, and itself."""

import contextlib
import dataclasses
import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import lora as lora_lib
from stppo_jax.models.kernels import live_pages_gpu
from stppo_jax.parallel import sharding
from tests.models import tiny
from tests.sampling import tiny_engine

_MAX_LENGTH = tiny_engine.MAX_LENGTH
_ROWS = 10  # more than slots: three waves, or slots that are refilled
# In waves, or with slots that are refilled.
_BOTH_MODES = pytest.mark.parametrize('deterministic', [True, False])


def _logits(ids):
  """Returns the logits of the next token, from a whole forward pass."""
  padded = np.zeros((1, _MAX_LENGTH), np.int32)
  padded[0, : len(ids)] = ids
  hidden_BLD = tiny.hidden(tiny_engine.MODEL)(tiny_engine.PARAMS, padded)
  last_D = np.asarray(hidden_BLD)[0, len(ids) - 1]
  return last_D @ tiny_engine.PARAMS['lm_head'].T


def _greedy_turn(ids, max_tokens):
  """Returns a greedy turn, from one whole forward pass per token."""
  turn = []
  while len(turn) < min(max_tokens, _MAX_LENGTH - len(ids)):
    turn.append(int(np.argmax(_logits([*ids, *turn]))))
    if tiny_engine.stops_at(turn):
      break
  return turn


def _dialogues(*, delays=None, group_size=1, **options):
  engine = tiny_engine.engine(**options)
  return tiny_engine.dialogues(
    engine, _ROWS, group_size=group_size, delays=delays
  )


def _slow(options):
  """Returns the options as a case of the slow tests."""
  return pytest.param(options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  'deterministic', [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_greedy_dialogues_equal_repeated_whole_passes(deterministic):
  # An observation only sees the end of the turn if that is in the cache.
  engine = tiny_engine.engine(deterministic=deterministic)
  dialogues = tiny_engine.dialogues(engine, _ROWS, greedy=True, delays=1)
  assert dialogues.keys() == set(range(_ROWS))
  ends = set()
  for dialogue in dialogues.values():
    for start, end in dialogue.spans:
      turn = dialogue.tokens[start:end]
      assert turn == _greedy_turn(dialogue.tokens[:start], 5)
      ends.add(tiny_engine.stops_at(turn))
  assert ends == {True, False}
  assert {len(d.spans) for d in dialogues.values()} == {1, 2, 3}


@_BOTH_MODES
def test_the_tokens_of_a_row_do_not_depend_on_other_rows(deterministic):
  together = _dialogues(deterministic=deterministic)
  assert len({tuple(d.tokens) for d in together.values()}) == _ROWS
  # Now alone, while the other slots hold what is left from before.
  engine = tiny_engine.engine(deterministic=deterministic)
  for row in (2, 8):
    prompts = [None] * _ROWS
    prompts[row] = tiny_engine.prompts(_ROWS)[row]
    alone = tiny_engine.run_dialogues(engine, prompts, tiny_engine.keys(_ROWS))
    tiny_engine.assert_all_same(alone, {row: together[row]})


@pytest.mark.parametrize(
  'options',
  [
    {},
    _slow({'devices': 2, 'group_size': 2}),
    _slow({'group_size': 2, 'page_size': 10}),
    _slow({'group_size': 2, 'lanes': 2, 'slots': 8}),
  ],
  ids=str,
)
def test_the_bits_do_not_depend_on_when_observations_arrive(options):
  expected = _dialogues(**options)
  for delays in range(4):
    # Equality of floats, not closeness.
    assert _dialogues(**options, delays=delays) == expected


@pytest.mark.parametrize(
  'options',
  [
    _slow({'slots': 16}),
    _slow({'prefill_chunk': 7, 'decode_chunk': 1, 'lookahead': 0}),
    _slow({'decode_chunk': 50, 'lookahead': 2, 'page_size': 40}),
    _slow({'devices': 2}),
    _slow({'devices': 8, 'slots': 8}),
    _slow({'deterministic': False}),
    _slow({'page_size': 10}),
    _slow(
      {'deterministic': False, 'slots': 3, 'lookahead': 2, 'page_size': 14}
    ),
    {'deterministic': False, 'lookahead': 0, 'early_exit': 0.3},
    _slow({'deterministic': False, 'devices': 2}),
    {'lanes': 2, 'slots': 8},
    _slow({'deterministic': False, 'batch_rows': 2, 'lookahead': 0}),
    {'deterministic': False, 'slots': 8, 'lanes': 2, 'batch_rows': 2},
    # Rows wait for pages of others; the longest of them needs all there are.
    {'deterministic': False, 'slots': 8, 'page_size': 10, 'pages': 4},
    _slow({'deterministic': False, 'slots': 8, 'page_size': 4, 'pages': 13}),
    _slow({'deterministic': False, 'devices': 2, 'page_size': 5, 'pages': 20}),
    _slow({'deterministic': False, 'batch_rows': 2, 'pages': 3}),
  ],
  ids=str,
)
def test_other_shapes_generate_the_same_tokens(options):
  expected = _dialogues()
  for delays in (None, 1):
    found = _dialogues(delays=delays, **options)
    tiny_engine.assert_all_same(found, expected)


# The kernel for TPU, and that for GPU.
@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'interpreted'),
  [
    ('splash', pltpu.force_tpu_interpret_mode),
    ('cudnn', contextlib.nullcontext),
  ],
)
def test_a_kernel_that_reads_live_pages_generates_the_same_tokens(
  name, interpreted, monkeypatch
):
  without_gpu = functools.partial(live_pages_gpu.attend, interpret=True)
  monkeypatch.setattr(live_pages_gpu, 'attend', without_gpu)
  found = []
  for attention in ('xla', name):
    engine, _ = tiny_engine.new_engine(
      model=tiny.model(head_dim=128, attention=attention),
      page_size=128,
      deterministic=False,
    )
    with interpreted():
      found.append(tiny_engine.dialogues(engine, 10, group_size=2))
  tiny_engine.assert_all_same(*found)


# As many heads of keys as devices, and half as many: then slots are cut.
@pytest.mark.slow
@_BOTH_MODES
@pytest.mark.parametrize(
  ('devices', 'tensor', 'cache'),
  [(2, 2, (16, 1)), (4, 4, (4, 2)), (8, 2, (4, 1))],
)
def test_layers_may_be_cut_over_devices(devices, tensor, cache, deterministic):
  model = tiny.model(num_heads=4, num_kv_heads=2, vocab_size=12)
  options = {'model': model, 'slots': 8, 'deterministic': deterministic}
  found, programs = [], []
  for place in ({}, {'devices': devices, 'tensor': tensor}):
    engine, (driver,) = tiny_engine.new_engine(**place, **options)
    found.append(tiny_engine.dialogues(engine, 8))
    programs.append(driver.programs)
  tiny_engine.assert_all_same(*found)
  whole, cut = programs
  assert whole.keys_per_device[:2] == (16, 2)  # two pages a slot
  assert cut.keys_per_device[:2] == cache
  # All but the norms, which are much of a model of this size.
  of_one = whole.weights_per_device - 5 * 16
  assert cut.weights_per_device - 5 * 16 == of_one / tensor


@pytest.mark.parametrize(
  ('devices', 'slots', 'group_size'),
  [
    (1, 4, 2),
    pytest.param(1, 3, 3, marks=pytest.mark.slow),
    pytest.param(2, 4, 2, marks=pytest.mark.slow),
    # Fewer groups than devices: the other places are padding.
    pytest.param(8, 8, 4, marks=pytest.mark.slow),
    pytest.param(2, 4, 4, marks=pytest.mark.slow),
  ],
)
@_BOTH_MODES
def test_a_group_writes_what_separate_rows_would(
  devices, slots, group_size, deterministic
):
  rows, absent = 12, 1
  alone = tiny_engine.prompts(rows // group_size)
  if len(alone) > 2:
    alone[absent] = None  # its rows are left out, such as for a long prompt
  each = [prompt for prompt in alone for _ in range(group_size)]
  keys = tiny_engine.keys(rows)
  expected = tiny_engine.run_dialogues(tiny_engine.engine(), each, keys)
  engine = tiny_engine.engine(
    devices=devices, slots=slots, deterministic=deterministic
  )
  for delays in range(2):
    grouped = tiny_engine.run_dialogues(
      engine, alone, keys, group_size=group_size, delays=delays
    )
    tiny_engine.assert_all_same(grouped, expected)
  # Rows of a group have a prompt in common, but keys of their own.
  different = {tuple(dialogue.tokens) for dialogue in expected.values()}
  assert len(different) > len(alone)


@_BOTH_MODES
def test_waves_wait_for_the_last_row_and_refilling_does_not(deterministic):
  engine = tiny_engine.engine(deterministic=deterministic)
  tiny_engine.begin(engine, tiny_engine.prompts(8), max_turn_tokens=3)
  ended = set()
  while engine.busy:
    for row in engine.poll():
      ended.add(row)
      if row != 0:  # the observation of row 0 does not arrive
        engine.close(row)
  assert ended == set(range(4 if deterministic else 8))
  engine.close(0)
  while engine.busy:
    for row in engine.poll():
      ended.add(row)
      engine.close(row)
  assert ended == set(range(8))


def test_rows_that_come_later_do_not_overtake():
  engine, (driver,) = tiny_engine.engine_and_drivers(
    batch_rows=1, lookahead=0, deterministic=False
  )
  prompts = [tiny_engine.ids(n, 20 if n == 0 else 3) for n in range(12)]
  tiny_engine.begin(engine, prompts, max_turn_tokens=6)
  ended = []
  while engine.busy:
    for row in engine.poll():
      ended.append(row)
      engine.close(row)
  assert len(ended) == 12 and 0 in ended[:5]
  # Every row gets a chunk before any row gets another one.
  decoded = [[*slots] for name, slots in driver.calls if name == 'decode']
  assert sorted(decoded[:4]) == [[0], [1], [2], [3]]


def test_a_prompt_is_copied_before_its_slot_is_given_away():
  prompts = tiny_engine.prompts(4)
  engine = tiny_engine.engine(deterministic=False)

  def first_turns(order):
    """Returns the first turn of each row; `order` says when rows are closed."""
    tiny_engine.begin(engine, prompts, group_size=2, max_turn_tokens=3)
    turns = tiny_engine.first_turns(engine, order)
    return {row: turn.token_ids.tolist() for row, turn in turns.items()}

  # The first row of the third group gets slot 1 and ends. The second row gets
  # slot 0, while slot 1, the only one with their prompt, is overwritten.
  expected = first_turns([(0, 1, 2, 3)])
  assert first_turns([(1,), (0, 4), (2,)]) == expected


@_BOTH_MODES
def test_turns_end_at_a_stop_or_at_their_budget(deterministic):
  engine = tiny_engine.engine(deterministic=deterministic)
  lengths = [2, _MAX_LENGTH - 2, _MAX_LENGTH - 1, 9]
  reached = set()
  prompts = [tiny_engine.ids(n, length) for n, length in enumerate(lengths)]
  for max_tokens in (5, 1, 7):
    tiny_engine.begin(engine, prompts, max_turn_tokens=max_tokens)
    ended = {}
    while engine.busy:
      ended |= engine.poll()
    assert ended.keys() == {0, 1, 2, 3}
    for row, turn in ended.items():
      budget = min(max_tokens, _MAX_LENGTH - lengths[row])
      count = len(turn.token_ids)
      assert len(turn.logprobs) == len(turn.truncated_logprobs) == count > 0
      assert engine.remaining(row) == _MAX_LENGTH - lengths[row] - count
      # It stops as soon as a stop string is complete, and never before.
      assert turn.stopped == tiny_engine.stops_at(turn.token_ids)
      assert not any(
        tiny_engine.stops_at(turn.token_ids[:n]) for n in range(count)
      )
      assert turn.stopped or count == budget
      reached.add((turn.stopped, count == budget))
  assert {(True, False), (False, True)} <= reached


def test_a_group_must_fill_the_slots_of_a_lane():
  # Otherwise it would wait for slots that are never free together.
  for group_size in (3, 8):
    with pytest.raises(ValueError, match=f'^{group_size} must divide the 4 '):
      engine = tiny_engine.engine(slots=4)
      tiny_engine.begin(engine, tiny_engine.prompts(1), group_size=group_size)


@_BOTH_MODES
def test_a_new_collection_drops_the_last_one(deterministic):
  engine = tiny_engine.engine(deterministic=deterministic, lookahead=2)
  expected = _dialogues(deterministic=deterministic, lookahead=2)
  for polls in (2, 5):
    tiny_engine.begin(engine, tiny_engine.prompts(9))
    for n in range(polls):
      for row, _ in engine.poll().items():
        if n % 2:
          engine.resume(row, tiny_engine.ids(row, 3))
        else:
          engine.close(row)
    again = _dialogues(deterministic=deterministic, lookahead=2)
    assert again == expected
  tiny_engine.begin(engine, [])
  assert not engine.busy and not engine.poll()


@pytest.mark.slow
def test_a_cache_of_8_bits_moves_log_probabilities_a_little():
  exact, rounded = (
    tiny_engine.dialogues(
      tiny_engine.new_engine(model=tiny.model(cache=cache))[0], 8
    )
    for cache in ('model', 'int8')
  )
  # Rows with equal tokens can be compared: nearly all.
  same = [n for n in exact if exact[n].tokens == rounded[n].tokens]
  assert len(same) >= 6
  distances = np.concatenate(
    [np.subtract(exact[n].logprobs, rounded[n].logprobs) for n in same]
  )
  assert 1e-4 < np.abs(distances).max() < 0.1


@pytest.mark.slow
def test_only_adapters_are_published_beside_a_base():
  lora = lora_lib.Lora(rank=2, alpha=8.0, targets='(q|down)_proj$')
  model = dataclasses.replace(tiny_engine.MODEL, lora=lora)
  drawn = model.init_adapters(jax.random.key(0))
  adapters = [
    jax.tree.map(
      lambda x, n=n: jax.random.normal(jax.random.key(n), x.shape), drawn
    )
    for n in range(2)
  ]
  base = jax.tree.map(jnp.asarray, tiny_engine.PARAMS)
  engine, (driver,) = tiny_engine.new_engine(model=model)

  def kernel(trained, base):
    engine.publish(trained, 1, base=base)
    return driver.programs.weights.params['layers'][0]['o_proj']['kernel']

  kernels = []
  for trained in adapters:
    kernels.append(kernel(trained, base))
    merged = tiny_engine.engine()
    merged.publish(model.merge_adapters(lora_lib.join(base, trained)), 1)
    tiny_engine.assert_all_same(
      tiny_engine.dialogues(engine, 4, greedy=True),
      tiny_engine.dialogues(merged, 4, greedy=True),
    )
  assert kernels[0] is kernels[1]  # the base has not moved
  assert kernel(adapters[0], jax.tree.map(jnp.copy, base)) is not kernels[0]


def test_publishing_copies_the_weights():
  whole = sharding.replicated(tiny_engine.placement().mesh)
  # The update donates its buffers: they are overwritten or gone.
  update = jax.jit(
    lambda params: jax.tree.map(lambda x: x - 7, params), donate_argnums=0
  )
  engine = tiny_engine.engine()
  results = []
  for seed in (0, 1):
    training = jax.device_put(tiny.params(tiny_engine.MODEL, seed), whole)
    engine.publish(training, 7 + seed)
    update(training)
    jax.tree.map(lambda x: x.delete(), training)
    results.append(_dialogues())
  engine.publish(tiny_engine.PARAMS, 0)
  assert results[0] == _dialogues()
  assert all(results[0][n].tokens != results[1][n].tokens for n in results[0])


@_BOTH_MODES
def test_a_released_engine_holds_nothing_and_then_repeats_its_bits(
  deterministic,
):
  engine, (driver,) = tiny_engine.new_engine(deterministic=deterministic)
  first = tiny_engine.dialogues(engine, _ROWS)
  weights = sum(
    x.nbytes for x in jax.tree.leaves(driver.programs.weights.params)
  )
  cache = jax.eval_shape(
    lambda: cache_lib.empty(tiny_engine.MODEL.config, 4, _MAX_LENGTH)
  )
  cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  held = _live()
  engine.release()
  assert held - _live() >= weights + cache
  engine.publish(tiny_engine.PARAMS, 1)
  assert tiny_engine.dialogues(engine, _ROWS) == first


def _live():
  """Returns the bytes of all arrays."""
  return sum(x.nbytes for x in jax.live_arrays())
