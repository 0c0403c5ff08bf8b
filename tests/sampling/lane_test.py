"""Which rows write together."""

import itertools
import threading
import types

import jax
import numpy as np
import pytest

from stppo_jax.sampling import lane
from tests.sampling import tiny_engine


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'slots': 6, 'lanes': 4}, 'slots=6 is no multiple of lanes=4'),
    ({'slots': 8, 'lanes': 2, 'devices': 8}, 'lanes=2: must be 1 on 8 devices'),
  ],
)
def test_lanes_that_cannot_be_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    tiny_engine.engine(**options)


def test_a_group_must_fit_into_the_slots_of_a_lane():
  engine = tiny_engine.engine(lanes=2)
  with pytest.raises(ValueError, match='4 slots in 2 lanes .* group_size=4'):
    engine.begin(
      tiny_engine.prompts(1),
      tiny_engine.keys(4),
      group_size=4,
      max_turn_tokens=1,
      greedy=False,
    )


def _begin(engine, prompts, *, group_size=1, max_turn_tokens=1):
  engine.begin(
    prompts,
    tiny_engine.keys(len(prompts) * group_size),
    group_size=group_size,
    max_turn_tokens=max_turn_tokens,
    greedy=False,
  )


def _break(engine, monkeypatch):
  """Its `extend` takes what it was given along."""

  def broken(params, state, *args, **options):
    jax.tree.map(lambda x: x.delete(), state)
    raise RuntimeError('the device is gone')

  monkeypatch.setattr(engine._programs, 'extend', broken)


@pytest.fixture
def fresh():
  """Two lanes that no other test has."""
  return tiny_engine.engine.__wrapped__(lanes=2, deterministic=False)


def test_what_a_thread_raises_comes_up_and_again_when_another_begins(
  fresh, monkeypatch
):
  with monkeypatch.context() as patch:
    _break(fresh, patch)
    _begin(fresh, tiny_engine.prompts(1))
    for _ in range(2):
      with pytest.raises(RuntimeError, match='the device is gone'):
        while fresh.busy:
          fresh.poll()
  with pytest.raises(RuntimeError, match='the device is gone'):
    _begin(fresh, tiny_engine.prompts(1))
  _plays_on(fresh)


def test_what_nobody_looked_at_is_told_when_another_begins(fresh, monkeypatch):
  with monkeypatch.context() as patch:
    _break(fresh, patch)
    _begin(fresh, tiny_engine.prompts(1))
    fresh._admit()
    assert [lane.go_on(queued=False) is None for lane in fresh._lanes] == [
      False,
      True,
    ]
    with pytest.raises(RuntimeError, match='the device is gone'):
      _begin(fresh, tiny_engine.prompts(1))
  _plays_on(fresh)


def _plays_on(engine):
  prompts, keys = tiny_engine.prompts(4), tiny_engine.keys(4)
  expected = tiny_engine.play(tiny_engine.engine(), prompts, keys)
  for row, dialogue in tiny_engine.play(engine, prompts, keys).items():
    tiny_engine.assert_same(dialogue, expected[row])


def test_closing_waits_for_no_thread_that_has_nothing_to_tell():
  engine = tiny_engine.engine(lanes=2)
  _begin(engine, tiny_engine.prompts(2))
  ended = {}
  while len(ended) < 2:
    ended |= engine.poll()
  released = threading.Event()
  blocked = [
    lane._thread.submit(released.wait, timeout=5) for lane in engine._lanes
  ]
  assert engine.close(0) is None
  assert not any(future.done() for future in blocked)
  released.set()


@pytest.mark.parametrize(
  ('order', 'computed'),
  [
    # Slots for the last two groups: two of a lane together; two of a lane one
    # after the other; of each lane one.
    ([(1, 2, 3), (0,)], 4),
    ([(2,), (0, 3), (1,)], 4),
    ([(2,), (0,), (1, 3)], 6),
  ],
)
def test_rows_go_where_the_prompt_of_their_group_is(
  order, computed, monkeypatch
):
  engine = tiny_engine.engine(lanes=2, deterministic=False)
  told = _prompts_computed(engine, monkeypatch)
  _begin(engine, tiny_engine.prompts(4), group_size=2, max_turn_tokens=3)
  turns = tiny_engine.first_turns(engine, order)
  assert turns.keys() == set(range(8))
  assert len(told) == computed


