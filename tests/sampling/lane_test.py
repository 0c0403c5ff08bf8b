"""Which rows write together."""

import itertools

import numpy as np
import pytest

from stppo_jax.sampling import lane
from tests.sampling import players


def _row(number, length):
  return lane.Row(number, np.zeros(0), number, np.zeros(2), length=length)


def test_who_waits_longest_writes_with_those_of_its_length():
  rng = np.random.default_rng(0)
  for _ in range(20):
    rows = [_row(n, int(x)) for n, x in enumerate(rng.integers(0, 50, 7))]
    for size in (1, 3, 7):
      chosen = lane._alike(rows, size)
      assert rows[0] in chosen and len({r.number for r in chosen}) == size
      ranges = [
        np.ptp([rows[0].length, *(row.length for row in others)])
        for others in itertools.combinations(rows[1:], size - 1)
      ]
      assert np.ptp([row.length for row in chosen]) == min(ranges)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'slots': 6, 'lanes': 4}, 'slots=6 is no multiple of lanes=4'),
    ({'slots': 8, 'lanes': 2, 'devices': 8}, 'lanes=2: must be 1 on 8 devices'),
  ],
)
def test_lanes_that_cannot_be_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    players.engine(**options)


def test_a_group_must_fit_into_the_slots_of_a_lane():
  engine = players.engine(lanes=2)
  with pytest.raises(ValueError, match='4 slots in 2 lanes .* group_size=4'):
    engine.begin(
      players.prompts(1),
      players.keys(4),
      group_size=4,
      max_turn_tokens=1,
      greedy=False,
    )


def test_what_a_thread_raises_comes_up(monkeypatch):
  engine = players.engine(lanes=2)

  def broken(*args, **options):
    raise RuntimeError('the device is gone')

  monkeypatch.setattr(engine._programs, 'extend', broken)
  engine.begin(
    players.prompts(4),
    players.keys(4),
    group_size=1,
    max_turn_tokens=1,
    greedy=False,
  )
  with pytest.raises(RuntimeError, match='the device is gone'):
    while engine.busy:
      engine.poll()
