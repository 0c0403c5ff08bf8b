"""The engine's schedule reads and decodes little that is not needed."""

import pytest

from benchmarks import schedule


def test_dialogues_are_written_to_their_ends():
  case = schedule.CASES[-1]
  rows = schedule.dialogues(40, seed=0)
  tokens = sum(sum(row.turns) for row in rows)
  counters = schedule.collect(case, rows)
  assert counters.given == tokens and not any(row.turns for row in rows)


def test_one_long_dialogue_needs_all_that_is_read():
  # One place, one turn that fills pages: what is read and not needed is the
  # rest of the last page and of the tokens that are not stored yet.
  (row,) = schedule.dialogues(1, seed=0)
  row.turns, row.observations = [480], []
  case = schedule.Case('one', 1, 0, False, 128, True)
  counters = schedule.collect(case, [row])
  assert counters.given == counters.places == 480
  assert 0.75 < counters.needed / counters.read < 1


def test_pages_reach_the_goals():
  table, good = schedule.run(count=128, seeds=1)
  assert good, table


@pytest.mark.slow
def test_new_weights_for_dialogues_in_progress_end_them_too():
  cases = {case.name: case for case in schedule.SWAPS}
  seconds = {}
  for name in ('pause', 'two versions', 'two versions, recomputed'):
    rows = schedule.dialogues(96, seed=0)
    tokens = sum(sum(row.turns) for row in rows)
    counters = schedule.collect(cases[name], rows)
    assert counters.given == tokens and not any(row.turns for row in rows)
    seconds[name] = counters.seconds
  # To compute keys and values again costs more than not to.
  assert seconds['two versions'] < seconds['two versions, recomputed']
  rows = schedule.dialogues(96, seed=0)
  alone = sum(
    schedule.collect(cases['between steps'], rows[n : n + 32]).seconds
    for n in (0, 32, 64)
  )
  # The slots that are empty at the end count for three steps here.
  assert max(seconds['pause'], seconds['two versions']) < 0.95 * alone
