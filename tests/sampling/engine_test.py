"""The decoding engine against repeated whole forward passes, and itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from stppo_jax.models import heads
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.sampling import engine as engine_lib
from tests.models import tiny
from tests.sampling import tiny_engine

_MAX_LENGTH = tiny_engine.MAX_LENGTH
_ROWS = 10  # more than slots: three waves, or refilling
_MODES = {'waves': True, 'refill': False}


def _scores(ids):
  """Logits of the next token, from a whole forward pass."""
  padded = np.zeros((1, _MAX_LENGTH), np.int32)
  padded[0, : len(ids)] = ids
  hidden_BLD = tiny.hidden(tiny_engine.MODEL)(tiny_engine.PARAMS, padded)
  last_D = np.asarray(hidden_BLD)[0, len(ids) - 1]
  return last_D @ tiny_engine.PARAMS['lm_head'].T


def _greedy_turn(ids, max_tokens):
  """The slow twin: one whole forward pass a token."""
  turn = []
  while len(turn) < min(max_tokens, _MAX_LENGTH - len(ids)):
    turn.append(int(np.argmax(_scores([*ids, *turn]))))
    if tiny_engine.stops_at(turn):
      break
  return turn


def _play(rows=_ROWS, *, seed=0, delays=None, group_size=1, **options):
  engine = tiny_engine.engine(**options)
  return tiny_engine.run_dialogues(
    engine,
    tiny_engine.prompts(rows // group_size),
    tiny_engine.keys(rows, seed),
    group_size=group_size,
    delays=delays,
  )


@pytest.mark.parametrize('mode', _MODES)
def test_greedy_dialogues_equal_repeated_whole_passes(mode):
  # Also proves that the end of a turn is in the cache before what follows it.
  dialogues = tiny_engine.run_dialogues(
    tiny_engine.engine(deterministic=_MODES[mode]),
    tiny_engine.prompts(_ROWS),
    tiny_engine.keys(_ROWS),
    greedy=True,
    delays=1,
  )
  assert dialogues.keys() == set(range(_ROWS))
  ends = set()
  for dialogue in dialogues.values():
    for start, end in dialogue.spans:
      turn = dialogue.tokens[start:end]
      assert turn == _greedy_turn(dialogue.tokens[:start], 5)
      ends.add(tiny_engine.stops_at(turn))
  assert ends == {True, False}
  assert {len(d.spans) for d in dialogues.values()} == {1, 2, 3}


@pytest.mark.parametrize('top_k', [0, 3])
def test_reported_logprobs_are_those_of_the_trainer(top_k):
  dialogues = _play(top_k=top_k)
  packed_BL = np.zeros((_ROWS, _MAX_LENGTH), np.int32)
  for row, dialogue in dialogues.items():
    packed_BL[row, : len(dialogue.tokens)] = dialogue.tokens
  hidden_BLD = tiny.hidden(tiny_engine.MODEL)(tiny_engine.PARAMS, packed_BL)
  trained_BL, _ = heads.token_logprobs_and_entropy(
    hidden_BLD,
    tiny_engine.PARAMS['lm_head'],
    packed_BL,
    temperature=tiny_engine.TEMPERATURE,
  )
  # By hand: the mass of the most probable tokens, before each token.
  scores_BLV = np.asarray(hidden_BLD) @ tiny_engine.PARAMS['lm_head'].T
  chances_BLV = scipy.special.softmax(scores_BLV / tiny_engine.TEMPERATURE, -1)
  mass_BL = np.sort(chances_BLV, axis=-1)[..., -top_k:].sum(-1)
  left_BL = np.array(trained_BL)
  left_BL[:, 1:] -= np.log(mass_BL[:, :-1])
  for row, dialogue in dialogues.items():
    for start, end in dialogue.spans:
      np.testing.assert_allclose(
        dialogue.logprobs[start:end], trained_BL[row, start:end], atol=1e-5
      )
      np.testing.assert_allclose(
        dialogue.truncated_logprobs[start:end],
        left_BL[row, start:end],
        atol=1e-5,
      )


@pytest.mark.parametrize('mode', _MODES)
def test_a_row_depends_on_itself_only(mode):
  together = _play(deterministic=_MODES[mode])
  assert len({tuple(d.tokens) for d in together.values()}) == _ROWS
  # Alone; what the other slots hold is left from before.
  for row in (2, 8):
    prompts = [
      prompt if n == row else None
      for n, prompt in enumerate(tiny_engine.prompts(_ROWS))
    ]
    alone = tiny_engine.run_dialogues(
      tiny_engine.engine(deterministic=_MODES[mode]),
      prompts,
      tiny_engine.keys(_ROWS),
    )
    assert alone.keys() == {row}
    tiny_engine.assert_same(alone[row], together[row])


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'group_size': 2, 'cache_blocks': 4},
    {'devices': 8, 'slots': 8, 'group_size': 2},
    {'group_size': 2, 'lanes': 2},
  ],
  ids=str,
)
def test_the_same_bits_whenever_observations_come(options):
  expected = _play(**options)
  for delays in range(6):
    # Equality of floats, not closeness.
    assert _play(**options, delays=delays) == expected


@pytest.mark.parametrize(
  'options',
  [
    {'slots': 16},
    {'slots': 6},
    {'lookahead': 0},
    {'lookahead': 2},
    {'extend_chunk': 7, 'decode_chunk': 1},
    {'decode_chunk': 50},
    {'devices': 8, 'slots': 8},
    {'deterministic': False},
    {'cache_blocks': 4},
    {'deterministic': False, 'slots': 3, 'lookahead': 2, 'cache_blocks': 3},
    {'deterministic': False, 'slots': 16, 'lookahead': 0, 'early_exit': 0.3},
    {'deterministic': False, 'devices': 8, 'slots': 8},
    {'lanes': 2},
    {'deterministic': False, 'slots': 8, 'batch_rows': 2, 'lookahead': 0},
    {'deterministic': False, 'slots': 12, 'lanes': 2, 'batch_rows': 4},
  ],
  ids=str,
)
def test_other_shapes_write_the_same(options):
  expected = _play()
  for delays in (None, 1):
    dialogues = _play(delays=delays, **options)
    for row in range(_ROWS):
      tiny_engine.assert_same(dialogues[row], expected[row])


def test_rows_may_stand_anywhere():
  expected = _play(8)
  # Trained weights arrive cut over the mesh; the engine gathers them.
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  layout = sharding.param_shardings(tiny_engine.PARAMS, mesh)
  assert not layout['lm_head'].is_fully_replicated
  wide = tiny_engine.engine(devices=8, slots=8, extend_chunk=7, decode_chunk=1)
  wide.publish(jax.device_put(tiny_engine.PARAMS, layout), 0)
  who = [5, 2, 6, 0, 7, 1, 4, 3]
  moved = tiny_engine.run_dialogues(
    wide,
    [tiny_engine.prompts(8)[n] for n in who],
    tiny_engine.keys(8)[jnp.array(who)],
    who=who,
  )
  for row, n in enumerate(who):
    tiny_engine.assert_same(moved[row], expected[n])


@pytest.mark.parametrize(
  ('devices', 'slots', 'group_size'),
  [
    (1, 4, 2),
    (1, 6, 3),
    (1, 12, 12),
    (8, 16, 2),
    (8, 16, 4),  # four groups on eight devices: four places are padding
  ],
)
@pytest.mark.parametrize('mode', _MODES)
def test_a_group_continues_its_one_prompt(devices, slots, group_size, mode):
  rows, absent = 24, 1
  alone = tiny_engine.prompts(rows // group_size)
  if len(alone) > 2:
    alone[absent] = None  # too long, say: its rows are not played
  each = [prompt for prompt in alone for _ in range(group_size)]
  expected = tiny_engine.run_dialogues(
    tiny_engine.engine(), each, tiny_engine.keys(rows)
  )
  engine = tiny_engine.engine(
    devices=devices, slots=slots, deterministic=_MODES[mode]
  )
  for delays in range(2):
    grouped = tiny_engine.run_dialogues(
      engine,
      alone,
      tiny_engine.keys(rows),
      group_size=group_size,
      delays=delays,
    )
    assert grouped.keys() == expected.keys()
    for row, dialogue in grouped.items():
      tiny_engine.assert_same(dialogue, expected[row])
  # One prompt, as many ways to go on as the keys have.
  ways = {tuple(dialogue.tokens) for dialogue in expected.values()}
  assert len(ways) > len(alone)


@pytest.mark.parametrize('mode', _MODES)
def test_waves_wait_for_the_last_row_and_refilling_does_not(mode):
  engine = tiny_engine.engine(slots=2, deterministic=_MODES[mode])
  _begun(engine, tiny_engine.prompts(4), max_turn_tokens=3)
  ended = set()
  while engine.busy:
    for row in engine.poll():
      ended.add(row)
      if row != 0:  # whose observation takes for ever
        engine.close(row)
  assert ended == ({0, 1} if mode == 'waves' else {0, 1, 2, 3})
  engine.close(0)
  while engine.busy:
    for row in engine.poll():
      ended.add(row)
      engine.close(row)
  assert ended == {0, 1, 2, 3}


def test_rows_that_come_later_overtake_nobody():
  engine, (driver,) = tiny_engine.engine_and_drivers(
    slots=4, batch_rows=1, lookahead=0, deterministic=False
  )
  driver.calls.clear()
  prompts = [tiny_engine.ids(n, 20 if n == 0 else 3) for n in range(12)]
  _begun(engine, prompts, keys=12, max_turn_tokens=6)
  ended = []
  while engine.busy:
    for row in engine.poll():
      ended.append(row)
      engine.close(row)
  assert len(ended) == 12 and 0 in ended[:5]
  # Every row gets a chunk before any row gets another one.
  decoded = [[*slots] for name, slots in driver.calls if name == 'decode']
  assert sorted(decoded[:4]) == [[0], [1], [2], [3]]


def test_a_prompt_is_copied_before_its_slot_is_given_away():
  prompts = tiny_engine.prompts(4)
  engine = tiny_engine.engine(deterministic=False)
  options = {'keys': 8, 'group_size': 2, 'max_turn_tokens': 3}

  def first_turns(order):
    """Of all rows; those in `order` are closed one after the other."""
    _begun(engine, prompts, **options)
    turns = tiny_engine.first_turns(engine, order)
    return {row: turn.token_ids.tolist() for row, turn in turns.items()}

  # The first row of the third group plays in slot 1 and ends; its fellow gets
  # slot 0, and slot 1, the only one that holds their prompt, is overwritten.
  expected = first_turns([(0, 1, 2, 3)])
  assert first_turns([(1,), (0, 4), (2,)]) == expected


def test_keys_decide():
  one = _play()
  assert _play() == one
  other = _play(seed=1)
  assert all(other[row].tokens != one[row].tokens for row in one)


@pytest.mark.parametrize('mode', _MODES)
def test_budgets_are_exact(mode):
  engine = tiny_engine.engine(deterministic=_MODES[mode])
  lengths = [2, _MAX_LENGTH - 2, _MAX_LENGTH - 1, 9]
  reached = set()
  for max_tokens in (5, 1, 7):
    engine.begin(
      [tiny_engine.ids(n, length) for n, length in enumerate(lengths)],
      tiny_engine.keys(4, seed=3),
      group_size=1,
      max_turn_tokens=max_tokens,
      greedy=False,
    )
    ended = {}
    while engine.busy:
      ended |= engine.poll()
    assert ended.keys() == {0, 1, 2, 3}
    for row, turn in ended.items():
      budget = min(max_tokens, _MAX_LENGTH - lengths[row])
      count = len(turn.token_ids)
      assert len(turn.logprobs) == len(turn.truncated_logprobs) == count > 0
      assert engine.remaining(row) == _MAX_LENGTH - lengths[row] - count
      # It stops as soon as a stop is complete, and for no other reason.
      assert turn.stopped == tiny_engine.stops_at(turn.token_ids)
      assert not any(
        tiny_engine.stops_at(turn.token_ids[:n]) for n in range(count)
      )
      assert turn.stopped or count == budget
      reached.add((turn.stopped, count == budget))
  assert {(True, False), (False, True)} <= reached


def _begun(engine, prompts, keys=4, **options):
  options = {'group_size': 1, 'max_turn_tokens': 5, 'greedy': False} | options
  engine.begin(prompts, tiny_engine.keys(keys), **options)


def _next(engine):
  """The turns that end next."""
  while engine.busy:
    if ended := engine.poll():
      return ended
  return {}


@pytest.mark.parametrize(
  ('prompts', 'options', 'message'),
  [
    (
      [tiny_engine.ids(0, 2)],
      {'group_size': 3},
      'slots=4: .*group_size=3',
    ),
    (
      [None, tiny_engine.ids(0, 40)],
      {},
      'a prompt of 40 tokens.*max_length=40',
    ),
    ([tiny_engine.ids(0, 0)], {}, 'a prompt of 0 tokens'),
    ([tiny_engine.ids(0, 1)] * 3, {'group_size': 2}, '4 keys for 3 prompts'),
  ],
)
def test_what_cannot_be_played_is_refused(prompts, options, message):
  with pytest.raises(ValueError, match=message):
    _begun(tiny_engine.engine(), prompts, **options)


def test_what_does_not_fit_is_refused():
  engine = tiny_engine.engine()
  _begun(engine, [tiny_engine.ids(0, _MAX_LENGTH - 6)], max_turn_tokens=2)
  for act in (lambda: engine.close(0), lambda: engine.resume(0, None)):
    with pytest.raises(ValueError, match='row 0 is not between two turns'):
      act()  # it waits for its slot
  ended = _next(engine)
  room = 6 - len(ended[0].token_ids)
  with pytest.raises(ValueError, match=f'{room} tokens .* the {room} left of'):
    engine.resume(0, tiny_engine.ids(0, room))
  engine.resume(0, tiny_engine.ids(0, room - 1))
  with pytest.raises(ValueError, match='row 0 is not between two turns'):
    engine.resume(0, tiny_engine.ids(0, 1))
  (written,) = _next(engine).values()
  assert len(written.token_ids) == 1 and engine.remaining(0) == 0


@pytest.mark.parametrize('mode', _MODES)
def test_a_new_collection_forgets_the_one_before(mode):
  engine = tiny_engine.engine(deterministic=_MODES[mode], lookahead=2)
  expected = _play(deterministic=_MODES[mode], lookahead=2)
  for polls in (2, 5):
    _begun(engine, tiny_engine.prompts(9), keys=9)
    for n in range(polls):
      for row, _ in engine.poll().items():
        if n % 2:
          engine.resume(row, tiny_engine.ids(row, 3))
        else:
          engine.close(row)
    again = _play(deterministic=_MODES[mode], lookahead=2)
    assert again == expected
  engine.begin(
    [], tiny_engine.keys(0), group_size=1, max_turn_tokens=1, greedy=0
  )
  assert not engine.busy and not engine.poll()


def test_publishing_copies_the_weights():
  whole = sharding.replicated(tiny_engine.mesh())
  engine = tiny_engine.engine(extend_chunk=5)
  results = []
  for seed in (0, 1):
    training = jax.device_put(tiny.params(tiny_engine.MODEL, seed), whole)
    engine.publish(training, 7 + seed)
    assert engine.version == 7 + seed
    # The update donates its buffers: they are overwritten or gone.
    jax.jit(lambda p: jax.tree.map(lambda x: x - 7, p), donate_argnums=0)(
      training
    )
    jax.tree.map(lambda x: x.delete(), training)
    results.append(_play(extend_chunk=5))
  engine.publish(tiny_engine.PARAMS, 0)
  assert results[0] == _play(extend_chunk=5)
  assert all(results[0][n].tokens != results[1][n].tokens for n in results[0])


def test_tokens_come_as_often_as_they_should():
  # Without the branches of its layers, the model is a Markov chain: the next
  # token depends on the last one alone, through norm and head.
  params = jax.tree.map(np.copy, tiny_engine.PARAMS)
  for branch in ('o_proj', 'down_proj'):
    params['layers'][branch]['kernel'][:] = 0.0
  x_VD = np.float64(params['embedding'])
  x_VD /= np.sqrt(np.mean(x_VD**2, axis=1, keepdims=True))
  scores_VV = x_VD * params['norm']['scale'] @ params['lm_head'].T
  counts_VV = np.zeros_like(scores_VV)
  engine = tiny_engine.engine(slots=16, deterministic=False, decode_chunk=8)
  engine.publish(params, 0)
  rows = 192
  last = {row: int(tiny_engine.ids(row, 1)[0]) for row in range(rows)}
  _begun(
    engine,
    [tiny_engine.ids(row, 1) for row in range(rows)],
    keys=rows,
    max_turn_tokens=_MAX_LENGTH,
  )
  while engine.busy:
    for row, turn in engine.poll().items():
      for token_id in turn.token_ids:
        counts_VV[last[row], token_id] += 1
        last[row] = token_id
      if engine.remaining(row):
        engine.resume(row, tiny_engine.ids(0, 0))  # it goes on where it stopped
      else:
        engine.close(row)
  engine.publish(tiny_engine.PARAMS, 0)
  assert counts_VV.sum() == rows * (_MAX_LENGTH - 1)

  def likelihood(temperature):
    wanted_VV = scipy.special.softmax(scores_VV / temperature, axis=1)
    wanted_VV *= counts_VV.sum(1, keepdims=True)
    assert wanted_VV.min() > 4  # or the statistic is not chi-square
    statistic = np.sum((counts_VV - wanted_VV) ** 2 / wanted_VV)
    return scipy.stats.chi2.sf(statistic, scores_VV.size - len(scores_VV))

  assert likelihood(tiny_engine.TEMPERATURE) > 1e-2
  assert likelihood(1.0) < 1e-5  # the statistic can tell


def test_a_tokenizer_larger_than_the_model_is_refused():
  with pytest.raises(ValueError, match='9 ids, the model only 8'):
    engine_lib.Engine(
      tiny.model(vocab_size=8),
      mesh=tiny_engine.mesh(),
      automaton=tiny_engine.automaton(),
      options=tiny_engine.options(),
    )
