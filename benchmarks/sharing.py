"""Simulates how long collecting takes when observations are delayed.

Dialogues share one processor evenly (processor sharing): each of n active
dialogues runs at 1 / n of its speed, as in a batch whose cost is linear in its
size. A dialogue that waits for an observation keeps its slot and costs nothing.
When a dialogue ends, the next one gets its slot at once. The simulation leaves
out the time that the engine loses by batching observations, by batches of fixed
sizes and by chunks, and the time that it gains by the order of its rows, so
measured times differ.
"""

from collections.abc import Sequence
import heapq
from typing import NamedTuple


class Row(NamedTuple):
  """A dialogue.

  Attributes:
    work: seconds that each turn takes when no other dialogue is active.
    waits: seconds until the observation after each turn but the last.
  """

  work: Sequence[float]
  waits: Sequence[float]


def makespan(rows: Sequence[Row], slots: int) -> float:
  """Returns the seconds from the first start to the last end."""
  now = served = 0.0  # seconds; work that a row active since time 0 has got
  working: list[tuple[float, int, int]] = []  # (served at its end, row, turn)
  waiting: list[tuple[float, int, int]] = []  # (time of the answer, row, turn)
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
