"""What runs on the devices: how often, in which shapes, in how much memory."""

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

_PROGRAMS = ('empty', 'extend', 'copy', 'repeat', 'decode')


def _programs(*, model=tiny_engine.MODEL, devices=1, **changes):
  """Compiled programs and the options they were made with."""
  options = tiny_engine.options(
    **({'slots': 8, 'deterministic': False} | changes)
  )
  programs = compiled_programs.CompiledPrograms(
    model,
    mesh=tiny_engine.mesh(devices),
    automaton=tiny_engine.automaton(),
    options=options,
  )
  return programs, options


def _driver(**changes):
  """A driver with weights, and its programs."""
  programs, options = _programs(**changes)
  programs.publish(tiny_engine.PARAMS)
  return slot_driver_lib.SlotDriver(programs, options), programs


def _spied(programs, name, monkeypatch):
  """The arguments of all calls of a program from now on."""
  calls, program = [], getattr(programs, name)

  def spy(*args, **static):
    calls.append(jax.tree.map(np.asarray, args))
    return program(*args, **static)

  monkeypatch.setattr(programs, name, spy)
  return calls


def _play(engine, rows, seed, group_size, delays):
  return tiny_engine.run_dialogues(
    engine,
    tiny_engine.prompts(rows // group_size),
    tiny_engine.keys(rows, seed),
    group_size=group_size,
    delays=delays,
  )


@pytest.mark.parametrize(
  ('devices', 'deterministic'), [(1, True), (1, False), (8, True), (8, False)]
)
def test_nothing_is_compiled_after_the_warm_up(devices, deterministic):
  engine, drivers = tiny_engine.engine_and_drivers(
    devices=devices,
    slots=8,
    deterministic=deterministic,
    cache_blocks=4,
    early_exit=0.3,
  )
  for seed in range(2):
    for group_size in (1, 2):
      _play(engine, 24, seed, group_size, seed)
  programs = drivers[0].programs
  sizes = {name: getattr(programs, name)._cache_size() for name in _PROGRAMS}
  # Eight, four, two, one: as many shapes as batches at work have sizes.
  most = 1 if deterministic or devices > 1 else 4
  assert sizes['decode'] == most
  # Prompts of groups are a state of their own, where all slots are meant.
  assert most <= sizes['extend'] <= (most if most > 1 else 2)
  for seed in range(2, 5):
    _play(engine, 12 + 2 * seed, seed, 1 + seed % 2, seed)
  after = {name: getattr(programs, name)._cache_size() for name in _PROGRAMS}
  assert after == sizes


def test_programs_run_on_the_active_rows_only(monkeypatch):
  engine, drivers = tiny_engine.engine_and_drivers(slots=8, deterministic=False)
  calls = _spied(drivers[0].programs, 'decode', monkeypatch)
  _play(engine, 12, 0, 1, 3)
  sizes = set()
  for _, _, rows_A, key_data_A2, *_ in calls:
    sizes.add(len(key_data_A2))
    if rows_A is None:
      assert len(key_data_A2) == 8
      continue
    assert len(rows_A) == len(key_data_A2)
    at_work = rows_A[rows_A < 8]
    assert len(set(at_work)) == len(at_work) > len(rows_A) // 2
    assert not key_data_A2[rows_A == 8].any()
  assert sizes == {8, 4, 2, 1}


@pytest.mark.parametrize('devices', [1, 8])
def test_shapes_never_depend_on_what_happens_when(devices, monkeypatch):
  engine, drivers = tiny_engine.engine_and_drivers(devices=devices, slots=8)
  calls = [
    _spied(drivers[0].programs, name, monkeypatch)
    for name in ('decode', 'extend')
  ]
  _play(engine, 12, 0, 1, 3)
  for program in calls:
    assert program and all(call[2] is None for call in program)
  assert {call[3].shape for call in calls[0]} == {(8, 2)}
  assert {call[3].tokens_AC.shape for call in calls[1]} == {(8, 4)}


@pytest.mark.parametrize(
  ('devices', 'slots', 'group_size', 'places'),
  [
    (1, 8, 2, 4),
    (1, 8, 8, 1),
    (8, 16, 2, 8),
    (8, 16, 4, 8),  # four groups on eight devices: four places are padding
    (1, 8, 1, 8),
  ],
)
def test_a_wave_computes_each_prompt_once(
  devices, slots, group_size, places, monkeypatch
):
  engine, drivers = tiny_engine.engine_and_drivers(devices=devices, slots=slots)
  calls = _spied(drivers[0].programs, 'extend', monkeypatch)
  if group_size == 1:
    monkeypatch.setattr(drivers[0].programs, 'repeat', pytest.fail)
  prompts = tiny_engine.prompts(slots // group_size)
  engine.begin(
    prompts,
    tiny_engine.keys(slots),
    group_size=group_size,
    max_turn_tokens=3,
    greedy=False,
  )
  engine.poll()
  longest = max(map(len, prompts))
  shapes = [told.tokens_AC.shape for _, _, _, told in calls]
  assert shapes == [(places, 4)] * -(-longest // 4)
  assert sum(told.starts_A.sum() for *_, told in calls) == len(prompts)
  assert sum(told.counts_A.sum() for *_, told in calls) == sum(
    map(len, prompts)
  )


@pytest.mark.parametrize('slots', [4, 8])
@pytest.mark.parametrize('delays', range(3))
def test_refilling_computes_each_prompt_once(slots, delays, monkeypatch):
  engine, drivers = tiny_engine.engine_and_drivers(
    slots=slots, deterministic=False
  )
  calls = _spied(drivers[0].programs, 'extend', monkeypatch)
  copies = _spied(drivers[0].programs, 'copy', monkeypatch)
  group_size, rows = 4, 24
  _play(engine, rows, 0, group_size, delays)
  starts = sum(told.starts_A.sum() for *_, told in calls)
  assert starts == rows // group_size
  given = sum((rows_A < slots).sum() for _, _, rows_A, _, _ in copies)
  assert given == rows - starts


def _written(driver, slots):
  """What the slots write in a turn, all with the same key."""
  written = {slot: [] for slot in slots}
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
        written[slot] += chunk.tokens_AC[place, :count].tolist()
    if all(chunk.ended_A[n] for n, s in enumerate(placed) if s is not None):
      return written


def test_weights_are_held_as_they_are_computed_with():
  for dtype in ('float32', 'bfloat16'):
    model = tiny.model(dtype=dtype)
    _, programs = _driver(model=model)
    held = jax.tree.leaves(programs.params)
    assert {x.dtype for x in held} == {jnp.dtype(dtype)}


def test_a_prompt_is_copied_wherever_it_lies():
  driver, _ = _driver(slots=4)
  prompts = [tiny_engine.ids(n, 3 + 2 * n) for n in range(4)]
  opened = {
    n: slot_driver_lib.Append(ids, 0, 6) for n, ids in enumerate(prompts)
  }
  driver.start_wave(opened, 1)
  expected = _written(driver, range(4))
  assert len({tuple(turn) for turn in expected.values()}) == 4
  # The sources have gone on; two slots swap their prompts, one keeps its own.
  driver.append({1: slot_driver_lib.Append(tiny_engine.ids(9, 7), 11, 3)})
  driver.copy(
    {
      source: slot_driver_lib.CopyPrompt(other, len(prompts[other]), 6)
      for source, other in ((0, 1), (1, 0), (2, 2))
    }
  )
  copied = _written(driver, [0, 1, 2])
  assert copied == {0: expected[1], 1: expected[0], 2: expected[2]}
  # A copy is as good a source as the first; what was not named is untouched.
  driver.copy({2: slot_driver_lib.CopyPrompt(0, len(prompts[1]), 6)})
  assert _written(driver, [2]) == {2: expected[1]}
  driver.copy({0: slot_driver_lib.CopyPrompt(3, len(prompts[3]), 6)})
  assert _written(driver, [0]) == {0: expected[3]}


def test_a_slot_that_starts_anew_is_as_good_as_new():
  driver, _ = _driver(slots=4)
  prompt = slot_driver_lib.Append(tiny_engine.ids(5, 6), 0, 6)
  driver.start_wave({0: prompt}, 1)
  (expected,) = _written(driver, [0]).values()
  driver.start_wave(
    {n: slot_driver_lib.Append(tiny_engine.ids(n, 30), 0, 9) for n in (0, 1)}, 1
  )
  _written(driver, [0, 1])
  driver.append({1: prompt})
  assert _written(driver, [1]) == {1: expected}


def test_values_that_are_not_finite_end_with_their_row():
  driver, programs = _driver(slots=4, cache_blocks=2)
  prompt = slot_driver_lib.Append(tiny_engine.ids(5, 6), 0, 6)
  driver.start_wave({0: prompt}, 1)
  (expected,) = _written(driver, [0]).values()
  # Of a row that reads and writes, and of one whose state is lost as it writes.
  for lost_first in (True, False):
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), tiny_engine.PARAMS)
    if lost_first:
      programs.publish(broken)
    driver.append({1: slot_driver_lib.Append(tiny_engine.ids(1, 20), 0, 9)})
    programs.publish(broken)
    _written(driver, [1])
    programs.publish(tiny_engine.PARAMS)
    driver.append({1: prompt})
    assert _written(driver, [1]) == {1: expected}


def test_a_chunk_ends_with_enough_turns():
  driver, _ = _driver(slots=4, decode_chunk=12)
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
    assert not chunk.stopped_A.any()  # or budgets would not tell
    assert chunk.counts_A.tolist() == [min(b, steps) for b in budgets]


def _compiled(program, *args, **static):
  return program.lower(*args, **static).compile()


def _shapes(programs, slots, devices=1):
  """The arguments of `decode` over all slots, as shapes."""
  state = jax.eval_shape(lambda: programs.empty(slots))
  by_slot = sharding.batch_sharding(tiny_engine.mesh(devices))
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_slot)
  params = jax.tree.map(jnp.asarray, tiny_engine.PARAMS)
  return tiny_engine.MODEL.split_layers(params), jax.tree.map(shape, state)


