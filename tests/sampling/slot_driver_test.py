"""The compiled programs run as rarely, as small and as lean as they should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stppo_jax.parallel import sharding
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import slot_driver as slot_driver_lib
from stppo_jax.sampling import slot_programs
from tests.models import tiny
from tests.sampling import tiny_engine


@functools.cache
def _programs(*, model=tiny_engine.MODEL, devices=1, **changes):
  """Returns compiled programs and the options that they were made with."""
  options = tiny_engine.options(**({'deterministic': False} | changes))
  programs = compiled_programs.CompiledPrograms(
    model,
    placement=tiny_engine.placement(devices),
    automaton=tiny_engine.automaton(),
    options=options,
  )
  return programs, options


def _driver(**changes):
  """Returns a driver with weights, and its programs."""
  programs, options = _programs(**changes)
  programs.publish(tiny_engine.PARAMS)
  return slot_driver_lib.SlotDriver(programs, options), programs


def _dialogues(engine, rows, seed, group_size, delays):
  return tiny_engine.run_dialogues(
    engine,
    tiny_engine.prompts(rows // group_size),
    tiny_engine.keys(rows, seed),
    group_size=group_size,
    delays=delays,
  )


def _calls(driver, name):
  """Returns the recorded calls of a program, with numpy arrays."""
  return jax.tree.map(np.asarray, driver.programs.calls[name])


@pytest.mark.slow
@pytest.mark.parametrize(
  'devices', [pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_nothing_is_compiled_after_the_warm_up(devices):
  # Engines that wait and engines that refill have the same programs. No other
  # test has these: its chunks have another length.
  engines, drivers = [], []
  for deterministic in (False, True):
    engine, (driver,) = tiny_engine.new_engine(
      devices=devices,
      slots=2 * devices,
      deterministic=deterministic,
      decode_chunk=2,
      early_exit=0.3,
    )
    engines.append(engine)
    drivers.append(driver)
    for group_size in (1, 2):
      _dialogues(engine, 24, group_size, group_size, group_size)
  compiled = [dict(driver.programs.compiled) for driver in drivers]
  refilling, waiting = compiled
  # One for each size of a batch: two slots of each device, or one.
  assert refilling['decode'] == 2 and waiting['decode'] == 0
  assert refilling['extend'] == 2
  # In waves, the prompts of groups are one more shape.
  assert waiting['extend'] <= 1
  for engine, driver in zip(engines, drivers):
    driver.programs.forget_calls()
    for seed in range(2, 6):
      _dialogues(engine, 12 + 2 * seed, seed, 1 + seed % 2, seed)
    assert len(driver.programs.calls['decode']) >= 50
  assert [driver.programs.compiled for driver in drivers] == compiled


def test_programs_run_on_the_active_slots_only():
  engine, (driver,) = tiny_engine.engine_and_drivers(deterministic=False)
  _dialogues(engine, 12, 0, 1, 3)
  sizes = set()
  for slots_A, key_data_A2, *_ in _calls(driver, 'decode'):
    sizes.add(len(key_data_A2))
    if slots_A is None:
      assert len(key_data_A2) == 4
      continue
    assert len(slots_A) == len(key_data_A2)
    active = slots_A[slots_A < 4]
    assert len(set(active)) == len(active) > len(slots_A) // 2
    assert not key_data_A2[slots_A == 4].any()
  assert sizes == {4, 2, 1}


@pytest.mark.slow
def test_each_device_runs_as_many_of_its_active_slots():
  engine, (driver,) = tiny_engine.engine_and_drivers(
    deterministic=False, devices=2, slots=8
  )
  _dialogues(engine, 12, 0, 1, 3)
  sizes = set()
  for slots, key_data_A2, *_ in _calls(driver, 'decode'):
    sizes.add(len(key_data_A2))
    if slots is None:
      assert len(key_data_A2) == 8
      continue
    assert slots.size == len(key_data_A2) and len(slots) == 2
    for own in slots:
      active = own[own < 8]
      assert len(set(active)) == len(active) and all(active < 4)
    # The device with most of them needs the size.
    assert (slots < 8).sum(axis=1).max() > slots.shape[1] // 2
    assert not key_data_A2[slots.reshape(-1) == 8].any()
  assert sizes == {8, 4, 2}


@pytest.mark.parametrize(
  'devices', [1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_deterministic_programs_always_run_on_all_slots(devices):
  engine, (driver,) = tiny_engine.engine_and_drivers(devices=devices)
  _dialogues(engine, 12, 0, 1, 3)
  decodes, extends = _calls(driver, 'decode'), _calls(driver, 'extend')
  assert decodes and extends
  assert all(slots_A is None for slots_A, *_ in decodes + extends)
  assert {key_data.shape for _, key_data, *_ in decodes} == {(4, 2)}
  assert {batch.tokens_AC.shape for _, batch in extends} == {(4, 4)}


@pytest.mark.parametrize(
  ('devices', 'slots', 'group_size', 'prompt_slots'),
  [
    (1, 4, 2, 2),
    (1, 4, 4, 1),
    (2, 4, 2, 2),
    (2, 4, 4, 2),  # one group on two devices: one slot is padding
    (1, 4, 1, 4),
  ],
)
def test_a_wave_computes_each_prompt_once(
  devices, slots, group_size, prompt_slots
):
  engine, (driver,) = tiny_engine.engine_and_drivers(
    devices=devices, slots=slots
  )
  prompts = tiny_engine.prompts(slots // group_size)
  engine.begin(
    prompts,
    tiny_engine.keys(slots),
    group_size=group_size,
    max_turn_tokens=3,
    greedy=False,
  )
  engine.poll()
  batches = [batch for _, batch in _calls(driver, 'extend')]
  longest = max(map(len, prompts))
  shapes = [batch.tokens_AC.shape for batch in batches]
  assert shapes == [(prompt_slots, 4)] * -(-longest // 4)
  assert sum(batch.starts_A.sum() for batch in batches) == len(prompts)
  assert sum(batch.counts_A.sum() for batch in batches) == sum(
    map(len, prompts)
  )
  assert len(driver.programs.calls['repeat']) == (group_size > 1)


@pytest.mark.parametrize(('slots', 'group_size'), [(4, 4), (3, 3)])
@pytest.mark.parametrize('delays', range(3))
def test_refilling_computes_each_prompt_once(slots, group_size, delays):
  engine, (driver,) = tiny_engine.engine_and_drivers(
    slots=slots, deterministic=False
  )
  rows = 24
  _dialogues(engine, rows, 0, group_size, delays)
  computed = sum(batch.starts_A.sum() for _, batch in _calls(driver, 'extend'))
  assert computed == rows // group_size
  copied = sum(
    (slots_A < slots).sum() for _, slots_A, *_ in _calls(driver, 'copy')
  )
  assert copied == rows - computed


def _turns(driver, slots):
  """Returns the turns of slots, all of them sampled with the same key."""
  turns = {slot: [] for slot in slots}
  while True:
    placed, chunk = driver.decode(
      {
        slot: slot_driver_lib.Decode(np.zeros(2, np.uint32), 40)
        for slot in slots
      },
      greedy=False,
      enough=len(slots),
    )
    for place, slot in enumerate(placed):
      count = chunk.counts_A[place]
      if slot is not None:
        turns[slot] += chunk.tokens_AC[place, :count].tolist()
    if all(chunk.ended_A[n] for n, s in enumerate(placed) if s is not None):
      return turns


def test_weights_are_stored_in_the_dtype_of_the_computation():
  for dtype in ('float32', 'bfloat16'):
    model = tiny.model(dtype=dtype)
    _, programs = _driver(model=model)
    weights = jax.tree.leaves(programs.params)
    assert {x.dtype for x in weights} == {jnp.dtype(dtype)}


def test_a_prompt_can_be_copied_between_any_slots():
  driver, _ = _driver()
  prompts = [tiny_engine.ids(n, 3 + 2 * n) for n in range(4)]
  opened = {
    n: slot_driver_lib.Append(ids, 0, 6) for n, ids in enumerate(prompts)
  }
  driver.start_wave(opened, 1)
  expected = _turns(driver, range(4))
  assert len({tuple(turn) for turn in expected.values()}) == 4
  # The sources have gone on; two slots swap their prompts, one keeps its own.
  driver.append({1: slot_driver_lib.Append(tiny_engine.ids(9, 7), 11, 3)})
  driver.copy(
    {
      source: slot_driver_lib.CopyPrompt(other, len(prompts[other]), 6)
      for source, other in ((0, 1), (1, 0), (2, 2))
    }
  )
  copied = _turns(driver, [0, 1, 2])
  assert copied == {0: expected[1], 1: expected[0], 2: expected[2]}
  # A copy is as good a source as the first; what was not named is untouched.
  driver.copy({2: slot_driver_lib.CopyPrompt(0, len(prompts[1]), 6)})
  assert _turns(driver, [2]) == {2: expected[1]}
  driver.copy({0: slot_driver_lib.CopyPrompt(3, len(prompts[3]), 6)})
  assert _turns(driver, [0]) == {0: expected[3]}


def test_a_slot_that_starts_anew_has_nothing_left_of_its_last_row():
  driver, _ = _driver()
  prompt = slot_driver_lib.Append(tiny_engine.ids(5, 6), 0, 6)
  driver.start_wave({0: prompt}, 1)
  (expected,) = _turns(driver, [0]).values()
  driver.start_wave(
    {n: slot_driver_lib.Append(tiny_engine.ids(n, 30), 0, 9) for n in (0, 1)}, 1
  )
  _turns(driver, [0, 1])
  driver.append({1: prompt})
  assert _turns(driver, [1]) == {1: expected}


def test_values_that_are_not_finite_stay_in_their_row():
  driver, programs = _driver()
  prompt = slot_driver_lib.Append(tiny_engine.ids(5, 6), 0, 6)
  driver.start_wave({0: prompt}, 1)
  (expected,) = _turns(driver, [0]).values()
  # They come up while the prompt is appended, or only while a turn is decoded.
  for in_prompt in (True, False):
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), tiny_engine.PARAMS)
    if in_prompt:
      programs.publish(broken)
    driver.append({1: slot_driver_lib.Append(tiny_engine.ids(1, 20), 0, 9)})
    programs.publish(broken)
    _turns(driver, [1])
    programs.publish(tiny_engine.PARAMS)
    driver.append({1: prompt})
    assert _turns(driver, [1]) == {1: expected}


def test_a_chunk_ends_with_enough_turns():
  driver, _ = _driver()
  budgets = (1, 2, 3, 3)
  ids = tiny_engine.ids(1, 4)
  for enough, steps in ((1, 1), (2, 2), (4, 3)):
    driver.start_wave(
      {n: slot_driver_lib.Append(ids, 0, b) for n, b in enumerate(budgets)}, 1
    )
    writes = {
      n: slot_driver_lib.Decode(np.zeros(2, np.uint32), 4) for n in range(4)
    }
    _, chunk = driver.decode(writes, greedy=False, enough=enough)
    assert not chunk.stopped_A.any()  # so that budgets end all turns
    assert chunk.counts_A.tolist() == [min(b, steps) for b in budgets]


def _shapes(programs, slots, devices=1):
  """Returns weights and state of all slots, as shapes."""
  state = jax.eval_shape(lambda: programs.empty(slots))
  by_slot = sharding.batch_sharding(tiny_engine.placement(devices).mesh)
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_slot)
  params = jax.tree.map(jnp.asarray, tiny_engine.PARAMS)
  return tiny_engine.MODEL.split_layers(params), jax.tree.map(shape, state)


@pytest.mark.parametrize('name', ['decode', 'extend'])
def test_the_cache_is_updated_in_place(name):
  slots, length, C = 8, 4096, 1
  programs, _ = _programs(slots=slots, max_length=length)
  params, state = _shapes(programs, slots)
  if name == 'decode':
    keys = np.zeros((slots, 2), np.uint32)
    args = params, state, keys, programs.table_ZV
    options = {'greedy': False, 'enough': slots}
  else:
    zeros = np.zeros(slots, np.int32)
    batch = slot_programs.AppendBatch(
      np.zeros((slots, C), np.int32), zeros, zeros > 0, zeros > 0, zeros
    )
    args, options = (params, state, batch), {}
  lowered = getattr(programs, name).lower(
    *args, slots_A=None, num_blocks=2, **options
  )
  compiled = lowered.compile()
  memory = compiled.memory_analysis()
  cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
  assert cache == 2 * 2 * slots * length * 8 * 4  # layers, keys and values
  assert memory.alias_size_in_bytes >= cache
  assert memory.temp_size_in_bytes < cache / 2


def test_prompts_are_repeated_without_communication():
  programs, _ = _programs(devices=8, slots=8)
  prompts = _shapes(programs, 8, 8)[1]
  program = programs.repeat.lower(prompts, 8, 2).compile().as_text()
  for collective in ('all-', 'collective-permute', 'reduce-scatter'):
    assert collective not in program
