"""Counts the share of the engine's reads and decoded places that is needed.

    python -m benchmarks.schedule

The engine of a run schedules dialogues with random lengths; its programs are
replaced by counters and a clock. In the table, `read` is the share of the
keys and values read in decode that belong to a decoding dialogue, `busy` is
the share of the decoded places that give a token, and `seconds` the time on the
clock. The first two lines are about waves and about refilled slots that read
the cache in four pages, up to the longest dialogue of a call. The third line is
about refilled slots that read only live pages. In the last line, slots with
live pages have twice as many dialogues as a call has places, and the same
memory: a dialogue that waits for its observation gives its place to another
dialogue.

The second table is about new weights after every 32 dialogues of a host, which
are a step of 512 on 16 hosts. `between steps`: all dialogues of a step end
before the next step begins. In the other cases, slots go on with dialogues of
the next step, and no turn has tokens of two versions of the weights. `pause`:
no turn begins until all running turns have ended. `two versions`: turns begin
with the newest weights. While turns of two versions are written, each chunk is
two calls, which both read their weights (`rollout.turn_swaps=keep`).
`recomputed`: the same, and keys and values are made again with the new weights.
The columns are the seconds of a step; long turns are log-normal with sigma 1
and have up to 2,000 tokens.

Dialogues: a prompt of 100 tokens, 2 to 5 turns, log-normal around 170 tokens
(sigma 0.6), observations of about 420 tokens, at most 4,096 tokens together; a
search takes 250 ms. The clock: a host of v5e:8x8 decodes a 7B model on 4 chips,
as fast as the bandwidth of their memory allows, and appends tokens at half of
their peak rate of operations. Nothing is timed.
"""

from collections.abc import Sequence
import dataclasses
import heapq
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import collectors
from benchmarks import measure
from benchmarks import waste
from stppo_jax.models import functional
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import slot_driver
from stppo_jax.sampling import slot_programs
from stppo_jax.sampling import stops

MAX_LENGTH, PROMPT, OBSERVATION, MAX_TURN = 4096, 100, 420, 500
SEARCH_SECONDS = 0.25
_CHUNK = 16
# The numbers of one chip, for a 7B model on 4 chips of v5e.
_WEIGHTS = 15.2e9 / 4  # bytes of weights
_PER_TOKEN = 57_344 / 4  # bytes of keys and values of a token
_BANDWIDTH, _OPERATIONS = 819e9, 0.5 * 197e12  # per second
_GOAL_READ, _GOAL_BUSY = 0.9, 0.85


class Case(NamedTuple):
  """How the engine works.

  Attributes:
    name: the text of the first column.
    slots: the number of slots.
    places: the most dialogues that a call decodes; 0 = as many as slots.
    waves: whether slots are filled in waves.
    page: the number of tokens of a page.
    live: whether a kernel reads only pages that have tokens of a dialogue.
    pages: the number of pages of all dialogues; 0 = as many as full slots need.
    swap: when turns get new weights, see `SWAPS`; '' without new weights.
  """

  name: str
  slots: int
  places: int
  waves: bool
  page: int
  live: bool
  pages: int = 0
  swap: str = ''


CASES = (
  Case('waves, four pages', 32, 0, True, 1024, False),
  Case('refilled, four pages', 32, 0, False, 1024, False),
  Case('refilled, live pages', 32, 0, False, 128, True),
  Case('2 slots a place, same memory', 64, 32, False, 128, True, 1024),
)
HEADER = ('engine', 'read', 'busy', 'seconds')
_STEP = 32  # the number of dialogues of a host in a step
_LIVE = Case('', 32, 0, False, 128, True)
SWAPS = tuple(
  _LIVE._replace(
    name=name + (', 2 slots a place' if slots > 32 else ''),
    swap=swap,
    slots=slots,
    places=32 if slots > 32 else 0,
  )
  for slots in (32, 64)
  for name, swap in (
    ('between steps', 'never'),
    ('pause', 'pause'),
    ('two versions', 'keep'),
    ('two versions, recomputed', 'recompute'),
  )
  # With 'never', a step has 32 dialogues, which need no more than 32 slots.
  if slots == 32 or swap != 'never'
)
# Sigma and the most tokens of a turn, by the name of the column.
TURNS = {'usual turns': (0.6, MAX_TURN), 'long turns': (1.0, 2000)}


