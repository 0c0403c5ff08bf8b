"""The compiled programs run as rarely, as small and as lean as they should."""

import functools

import jax
import numpy as np
import pytest

from stppo_jax.parallel import sharding
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import slot_calls
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


class _Driver(slot_driver_lib.SlotDriver):
  """A driver that calls programs with the newest weights, and waits."""

  def append(self, appends):
    super().append(appends, self._programs.weights.params)

  def decode(self, decodes, *, greedy, enough):
    params = self._programs.weights.params
    placed, chunk = super().decode(
      decodes, params, greedy=greedy, enough=enough
    )
    return placed, self.read(chunk)


def _driver(**changes):
  """Returns a driver with weights, and its programs."""
  programs, options = _programs(**changes)
  programs.publish(tiny_engine.PARAMS, 0)
  return _Driver(programs, options), programs


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
      options = {'group_size': group_size, 'delays': group_size}
      tiny_engine.dialogues(engine, 24, seed=group_size, **options)
  compiled = [dict(driver.programs.compiled) for driver in drivers]
  refilling, waiting = compiled
  # One for each size of a batch: two slots of each device, or one.
  assert refilling['decode'] == 2 and waiting['decode'] == 0
  assert refilling['extend'] == 2
  # In waves, fewer prompts than slots are one more shape.
  assert waiting['extend'] <= 1
  for engine, driver in zip(engines, drivers):
    driver.programs.forget_calls()
    for seed in range(2, 6):
      options = {'group_size': 1 + seed % 2, 'delays': seed}
      tiny_engine.dialogues(engine, 12 + 2 * seed, seed=seed, **options)
    assert len(driver.programs.calls['decode']) >= 50
  assert [driver.programs.compiled for driver in drivers] == compiled


