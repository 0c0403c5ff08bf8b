"""A tiny engine, and dialogues with an environment that answers late.

One tiny vocabulary: a stop string that comes up by chance every few tokens,
an end of sequence, and two padding ids that no tokenizer knows.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slot_driver
from stppo_jax.sampling import stops
from stppo_jax.sampling import turns as turns_lib
from tests.models import tiny

TOKENS = (b'a', b'b', b'c', b'ba', b'cb', b'd', b'e', b'f', b'eos')
EOS = 8
MODEL = tiny.model()  # 11 ids: two more than tokens
PARAMS = tiny.params(MODEL)
MAX_LENGTH = 40
TEMPERATURE = 1.3


def mesh(devices: int = 1) -> jax.sharding.Mesh:
  """Devices that cut nothing but rows."""
  return mesh_lib.make_mesh(
    data=-1, fsdp=1, tensor=1, devices=jax.devices()[:devices]
  )


def automaton() -> stops.StopAutomaton:
  """Stops at 'ab' and at the end of the sequence."""
  return stops.build(TOKENS, stop_strings=('ab',), eos_id=EOS)


def options(*, top_k: int = 0, **changes) -> engine_options.EngineOptions:
  """Options of an engine of four slots, in waves."""
  defaults: dict[str, Any] = {
    'slots': 4,
    'max_length': MAX_LENGTH,
    'sampling': sampler.Sampling(temperature=TEMPERATURE, top_k=top_k),
    'cache_blocks': 1,
    'extend_chunk': 4,
    'decode_chunk': 3,
    'early_exit': 1.0,
    'lookahead': 1,
    'deterministic': True,
    'lanes': 1,
    'batch_rows': 0,
  }
  return engine_options.EngineOptions(**(defaults | changes))


class RecordingDriver(slot_driver.SlotDriver):
  """A slot driver that records the calls of its lane.

  Attributes:
    programs: the compiled programs, shared by all lanes.
    calls: the name of each call and its slots (or groups), by slot.
  """

  def __init__(self, programs, options):
    super().__init__(programs, options)
    self.programs = programs
    self.calls: list[tuple[str, Mapping[int, Any]]] = []

  def append(self, appends):
    self.calls.append(('append', appends))
    super().append(appends)

  def decode(self, decodes, *, greedy, enough):
    self.calls.append(('decode', decodes))
    return super().decode(decodes, greedy=greedy, enough=enough)


def new_engine(
  devices: int = 1, **changes
) -> tuple[engine_lib.Engine, list[RecordingDriver]]:
  """An engine that no other test has, and the driver of each of its lanes."""
  drivers: list[RecordingDriver] = []

  def make_driver(*args):
    drivers.append(RecordingDriver(*args))
    return drivers[-1]

  made = engine_lib.Engine(
    MODEL,
    mesh=mesh(devices),
    automaton=automaton(),
    options=options(**changes),
    make_driver=make_driver,
  )
  made.publish(PARAMS, 0)
  return made, drivers


@functools.cache
def engine_and_drivers(
  **changes,
) -> tuple[engine_lib.Engine, list[RecordingDriver]]:
  """One engine for all tests that want the same one, and its drivers."""
  return new_engine(**changes)


def engine(**changes) -> engine_lib.Engine:
  """One engine for all tests that want the same one, weights published."""
  return engine_and_drivers(**changes)[0]


def keys(count: int, seed: int = 0) -> jax.Array:
  """A key for each row."""
  return jax.random.split(jax.random.key(seed), count)


def ids(seed: int, count: int) -> np.ndarray:
  """Tokens that do not end the sequence."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, EOS, count).astype(np.int32)


def prompts(count: int) -> list[np.ndarray]:
  """Of 2 to 10 tokens: up to three calls of `extend`."""
  return [ids(n, 2 + 5 * n % 9) for n in range(count)]


def stops_at(written: Sequence[int]) -> bool:
  """Whether a turn is over, read from its text."""
  text = b''.join(TOKENS[n] for n in written if n < len(TOKENS))
  return b'ab' in text or EOS in written