@dataclasses.dataclass
class _Dialogue:
  """A dialogue that is being written.

  Attributes:
    turns: the number of tokens that each turn still needs.
    observations: the number of tokens of each observation that is still due.
    length: the number of tokens so far.
  """

  turns: list[int]
  observations: list[int]
  length: int = 0


def dialogues(
  count: int, *, seed: int, sigma: float = 0.6, longest: int = MAX_TURN
) -> list[_Dialogue]:
  """Returns random dialogues, of which only the lengths are known."""
  rng, made = np.random.default_rng(seed), []
  while len(made) < count:
    number = int(rng.integers(2, 6))
    turns = np.exp(rng.normal(np.log(170), sigma, number)).astype(int)
    turns = np.clip(turns, 1, longest).tolist()
    found = rng.normal(OBSERVATION, 60, number - 1).clip(1).astype(int).tolist()
    if PROMPT + sum(turns) + sum(found) < MAX_LENGTH:
      made.append(_Dialogue(turns, found))
  return made


class _Counters:
  """Takes the place of an engine's compiled programs; counts their work."""

  shards, table_ZV, takes_any_number = 1, None, True
  num_hosts = 1

  def __init__(self, case: Case, rows: Sequence[_Dialogue]):
    self._case, self._rows = case, rows
    self.page_size = case.page
    self.pages_per_row = -(-MAX_LENGTH // case.page)
    self.seconds = 0.0
    self.needed = self.read = self.given = self.places = 0

  def empty(self, num_slots: int) -> None:
    return None

  def put(self, *trees: Any) -> Any:
    return trees

  def get(self, tree: Any) -> Any:
    return tree

  def copy(self, *arrays: Any) -> None:
    return None

  def extend(self, params, state, batch, table_AN, **options) -> None:
    self.seconds += batch.tokens_AC.size * 15.2e9 / 4 / _OPERATIONS

  def decode(self, params, state, key_data_A2, runs_A, *arrays, **options):
    rows = [
      self._rows[n] if run else None for (n, _), run in zip(key_data_A2, runs_A)
    ]
    decoding = [row for row in rows if row is not None and row.turns[0]]
    begun, counts_A = [row.length for row in decoding], np.zeros(len(rows), int)
    steps = 0
    while steps < _CHUNK and decoding:
      left = [row for row in decoding if row.turns[0]]
      ended = len(decoding) - len(left)
      if not left or ended >= options['enough']:
        break
      for place, row in enumerate(rows):
        if row is not None and row.turns[0]:
          counts_A[place] += 1
          row.turns[0] -= 1
          row.length += 1
          self.needed += row.length
      steps += 1
    pages = [-(-length // self._case.page) for length in begun]
    if not self._case.live:
      pages = [options['num_pages']] * len(rows)
    read = sum(pages) * self._case.page + len(rows) * _CHUNK
    self.read += steps * read
    self.given += counts_A.sum()
    self.places += steps * len(rows)
    moved = _WEIGHTS + read * _PER_TOKEN
    self.seconds += steps * moved / _BANDWIDTH
    ended_A = np.array([row is not None and not row.turns[0] for row in rows])
    zeros_AC = np.zeros((len(rows), _CHUNK))
    return state, slot_programs.Chunk(
      zeros_AC.astype(int), zeros_AC, zeros_AC, counts_A, ended_A, ended_A
    )


def collect(case: Case, rows: Sequence[_Dialogue]) -> _Counters:
  """Returns the counters after all dialogues have been written."""
  counters = _Counters(case, rows)
  engine = _engine(case, counters)
  engine.swap_weights({}, 0)
  keys = np.stack([np.arange(len(rows)), np.zeros(len(rows))], axis=1)
  engine.begin(
    [np.zeros(PROMPT, np.int32)] * len(rows),
    jax.random.wrap_key_data(keys.astype(np.uint32)),
    group_size=1,
    max_turn_tokens=max(max(row.turns) for row in rows),
    greedy=True,
  )
  for row in rows:
    row.length = PROMPT
  due: list[tuple[float, int]] = []
  left, version, pauses = len(rows), 0, False
  swaps = case.swap not in ('', 'never')
  while left:
    if not engine.busy and due:
      counters.seconds = max(counters.seconds, due[0][0])
    if pauses and not engine.busy:
      pauses = False
      engine.swap_weights({}, version)
    while due and due[0][0] <= counters.seconds and not pauses:
      _, number = heapq.heappop(due)
      row = rows[number]
      row.turns.pop(0)
      if not row.turns:
        if swaps and version < (len(rows) - left + 1) // _STEP:
          version += 1
          if case.swap == 'pause':
            # The dialogue keeps its slot, so that no other dialogue begins
            # there before all turns have ended.
            pauses = True
            row.turns.append(0)
            heapq.heappush(due, (counters.seconds, number))
            continue
          engine.swap_weights({}, version)
        engine.close(number)
        left -= 1
        continue
      tokens = row.observations.pop(0)
      engine.resume(number, np.zeros(tokens, np.int32))
      row.length += tokens
    for number in engine.poll():
      is_last = len(rows[number].turns) == 1
      wait = 0.0 if is_last else SEARCH_SECONDS
      heapq.heappush(due, (counters.seconds + wait, number))
  return counters


def _engine(case: Case, counters: _Counters) -> engine_lib.Engine:
  programs: Any = counters
  swaps = 'never' if case.swap in ('', 'pause') else case.swap
  return collectors.engine(
    functional.Model(waste.SHAPE, 'vocabulary'),  # never computes anything
    stops.build((b'a',) * 8, stop_strings=('a',), eos_ids=[7]),
    make_driver=lambda _, options: slot_driver.SlotDriver(programs, options),
    slots=case.slots,
    max_length=MAX_LENGTH,
    page_size=case.page,
    pages=case.pages,
    prefill_chunk=256,
    decode_chunk=_CHUNK,
    early_exit=0.25,
    lookahead=1,
    deterministic=case.waves,
    turn_swaps=swaps,
    lanes=1,
    batch_rows=case.places,
  )


def run(*, count: int, seeds: int) -> tuple[str, bool]:
  """Returns the first table, and whether its last line reaches the goals.

  Args:
    count: the number of dialogues of a host.
    seeds: the number of collections that a line is the mean of.
  """
  lines, good = [], False
  for case in CASES:
    read, busy, seconds = np.mean(
      [
        (x.needed / x.read, x.given / x.places, x.seconds)
        for x in (
          collect(case, dialogues(count, seed=seed)) for seed in range(seeds)
        )
      ],
      axis=0,
    )
    good = read >= _GOAL_READ and busy >= _GOAL_BUSY
    lines.append((case.name, f'{read:.2f}', f'{busy:.2f}', f'{seconds:.1f}'))
  return measure.table(HEADER, lines), good


def run_swaps(*, steps: int, seeds: int) -> str:
  """Returns the second table, which is about new weights.

  Args:
    steps: the number of steps that are collected one after the other.
    seeds: see `run`.
  """
  lines = []
  for case in SWAPS:
    seconds = []
    for sigma, longest in TURNS.values():
      total, count = 0.0, steps * _STEP
      for seed in range(seeds):
        rows = dialogues(count, seed=seed, sigma=sigma, longest=longest)
        size = _STEP if case.swap == 'never' else count
        for first in range(0, count, size):
          total += collect(case, rows[first : first + size]).seconds
      seconds.append(f'{total / seeds / steps:.1f}')
    lines.append((case.name, *seconds))
  return measure.table(('new weights', *TURNS), lines)


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints both tables, and whether the goals are reached."""
  flags = measure.start(measure.parser('schedule', steps=3), arguments)
  table, good = run(count=128, seeds=flags.steps)
  print(f'{table}\n\n{"goals reached" if good else "a goal is missed"}\n')
  print(run_swaps(steps=8, seeds=flags.steps))


if __name__ == '__main__':
  main()