@pytest.mark.parametrize(
  'options', [{'lanes': 2, 'slots': 8}, {'lanes': 1, 'slots': 12}], ids=str
)
def test_a_prompt_is_computed_once_in_each_lane(options, monkeypatch):
  engine = tiny_engine.engine(deterministic=False, **options)
  told = _prompts_computed(engine, monkeypatch)
  for delays in range(4):
    told.clear()
    tiny_engine.play(
      engine,
      tiny_engine.prompts(7),
      tiny_engine.keys(28),
      group_size=4,
      delays=delays,
    )
    assert len(set(told)) == len(told)
    assert len({prompt for _, prompt in told}) == 7


def _prompts_computed(engine, monkeypatch):
  """(number of a lane, prompt), to be filled."""
  told = []
  for n, one in enumerate(engine._lanes):

    def append(appends, n=n, append=one._decoder.append):
      starts = [x for x in appends.values() if not x.length]
      told.extend((n, tuple(x.token_ids.tolist())) for x in starts)
      append(appends)

    monkeypatch.setattr(one._decoder, 'append', append)
  return told


def _lane(*, slots, batch_rows, lookahead=0):
  """A lane; calls of its decoder that tell slots something; slots written."""
  calls, written = [], []
  decoder = types.SimpleNamespace(
    slots=slots,
    batch_rows=batch_rows,
    compacts=False,
    return_expert_ids=False,
    append=lambda appends: calls.append(('append', [*appends])),
    copy=lambda copies: calls.append(
      ('copy', {slot: copy.source for slot, copy in copies.items()})
    ),
    write=lambda writes, *_: written.append([*writes]) or ([], None),
  )
  tested = lane.Lane(
    decoder,
    decode_chunk=1,
    early_exit=1.0,
    lookahead=lookahead,
    max_length=9,
    threaded=False,
  )
  return tested, calls, written


def _row(number, *, group, length=2):
  return lane.Row(number, np.zeros(length, np.int32), group, np.zeros(2))


def test_a_row_writes_with_those_of_its_length():
  rng = np.random.default_rng(0)
  for _ in range(20):
    rows = [
      _row(n, group=n, length=int(x))
      for n, x in enumerate(rng.integers(0, 50, 7))
    ]
    for row in rows:
      row.length = len(row.prompt)
    for size in (1, 3, 7):
      chosen = lane._alike(rows[0], rows, size)
      assert rows[0] in chosen and len({r.number for r in chosen}) == size
      ranges = [
        np.ptp([rows[0].length, *(row.length for row in others)])
        for others in itertools.combinations(rows[1:], size - 1)
      ]
      assert np.ptp([row.length for row in chosen]) == min(ranges)


@pytest.mark.parametrize(
  ('queued', 'lookahead', 'written'),
  [
    (False, 0, [[4, 3], [1, 2]]),  # the shortest first
    (False, 1, [[4, 3], [1, 2]]),
    (True, 0, [[2, 0], [3, 1]]),  # who waits longest, with whom is like it
  ],
)
def test_who_writes_next(queued, lookahead, written):
  tested, _, found = _lane(slots=6, batch_rows=2, lookahead=lookahead)
  for n, length in enumerate((5, 3, 4, 2, 1)):
    tested.admit(_row(n, group=n, length=length))
  tested.go_on(queued=queued)
  assert found == written


def test_who_has_a_chunk_under_way_joins_where_there_is_room():
  for lookahead, second in ((0, [2]), (1, [2, 0])):
    tested, _, written = _lane(slots=4, batch_rows=2, lookahead=lookahead)
    for n, length in enumerate((2, 3, 6)):
      tested.admit(_row(n, group=n, length=length))
    tested.go_on(queued=False)
    assert written == [[0, 1], second]


def test_a_slot_is_not_given_away_while_a_row_waits_for_its_prompt():
  tested, calls, _ = _lane(slots=4, batch_rows=4)
  rows = [_row(n, group=group) for n, group in enumerate((0, 1, 1, 2, 2, 3))]

  def ends(row):
    row.writing = False
    del tested._writing[row.slot]
    tested.close(row)

  for row in rows[:4]:
    tested.admit(row)
  tested.go_on(queued=False)
  assert calls == [('append', [0, 1, 3]), ('copy', {2: 1})]
  calls.clear()
  ends(rows[0])
  tested.admit(rows[4])  # it waits for company to be told
  tested.go_on(queued=False)
  assert rows[4].slot == 0 and not calls
  ends(rows[3])
  tested.admit(rows[5])  # to where the prompt is that row 4 waits for
  assert rows[5].slot == 3 and calls == [('copy', {0: 3})]
  tested._append()
  assert calls == [('copy', {0: 3}), ('append', [3])]
