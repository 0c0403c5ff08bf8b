"""A tiny engine, and dialogues with an environment that answers late.

Its vocabulary has a stop string that comes up by chance every few tokens, an
end of sequence, and two padding ids that no tokenizer knows.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.parallel import sharding
from stppo_jax.sampling import compiled_programs
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import lowering
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slot_driver
from stppo_jax.sampling import stops
from tests import compilations
from tests.models import tiny

TOKENS = (b'a', b'b', b'c', b'ba', b'cb', b'd', b'e', b'f', b'eos')
EOS = 8
MODEL = tiny.model()  # 11 ids: two more than tokens
PARAMS = tiny.params(MODEL)
MAX_LENGTH = 40
TEMPERATURE = 1.3
# Four slots, filled in waves, on one device.
_DEFAULTS: dict[str, Any] = {
  'devices': 1,
  'top_k': 0,
  'slots': 4,
  'max_length': MAX_LENGTH,
  'page_size': 20,
  'pages': 0,
  'prefill_chunk': 4,
  'decode_chunk': 3,
  'early_exit': 1.0,
  'lookahead': 1,
  'deterministic': True,
  'lanes': 1,
  'batch_rows': 0,
}
# How many arguments of a program are weights and state.
_DEVICE_ARGS = {'empty': 0, 'extend': 2, 'copy': 1, 'decode': 2}


def placement(devices: int = 1, tensor: int = 1) -> publish.Placement:
  """Returns devices over which rows and, along `tensor`, weights are cut."""
  mesh = mesh_lib.make_mesh(
    data=-1, fsdp=1, tensor=1, devices=jax.devices()[:devices]
  )
  return publish.Placement(mesh, tensor=tensor)


def automaton() -> stops.StopAutomaton:
  """Returns an automaton that stops at 'ab' and at the end of the sequence."""
  return stops.build(TOKENS, stop_strings=('ab',), eos_ids=[EOS])


def options(**changes) -> engine_options.EngineOptions:
  """Returns the options of the tiny engine, with other values for some."""
  values = {k: v for k, v in (_DEFAULTS | changes).items() if k != 'devices'}
  top_k = values.pop('top_k')
  return engine_options.EngineOptions(
    sampling=sampler.Sampling(temperature=TEMPERATURE, top_k=top_k), **values
  )


def lowered(
  model: functional.Model, place: publish.Placement, **changes
) -> lowering.Lowering:
  """Returns the programs of an engine of any model; no array is made."""
  weights = jax.eval_shape(model.init, jax.random.key(0))
  layout = sharding.param_shardings(weights, place.training)
  return lowering.Lowering(
    model,
    placement=place,
    options=options(**changes),
    num_states=19,
    trained=sharding.with_layout(weights, layout),
  )


class RecordingPrograms:
  """Stands in for the compiled programs of one lane, and records their calls.

  Attributes:
    calls: by program, the arguments of each call but for weights and state;
      `slots_A` is the first one where a program takes it.
    num_pages: that of each call which reads pages.
    compiled: by program, how many calls had to compile; not counted if there
      are several lanes, which compile at the same time.
    keys_per_device: the shape of a layer's keys on each device.
    broken: whether `extend` fails, after it has donated the state.
  """

  def __init__(self, programs: compiled_programs.CompiledPrograms, lanes: int):
    self._programs = programs
    self._counts = lanes == 1
    self.calls: dict[str, list[tuple]] = {name: [] for name in _DEVICE_ARGS}
    self.num_pages: list[int] = []
    self.compiled = dict.fromkeys(_DEVICE_ARGS, 0)
    self.keys_per_device = ()
    self.broken = False

  def __getattr__(self, name):
    if name not in _DEVICE_ARGS:
      return getattr(self._programs, name)
    return functools.partial(self._call, name)

  def _call(self, name, *args, **kwargs):
    slots_A = [kwargs['slots_A']] if 'slots_A' in kwargs else []
    self.calls[name].append((*slots_A, *args[_DEVICE_ARGS[name] :]))
    self.num_pages += [kwargs['num_pages']] if 'num_pages' in kwargs else []
    if name == 'extend' and self.broken:
      jax.tree.map(lambda x: x.delete(), args[1])
      raise RuntimeError('the device is gone')
    counted = contextlib.nullcontext([])
    if self._counts:
      counted = compilations.counted()
    with counted as compiled:
      result = getattr(self._programs, name)(*args, **kwargs)
    self.compiled[name] += len(compiled)
    state = result[0] if name == 'decode' else result
    keys = state.cache[0][0]
    self.keys_per_device = keys.sharding.shard_shape(keys.shape)
    return result

  @property
  def weights_per_device(self) -> int:
    """Returns the number of weights that each device holds."""
    return sum(
      x.addressable_data(0).size
      for x in jax.tree.leaves(self._programs.weights.params)
    )

  def forget_calls(self) -> None:
    """Empties the records of calls."""
    for calls in self.calls.values():
      calls.clear()


class RecordingDriver(slot_driver.SlotDriver):
  """A slot driver that records the calls of its lane and those of programs.

  Attributes:
    programs: the programs that it calls.
    calls: the name of each call and its slots (or groups), by slot.
  """

  def __init__(self, programs, options):
    self.programs = RecordingPrograms(programs, options.lanes)
    super().__init__(self.programs, options)
    self.calls: list[tuple[str, Mapping[int, Any]]] = []

  def append(self, appends, params):
    self.calls.append(('append', appends))
    super().append(appends, params)

  def decode(self, decodes, params, *, greedy, enough):
    self.calls.append(('decode', decodes))
    return super().decode(decodes, params, greedy=greedy, enough=enough)


def new_engine(
  devices: int = 1,
  *,
  tensor: int = 1,
  model: functional.Model = MODEL,
  **changes,
) -> tuple[engine_lib.Engine, list[RecordingDriver]]:
  """Returns an engine that no other test has, and the driver of each lane."""
  drivers: list[RecordingDriver] = []

  def make_driver(*args):
    drivers.append(RecordingDriver(*args))
    return drivers[-1]

  made = engine_lib.Engine(
    model,
    placement=placement(devices, tensor),
    automaton=automaton(),
    options=options(**changes),
    make_driver=make_driver,
  )
  made.publish(tiny.params(model), 0)
  return made, drivers


@functools.cache
def _shared_engine(changes: tuple[tuple[str, Any], ...]):
  return new_engine(**dict(changes))


def engine_and_drivers(
  **changes,
) -> tuple[engine_lib.Engine, list[RecordingDriver]]:
  """Returns the one engine with these options, and its drivers.

  All tests share it, so that its programs are compiled once. The drivers have
  no record of earlier calls.
  """
  changed = {k: v for k, v in changes.items() if _DEFAULTS.get(k) != v}
  made, drivers = _shared_engine(tuple(sorted(changed.items())))
  for driver in drivers:
    driver.calls.clear()
    driver.programs.forget_calls()
  return made, drivers


def engine(**changes) -> engine_lib.Engine:
  """Returns the one engine with these options, its weights published."""
  return engine_and_drivers(**changes)[0]


def keys(count: int, seed: int = 0) -> jax.Array:
  """Returns the first keys of 512, one for each row."""
  return jax.random.wrap_key_data(_key_data(seed)[:count])


@functools.cache
def _key_data(seed):
  keys = jax.random.split(jax.random.key(seed), 512)
  return np.asarray(jax.random.key_data(keys))


def ids(seed: int, count: int) -> np.ndarray:
  """Returns tokens that do not end the sequence."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, EOS, count).astype(np.int32)