@pytest.mark.parametrize(
  'devices', [1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_programs_run_on_the_active_slots_only(devices):
  slots = 4 * devices
  engine, (driver,) = tiny_engine.engine_and_drivers(
    deterministic=False, devices=devices, slots=slots
  )
  tiny_engine.dialogues(engine, 12, delays=3)
  sizes = set()
  for slots_A, key_data_A2, *_ in _calls(driver, 'decode'):
    sizes.add(len(key_data_A2))
    if slots_A is None:
      assert len(key_data_A2) == slots
      continue
    assert slots_A.size == len(key_data_A2)
    by_device = slots_A.reshape(devices, -1)
    for own in by_device:
      active = own[own < slots]
      assert len(set(active)) == len(active) and all(active < 4)
    # The device with most of them needs the size.
    assert (by_device < slots).sum(axis=1).max() > by_device.shape[1] // 2
    assert not key_data_A2[slots_A.reshape(-1) == slots].any()
  assert sizes == {slots, slots // 2, slots // 4}


@pytest.mark.parametrize(
  'devices', [1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_deterministic_programs_always_run_on_all_slots(devices):
  engine, (driver,) = tiny_engine.engine_and_drivers(devices=devices)
  # Each prompt is appended in one call, so that the other calls can be told.
  prompts = [tiny_engine.ids(n, 3) for n in range(12)]
  tiny_engine.run_dialogues(engine, prompts, tiny_engine.keys(12), delays=3)
  decodes, extends = _calls(driver, 'decode'), _calls(driver, 'extend')
  later = [x for x in extends if not x[1].starts_A.any()]
  assert decodes and later
  assert {key_data.shape for _, key_data, *_ in decodes} == {(4, 2)}
  assert {batch.tokens_AC.shape for _, batch, *_ in later} == {(4, 4)}
  assert all(slots_A is None for slots_A, *_ in decodes)


@pytest.mark.parametrize(
  ('devices', 'slots', 'group_size', 'computed', 'rows'),
  [
    (1, 4, 2, 2, 2),
    pytest.param(1, 4, 4, 1, 1, marks=pytest.mark.slow),
    pytest.param(2, 4, 2, 2, 2, marks=pytest.mark.slow),
    # One group on two devices, which both compute its prompt.
    pytest.param(2, 4, 4, 2, 2, marks=pytest.mark.slow),
    (1, 4, 1, 4, 4),
  ],
)
def test_a_wave_computes_each_prompt_once_on_a_device(
  devices, slots, group_size, computed, rows
):
  engine, (driver,) = tiny_engine.engine_and_drivers(
    devices=devices, slots=slots
  )
  prompts = tiny_engine.prompts(slots // group_size)
  tiny_engine.begin(engine, prompts, group_size=group_size, max_turn_tokens=3)
  engine.poll()
  batches = [batch for _, batch, _ in _calls(driver, 'extend')]
  longest = max(map(len, prompts))
  assert len(batches) == -(-longest // 4)
  assert batches[0].tokens_AC.shape == (rows, 4)
  assert sum(batch.starts_A.sum() for batch in batches) == computed


@pytest.mark.parametrize(
  ('slots', 'group_size'),
  [(4, 4), pytest.param(3, 3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize('delays', range(3))
def test_a_prompt_is_computed_if_no_row_has_it(slots, group_size, delays):
  engine, (driver,) = tiny_engine.engine_and_drivers(
    slots=slots, deterministic=False
  )
  rows = 24
  tiny_engine.dialogues(engine, rows, group_size=group_size, delays=delays)
  computed = sum(
    batch.starts_A.sum() for _, batch, _ in _calls(driver, 'extend')
  )
  copied = sum((call[1] < slots).sum() for call in _calls(driver, 'copy'))
  assert computed + copied == rows
  assert computed >= rows // group_size and copied >= rows // group_size


# The two pages of each slot, if none is shared.
_PAGES = {slot: (2 * slot, 2 * slot + 1) for slot in range(4)}


def _append(slot, ids, length, budget):
  return slot_calls.Append(ids, length, budget, _PAGES[slot])


def _decodes(pages):
  """Returns what slots with these pages decode, all with the same key."""
  key = np.zeros(2, np.uint32)
  return {slot: slot_calls.Decode(key, 40, own) for slot, own in pages.items()}


def _turns(driver, pages):
  """Returns the turns of slots with these pages."""
  turns = {slot: [] for slot in pages}
  while True:
    placed, chunk = driver.decode(
      _decodes(pages), greedy=False, enough=len(pages)
    )
    places = [(n, slot) for n, slot in enumerate(placed) if slot is not None]
    for n, slot in places:
      turns[slot] += chunk.tokens_AC[n, : chunk.counts_A[n]].tolist()
    if all(chunk.ended_A[n] for n, _ in places):
      return turns


def test_a_slot_can_begin_with_the_prompt_of_another():
  driver, _ = _driver()
  prompts = [tiny_engine.ids(n, 3 + 8 * n) for n in range(4)]  # up to 27
  driver.append({n: _append(n, ids, 0, 6) for n, ids in enumerate(prompts)})
  expected = _turns(driver, _PAGES)
  assert len({tuple(turn) for turn in expected.values()}) == 4
  # The sources have gone on. One prompt has a full page, which is shared.
  driver.append({1: _append(1, tiny_engine.ids(9, 7), 17, 3)})
  copy = lambda source, pages: slot_calls.CopyPrompt(
    source, len(prompts[source]), 6, pages
  )
  driver.copy({0: copy(1, (2, 0)), 2: copy(3, (7, 5))})
  turns = _turns(driver, {0: (0, 1), 2: (6, 5)})
  assert turns == {0: expected[1], 2: expected[3]}


def test_values_that_are_not_finite_stay_in_their_row():
  # Nor is anything else left in a slot of its last row.
  driver, programs = _driver()
  prompt, own = tiny_engine.ids(5, 6), {1: _PAGES[1]}
  driver.append({0: _append(0, prompt, 0, 6)})
  (expected,) = _turns(driver, {0: _PAGES[0]}).values()
  # They come up while the prompt is appended, or only while a turn is decoded.
  for in_prompt in (True, False):
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), tiny_engine.PARAMS)
    if in_prompt:
      programs.publish(broken, 0)
    driver.append({1: _append(1, tiny_engine.ids(1, 20), 0, 9)})
    programs.publish(broken, 0)
    _turns(driver, own)
    programs.publish(tiny_engine.PARAMS, 0)
    driver.append({1: _append(1, prompt, 0, 6)})
    assert _turns(driver, own) == {1: expected}


def test_a_chunk_ends_with_enough_turns():
  driver, _ = _driver()
  budgets = (1, 2, 3, 3)
  ids = tiny_engine.ids(1, 4)
  for enough, steps in ((1, 1), (2, 2), (4, 3)):
    driver.append({n: _append(n, ids, 0, b) for n, b in enumerate(budgets)})
    _, chunk = driver.decode(_decodes(_PAGES), greedy=False, enough=enough)
    assert not chunk.stopped_A.any()  # so that budgets end all turns
    assert chunk.counts_A.tolist() == [min(b, steps) for b in budgets]


def test_appending_updates_the_cache_in_place():
  # decode_program_test has the same for decoding.
  slots, length, C = 8, 4096, 1
  # Most pages are those of rows that the call is not about.
  model = tiny.model(num_layers=1)
  programs, _ = _programs(
    model=model, slots=64, max_length=length, page_size=2048
  )
  params = tiny.split_layers(model, tiny.params(model))
  by_slot = sharding.batch_sharding(tiny_engine.placement().mesh)
  state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_slot),
    jax.eval_shape(lambda: programs.empty(64)),
  )
  zeros = np.zeros(slots, np.int32)
  batch = slot_programs.AppendBatch(
    np.zeros((slots, C), np.int32), zeros, zeros > 0, zeros > 0, zeros
  )
  lowered = programs.extend.lower(
    *(params, state, batch, np.zeros((slots, 2), np.int32)),
    slots_A=np.arange(slots, dtype=np.int32),
    num_pages=2,
  )
  memory = lowered.compile().memory_analysis()
  cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
  assert cache == 2 * 64 * length * 8 * 4  # keys and values
  assert memory.alias_size_in_bytes >= cache
  assert memory.temp_size_in_bytes < cache / 2
