"""How long collecting should take when answers take time: a simulation.

Rows of work share one processor evenly (processor sharing): with A rows at work
each goes on at 1 / A of its speed, as in a batch whose cost is linear in its
size. S slots; a row that waits for an answer keeps its slot and costs nothing,
a row that ends gives its slot to the next one at once. What the engine loses
by waiting for company, by batches of fixed sizes and by chunks is left out, and
so is what it wins by its order: the difference to what is measured is that.
"""

from collections.abc import Sequence
import heapq
from typing import NamedTuple


class Row(NamedTuple):
  """A dialogue.

  Attributes:
    work: seconds of the processor that each turn takes, alone.
    waits: seconds after each turn but the last.
  """

  work: Sequence[float]
  waits: Sequence[float]


def makespan(rows: Sequence[Row], slots: int) -> float:
  """Seconds from the begin of the first row to the end of the last."""
  now = served = 0.0  # seconds; those that each row at work got since 0
  working: list[tuple[float, int, int]] = []  # served when done, row, turn
  waiting: list[tuple[float, int, int]] = []  # time of the answer, row, turn
  begun = min(slots, len(rows))
  for row in range(begun):
    heapq.heappush(working, (rows[row].work[0], row, 0))
  while working or waiting:
    ends = float('inf')
    if working:
      ends = now + (working[0][0] - served) * len(working)
    if waiting and waiting[0][0] <= ends:
      then, row, turn = heapq.heappop(waiting)
      if working:
        served += (then - now) / len(working)
      now = then
      heapq.heappush(working, (served + rows[row].work[turn], row, turn))
      continue
    served, row, turn = heapq.heappop(working)
    now = ends
    if turn + 1 < len(rows[row].work):
      answer = now + rows[row].waits[turn]
      heapq.heappush(waiting, (answer, row, turn + 1))
    elif begun < len(rows):
      heapq.heappush(working, (served + rows[begun].work[0], begun, 0))
      begun += 1
  return now