def prompts(count: int) -> list[np.ndarray]:
  """Returns prompts of 2 to 10 tokens, for up to three calls of `extend`."""
  return [ids(n, 2 + 5 * n % 9) for n in range(count)]


def stops_at(written: Sequence[int]) -> bool:
  """Returns whether a stop ends a turn, read from its text."""
  text = b''.join(TOKENS[n] for n in written if n < len(TOKENS))
  return b'ab' in text or EOS in written


@dataclasses.dataclass
class Dialogue:
  """All tokens of a row.

  Attributes:
    tokens: prompt, turns and observations.
    logprobs, truncated_logprobs: of each token; 0 in prompt and observations.
    spans: the first token of each turn, and the one after its last.
    versions: the version of the weights that wrote each turn.
  """

  tokens: list[int]
  logprobs: list[float]
  truncated_logprobs: list[float]
  spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list, compare=False)

  def append_observation(self, token_ids: np.ndarray) -> None:
    self.tokens += token_ids.tolist()
    self.logprobs += [0.0] * len(token_ids)
    self.truncated_logprobs += [0.0] * len(token_ids)

  def append_turn(self, generated: types.GeneratedTurn) -> None:
    start = len(self.tokens)
    self.tokens += generated.token_ids.tolist()
    self.logprobs += generated.logprobs.tolist()
    self.truncated_logprobs += generated.truncated_logprobs.tolist()
    self.spans.append((start, len(self.tokens)))
    self.versions.append(generated.version)


