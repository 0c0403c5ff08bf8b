"""Lanes schedule the rows in their slots."""

import itertools
import threading

import numpy as np
import pytest

from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import lane as lane_lib
from stppo_jax.sampling import rows as rows_lib
from stppo_jax.sampling import slot_programs
from tests.sampling import tiny_engine


@pytest.mark.parametrize('lanes', [1, 2])  # without threads, and with two
def test_errors_of_lanes_are_raised_by_poll_and_by_begin(lanes):
  engine, drivers = tiny_engine.new_engine(
    lanes=lanes, slots=4 * lanes, deterministic=False
  )

  for driver in drivers:
    driver.programs.broken = True
  # A row in each lane.
  tiny_engine.begin(engine, tiny_engine.prompts(lanes), max_turn_tokens=1)
  for _ in range(2):
    with pytest.raises(RuntimeError, match='the device is gone'):
      while engine.busy:
        engine.poll()
  # Each lane raises once more, also the one that no poll has waited for. Its
  # thread may begin its call only now.
  for _ in range(lanes):
    with pytest.raises(RuntimeError, match='the device is gone'):
      tiny_engine.begin(engine, tiny_engine.prompts(1), max_turn_tokens=1)
  for driver in drivers:
    driver.programs.broken = False
  expected = tiny_engine.dialogues(tiny_engine.engine(), 4)
  tiny_engine.assert_all_same(tiny_engine.dialogues(engine, 4), expected)


@pytest.mark.parametrize(
  ('order', 'computed'),
  [
    # Slots for the last two groups become free: two of a lane together; two of
    # a lane one after the other; one of each lane.
    ([(1, 2, 3), (0,)], 4),
    ([(2,), (0, 3), (1,)], 4),
    ([(2,), (0,), (1, 3)], 6),
  ],
)
@pytest.mark.slow
def test_rows_go_to_the_lane_that_has_the_prompt_of_their_group(
  order, computed
):
  engine, drivers = tiny_engine.engine_and_drivers(lanes=2, deterministic=False)
  tiny_engine.begin(
    engine, tiny_engine.prompts(4), group_size=2, max_turn_tokens=3
  )
  turns = tiny_engine.first_turns(engine, order)
  assert turns.keys() == set(range(8))
  assert len(_computed_prompts(drivers)) == computed


def _computed_prompts(drivers):
  """Returns lane and prompt of every prompt that was not copied."""
  return [
    (n, tuple(append.token_ids.tolist()))
    for n, driver in enumerate(drivers)
    for name, appends in driver.calls
    if name == 'append'
    for append in appends.values()
    if not append.length
  ]


class _FakeDriver:
  """A slot driver without a device, which decodes one token in each slot.

  Attributes:
    calls: appends and copies, by slot.
    decoded: the slots of each call of `decode`, in its order.
    ending: slots whose turn ends in the next calls of `decode`.
    gate: an event that `decode` waits for.
  """

  compacts = False
  returns_expert_ids = False
  shards = 1
  read = staticmethod(lambda chunk: chunk)

  def __init__(self, slots, batch_rows):
    self.slots, self.batch_rows = slots, batch_rows
    self.calls, self.decoded = [], []
    self.ending = set()
    self.gate = threading.Event()
    self.gate.set()

  def append(self, appends, params):
    self.calls.append(('append', [*appends]))

  def copy(self, copies):
    sources = {slot: copy.source for slot, copy in copies.items()}
    self.calls.append(('copy', sources))

  def decode(self, decodes, params, *, greedy, enough):
    assert self.gate.wait(timeout=20)
    self.decoded.append([*decodes])
    slots = sorted(decodes)
    ones_A1 = np.ones((len(slots), 1))
    ended_A = np.array([slot in self.ending for slot in slots])
    return slots, slot_programs.Chunk(
      ones_A1, ones_A1, ones_A1, np.ones(len(slots), int), ended_A, ended_A
    )