@pytest.mark.parametrize('name', ['decode', 'extend'])
def test_the_cache_of_all_slots_is_updated_in_place(name):
  slots, length, C = 8, 4096, 1
  programs, _ = _programs(max_length=length, cache_blocks=4)
  params, state = _shapes(programs, slots)
  if name == 'decode':
    keys = np.zeros((slots, 2), np.uint32)
    args = params, state, None, keys, programs.table_ZV, False, slots
  else:
    zeros = np.zeros(slots, np.int32)
    told = slot_programs.AppendBatch(
      np.zeros((slots, C), np.int32), zeros, zeros > 0, zeros > 0, zeros
    )
    args = params, state, None, told
  memory = _compiled(
    getattr(programs, name), *args, num_blocks=4
  ).memory_analysis()
  cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
  assert cache == 2 * 2 * slots * length * 8 * 4  # layers, keys and values
  assert memory.alias_size_in_bytes >= cache
  assert memory.temp_size_in_bytes < cache / 2


def test_repeating_prompts_stays_on_its_device():
  programs, _ = _programs(devices=8)
  prompts = _shapes(programs, 8, 8)[1]
  program = _compiled(programs.repeat, prompts, 8, 2).as_text()
  for collective in ('all-', 'collective-permute', 'reduce-scatter'):
    assert collective not in program