def observation(row: int, turns: int) -> np.ndarray | None:
  """Returns 0 to 5 tokens, or None after one to three turns."""
  over = turns == 1 + row % 3
  return None if over else ids(100 * row + turns, (row + turns) % 6)


def run_dialogues(
  engine: engine_lib.Engine,
  prompts: Sequence[np.ndarray | None],
  row_keys: jax.Array,
  *,
  group_size: int = 1,
  greedy: bool = False,
  max_turn_tokens: int = 5,
  delays: int | None = None,
  observe: Callable[[int, int], np.ndarray | None] = observation,
  before_poll: Callable[[], None] = lambda: None,
) -> Mapping[int, Dialogue]:
  """Collects dialogues of all prompts that are not None.

  Args:
    engine: generates the turns.
    prompts, row_keys, group_size, greedy, max_turn_tokens: see `Engine.begin`.
    delays: seed of the number of polls that each observation takes; None if
      all come at once.
    observe: takes a row and how many turns it has, and returns the observation
      after them; None ends the dialogue.
    before_poll: called before each poll.

  Returns:
    The dialogue of each row.
  """
  engine.begin(
    prompts,
    row_keys,
    group_size=group_size,
    max_turn_tokens=max_turn_tokens,
    greedy=greedy,
  )
  rng = np.random.default_rng(delays)
  rows = [n for n in range(len(prompts) * group_size)]
  rows = [n for n in rows if prompts[n // group_size] is not None]
  dialogues = {n: Dialogue([], [], []) for n in rows}
  for n in rows:
    dialogues[n].append_observation(prompts[n // group_size])
  due: dict[int, int] = {}  # polls that a row still waits for
  left = set(rows)
  while left:
    due = {n: wait - 1 for n, wait in due.items()}
    now = [n for n, wait in due.items() if wait < 0]
    if not engine.busy and not now:
      now = [min(due, key=lambda n: due[n])]
    for n in now:
      del due[n]
      observed = observe(n, len(dialogues[n].spans))
      if observed is None or len(observed) >= engine.remaining(n):
        engine.close(n)
        left.remove(n)
      else:
        engine.resume(n, observed)
        dialogues[n].append_observation(observed)
    before_poll()
    for n, generated in engine.poll().items():
      dialogues[n].append_turn(generated)
      assert engine.remaining(n) == engine.max_length - len(dialogues[n].tokens)
      due[n] = 0 if delays is None else int(rng.integers(8))
  assert not engine.busy and not engine.poll()
  return dialogues


def dialogues(
  engine: engine_lib.Engine, rows: int, *, seed: int = 0, **options
) -> Mapping[int, Dialogue]:
  """Returns the dialogues of so many rows, see `run_dialogues`."""
  groups = rows // options.get('group_size', 1)
  return run_dialogues(engine, prompts(groups), keys(rows, seed), **options)


def begin(engine: engine_lib.Engine, prompts, **changes) -> None:
  """Begins a collection with options of `begin`."""
  options = {'group_size': 1, 'max_turn_tokens': 5, 'greedy': False} | changes
  engine.begin(prompts, keys(len(prompts) * options['group_size']), **options)


def assert_same(one: Dialogue, other: Dialogue) -> None:
  """Asserts equal tokens, and log-probabilities that are equal to 1e-5.

  Programs of other shapes sum in other orders.
  """
  assert one.tokens == other.tokens
  assert one.spans == other.spans
  for name in ('logprobs', 'truncated_logprobs'):
    np.testing.assert_allclose(
      getattr(one, name), getattr(other, name), atol=1e-5
    )


def assert_all_same(
  ours: Mapping[int, Dialogue], theirs: Mapping[int, Dialogue]
) -> None:
  """Asserts that the same rows have the same dialogues."""
  assert ours.keys() == theirs.keys()
  for row, dialogue in ours.items():
    assert_same(dialogue, theirs[row])


def first_turns(
  engine: engine_lib.Engine, order: Sequence[Sequence[int]]
) -> dict[int, types.GeneratedTurn]:
  """Returns the first turns of all rows of a collection that has begun.

  Args:
    engine: it refills slots, all of which get a row at first.
    order: which rows are closed together, one batch after the other; their
      slots are refilled before the next batch. No other row is closed.
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