@dataclasses.dataclass
class Dialogue:
  """All tokens of a row; log-probabilities of observations are 0.

  Attributes:
    spans: first token of each turn, and the one after its last.
  """

  tokens: list[int]
  logprobs: list[float]
  truncated_logprobs: list[float]
  spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)

  def append_observation(self, token_ids: np.ndarray) -> None:
    self.tokens += token_ids.tolist()
    self.logprobs += [0.0] * len(token_ids)
    self.truncated_logprobs += [0.0] * len(token_ids)

  def append_turn(self, written: turns_lib.GeneratedTurn) -> None:
    start = len(self.tokens)
    self.tokens += written.token_ids.tolist()
    self.logprobs += written.logprobs.tolist()
    self.truncated_logprobs += written.truncated_logprobs.tolist()
    self.spans.append((start, len(self.tokens)))


def run_dialogues(
  engine: engine_lib.Engine,
  prompts: Sequence[np.ndarray | None],
  row_keys: jax.Array,
  *,
  group_size: int = 1,
  greedy: bool = False,
  max_turn_tokens: int = 5,
  delays: int | None = None,
  who: Sequence[int] | None = None,
) -> Mapping[int, Dialogue]:
  """Dialogues of one to three turns, with observations of 0 to 5 tokens.

  Args:
    engine: where.
    prompts: see `Engine.begin`.
    row_keys: likewise.
    group_size: likewise.
    greedy: likewise.
    max_turn_tokens: likewise.
    delays: seed of the polls that each observation takes; None = all come at
      once.
    who: number of each row that decides what it is told; its own otherwise.
  """
  engine.begin(
    prompts,
    row_keys,
    group_size=group_size,
    max_turn_tokens=max_turn_tokens,
    greedy=greedy,
  )
  dawdle = np.random.default_rng(delays)
  rows = [n for n in range(len(prompts) * group_size)]
  rows = [n for n in rows if prompts[n // group_size] is not None]
  who = who if who is not None else range(len(prompts) * group_size)
  dialogues = {n: Dialogue([], [], []) for n in rows}
  for n in rows:
    dialogues[n].append_observation(prompts[n // group_size])
  due: dict[int, int] = {}  # polls that a row still waits
  left = set(rows)
  while left:
    due = {n: wait - 1 for n, wait in due.items()}
    now = [n for n, wait in due.items() if wait < 0]
    if not engine.busy and not now:
      now = [min(due, key=lambda n: due[n])]
    for n in now:
      del due[n]
      turn = len(dialogues[n].spans)
      told = ids(100 * who[n] + turn, (who[n] + turn) % 6)
      if turn > who[n] % 3 or len(told) >= engine.remaining(n):
        engine.close(n)
        left.remove(n)
      else:
        engine.resume(n, told)
        dialogues[n].append_observation(told)
    for n, written in engine.poll().items():
      dialogues[n].append_turn(written)
      assert engine.remaining(n) == MAX_LENGTH - len(dialogues[n].tokens)
      due[n] = 0 if delays is None else int(dawdle.integers(8))
  assert not engine.busy and not engine.poll()
  return dialogues


def assert_same(one: Dialogue, other: Dialogue) -> None:
  """The same tokens; log-probs to 1e-5, as other shapes sum in other orders."""
  assert one.tokens == other.tokens
  assert one.spans == other.spans
  for name in ('logprobs', 'truncated_logprobs'):
    np.testing.assert_allclose(
      getattr(one, name), getattr(other, name), atol=1e-5
    )


def first_turns(
  engine: engine_lib.Engine, order: Sequence[Sequence[int]]
) -> dict[int, turns_lib.GeneratedTurn]:
  """Of all rows of a collection that has begun; no slot is empty at first.

  Args:
    engine: refills slots.
    order: rows that are closed together, and then others come; no others are.
  """
  turns = {}
  while len(turns) < engine.slots:
    turns |= engine.poll()
  for together in order:
    for row in together:
      engine.close(row)
    while engine.busy:
      turns |= engine.poll()
  return turns