def _lane(*, slots, batch_rows, lookahead=0, lanes=1):
  driver = _FakeDriver(slots, batch_rows)
  options = tiny_engine.options(
    slots=slots * lanes, lookahead=lookahead, decode_chunk=1, lanes=lanes
  )
  weights = compiled_programs.Weights(0, {})
  return lane_lib.Lane(driver, options, lambda: weights), driver


def _row(number, *, group, length=2):
  return rows_lib.Row(number, np.zeros(length, np.int32), group, np.zeros(2))


def test_closing_does_not_wait_for_the_thread_of_the_lane():
  lane, driver = _lane(slots=2, batch_rows=2, lanes=2)
  rows = [_row(n, group=n) for n in range(2)]
  for row in rows:
    lane.admit(row)
  driver.ending = {0}
  lane.schedule(queued=False).result(timeout=20)
  assert lane.collect_done().keys() == {0}
  driver.gate.clear()
  in_flight = lane.schedule(queued=False)  # the second row goes on
  if in_flight.done():  # started ahead, before the gate was closed
    lane.collect_done()
    in_flight = lane.schedule(queued=False)
  assert lane.close(rows[0]) is None
  assert not in_flight.done()
  driver.gate.set()
  in_flight.result(timeout=20)


@pytest.mark.parametrize('size', [1, 3, 7])
def test_a_row_decodes_with_those_closest_in_length(size):
  rng = np.random.default_rng(0)
  for _ in range(20):
    lane, driver = _lane(slots=8, batch_rows=size)
    lengths = rng.integers(1, 39, 7)
    for n, length in enumerate(lengths):
      lane.admit(_row(n, group=n, length=int(length)))
    lane.schedule(queued=True)  # row 0 is first: it has waited longest
    chosen = driver.decoded[0]
    assert 0 in chosen and len(set(chosen)) == size
    ranges = [
      np.ptp(lengths[[0, *others]])
      for others in itertools.combinations(range(1, 7), size - 1)
    ]
    assert np.ptp(lengths[chosen]) == min(ranges)


@pytest.mark.parametrize(
  ('queued', 'lookahead', 'decoded'),
  [
    (False, 0, [[4, 3], [1, 2]]),  # the shortest first
    (False, 1, [[4, 3], [1, 2]]),
    # The one that has waited longest first, with the closest to it in length.
    (True, 0, [[2, 0], [3, 1]]),
  ],
)
def test_the_queue_decides_whether_the_shortest_row_decodes_first(
  queued, lookahead, decoded
):
  lane, driver = _lane(slots=6, batch_rows=2, lookahead=lookahead)
  for n, length in enumerate((5, 3, 4, 2, 1)):
    lane.admit(_row(n, group=n, length=length))
  lane.schedule(queued=queued)
  assert driver.decoded == decoded


def test_a_row_with_a_chunk_in_flight_joins_where_there_is_room():
  for lookahead, second in ((0, [2]), (1, [2, 0])):
    lane, driver = _lane(slots=4, batch_rows=2, lookahead=lookahead)
    for n, length in enumerate((2, 3, 6)):
      lane.admit(_row(n, group=n, length=length))
    lane.schedule(queued=False)
    assert driver.decoded == [[0, 1], second]


def test_a_prompt_comes_from_a_row_that_still_has_it():
  lane, driver = _lane(slots=4, batch_rows=4)
  rows = [_row(n, group=group) for n, group in enumerate((0, 1, 1, 2, 2, 1))]

  def end(*slots):
    driver.ending = set(slots)
    while lane.schedule(queued=False):
      if lane.collect_done():
        return

  for row in rows[:4]:
    lane.admit(row)
  driver.calls.clear()
  end(0, 3)
  assert driver.calls == [('append', [0, 1, 3]), ('copy', {2: 1})]
  driver.calls.clear()
  lane.close(rows[0])
  lane.close(rows[3])
  for row in rows[4:]:
    lane.admit(row)  # the only row of the first one's group has ended
  end(0, 1, 2, 3)
  lane.schedule(queued=False)
  assert driver.calls == [('append', [0]), ('copy', {3: 1})]
