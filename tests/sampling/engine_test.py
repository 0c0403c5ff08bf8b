"""The decoding engine against repeated whole forward passes.

One tiny vocabulary: a stop string that comes up by chance every few tokens,
an end of sequence, and two padding ids that no tokenizer knows.
"""

import functools

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
from stppo_jax.sampling import stops
from tests.models import tiny

_TOKENS = (b'a', b'b', b'c', b'ba', b'cb', b'd', b'e', b'f', b'eos')
_EOS = 8
_MODEL = tiny.model()  # 11 ids: two more than tokens
_MAX_LENGTH = 40
_TEMPERATURE = 1.3
_PARAMS = tiny.params(_MODEL)


def _mesh(devices=1):
  return mesh_lib.make_mesh(
    data=-1, fsdp=1, tensor=1, devices=jax.devices()[:devices]
  )


@functools.cache
def _engine(devices=1, slots=4, extend_chunk=4, decode_chunk=3):
  return engine_lib.Engine(
    _MODEL,
    mesh=_mesh(devices),
    automaton=stops.build(_TOKENS, stop_strings=('ab',), eos_id=_EOS),
    slots=slots,
    max_length=_MAX_LENGTH,
    temperature=_TEMPERATURE,
    extend_chunk=extend_chunk,
    decode_chunk=decode_chunk,
  )


def _fresh(params=_PARAMS, **options):
  engine = _engine(**options)
  engine.publish(params)
  engine.reset()
  return engine


def _keys(count, seed=0):
  return jax.random.split(jax.random.key(seed), count)


def _ids(seed, count):
  rng = np.random.default_rng(seed)
  return rng.integers(0, len(_TOKENS) - 1, count).astype(np.int32)


def _stops(ids):
  """Whether a turn is over, read from its text."""
  text = b''.join(_TOKENS[n] for n in ids if n < len(_TOKENS))
  return b'ab' in text or _EOS in ids


def _scores(ids):
  """Logits of the next token, from a whole forward pass."""
  padded = np.zeros((1, _MAX_LENGTH), np.int32)
  padded[0, : len(ids)] = ids
  hidden_BLD = tiny.hidden(_MODEL)(_PARAMS, padded)
  last_D = np.asarray(hidden_BLD)[0, len(ids) - 1]
  return last_D @ _PARAMS['lm_head'].T


def _greedy_turn(ids, max_tokens):
  """The slow twin: one whole forward pass a token."""
  turn = []
  while len(turn) < min(max_tokens, _MAX_LENGTH - len(ids)):
    turn.append(int(np.argmax(_scores([*ids, *turn]))))
    if _stops(turn):
      break
  return turn


def _play(engine, keys, rows, *, turns=3, max_tokens=5, greedy=False):
  """Dialogues in some slots; rows: slot -> seed of all that is told to it.

  Returns:
    Slot -> tokens, log-probs (0 where not written), positions of the turns.
  """
  told = {slot: _ids(seed, 3 + seed % 5) for slot, seed in rows.items()}
  tokens = {slot: [] for slot in rows}
  logprobs = {slot: [] for slot in rows}
  spans = {slot: [] for slot in rows}
  for turn in range(turns):
    engine.extend(told)
    written = engine.generate(
      list(rows), keys_S=keys, max_tokens=max_tokens, greedy=greedy
    )
    for slot, seed in rows.items():
      tokens[slot] += [*told[slot], *written[slot].token_ids]
      logprobs[slot] += [0.0] * len(told[slot])
      logprobs[slot] += written[slot].logprobs.tolist()
      end = len(tokens[slot])
      spans[slot].append((end - len(written[slot].token_ids), end))
      assert engine.remaining(slot) == _MAX_LENGTH - end
      told[slot] = _ids(100 * seed + turn, 1 + (seed + turn) % 6)
  return {slot: (tokens[slot], logprobs[slot], spans[slot]) for slot in rows}


def _assert_same(one, other):
  """The same tokens; log-probs to 1e-5, as other shapes sum in other orders."""
  assert one[0] == other[0]
  assert one[2] == other[2]
  np.testing.assert_allclose(one[1], other[1], atol=1e-5)


def test_greedy_dialogues_equal_repeated_whole_passes():
  # Also proves that the end of a turn is in the cache before what follows it.
  dialogues = _play(_fresh(), _keys(4), {n: n for n in range(4)}, greedy=True)
  ends = set()
  for tokens, _, spans in dialogues.values():
    for start, end in spans:
      assert tokens[start:end] == _greedy_turn(tokens[:start], 5)
      ends.add(_stops(tokens[start:end]))
  assert ends == {True, False}


def test_reported_logprobs_are_those_of_the_trainer():
  dialogues = _play(_fresh(), _keys(4), {n: n for n in range(4)})
  packed_BL = np.zeros((4, _MAX_LENGTH), np.int32)
  for slot, (tokens, _, _) in dialogues.items():
    packed_BL[slot, : len(tokens)] = tokens
  trained_BL, _ = heads.token_logprobs_and_entropy(
    tiny.hidden(_MODEL)(_PARAMS, packed_BL),
    _PARAMS['lm_head'],
    packed_BL,
    temperature=_TEMPERATURE,
  )
  for slot, (_, logprobs, spans) in dialogues.items():
    for start, end in spans:
      np.testing.assert_allclose(
        logprobs[start:end], trained_BL[slot, start:end], atol=1e-5
      )


def test_a_row_depends_on_itself_only():
  keys = _keys(4)
  together = _play(_fresh(), keys, {n: n for n in range(4)})
  assert len({tuple(tokens) for tokens, _, _ in together.values()}) == 4
  # Alone in its slot; what the other slots hold is left from before.
  engine = _engine()
  engine.reset()
  _assert_same(_play(engine, keys, {2: 2})[2], together[2])


def test_eight_devices_write_what_one_writes():
  # Twice the slots, other chunks, rows in other slots and other company.
  keys = _keys(8)
  alone = _play(_fresh(), keys[:4], {n: n for n in range(4)})
  # Trained weights arrive cut over the mesh; the engine gathers them.
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  layout = sharding.param_shardings(_PARAMS, mesh)
  assert not layout['lm_head'].is_fully_replicated
  wide = _fresh(
    jax.device_put(_PARAMS, layout),
    devices=8,
    slots=8,
    extend_chunk=7,
    decode_chunk=1,
  )
  assert wide._state.lengths_S.sharding.shard_shape((8,)) == (1,)
  moved = keys[jnp.array([5, 2, 6, 0, 7, 1, 4, 3])]
  rows = {0: 9, 1: 2, 3: 0, 4: 8, 5: 1, 7: 3}
  dialogues = _play(wide, moved, rows)
  for slot, before in ((1, 2), (3, 0), (5, 1), (7, 3)):
    _assert_same(dialogues[slot], alone[before])


def _counted(engine, monkeypatch):
  """The shapes of all tokens given to `extend` from now on, one a call."""
  shapes, extend = [], engine._extend

  def counted(params, state, tokens_SC, counts_S):
    shapes.append(tokens_SC.shape)
    return extend(params, state, tokens_SC, counts_S)

  monkeypatch.setattr(engine, '_extend', counted)
  return shapes


@pytest.mark.parametrize(
  ('devices', 'slots', 'group_size', 'rows'),
  [
    (1, 6, 2, 3),
    (1, 6, 6, 1),
    (8, 16, 2, 8),
    (8, 16, 4, 8),  # four groups on eight devices: four rows are padding
  ],
)
def test_a_group_continues_its_one_prompt(
  devices, slots, group_size, rows, monkeypatch
):
  keys = _keys(slots)
  groups = slots // group_size
  prompts = {group: _ids(group, 3 + group % 7) for group in range(groups)}
  if groups > 1:
    del prompts[1]  # too long, say: its slots stay empty
  opened = [g * group_size + i for g in prompts for i in range(group_size)]
  engine = _fresh(devices=devices, slots=slots)
  told = {slot: _ids(50 + slot, 1 + slot % 4) for slot in opened}

  def turns():
    """Two turns of every open slot, an observation between them."""
    options = {'keys_S': keys, 'max_tokens': 5, 'greedy': False}
    first = engine.generate(opened, **options)
    engine.extend(told)
    return first, engine.generate(opened, **options)

  engine.extend({slot: prompts[slot // group_size] for slot in opened})
  expected = turns()
  shapes = _counted(engine, monkeypatch)
  # What the slots hold from before must not shine through.
  engine.prefill(prompts, group_size=group_size)
  longest = max(map(len, prompts.values()))
  assert shapes == [(rows, 4)] * -(-longest // 4)
  for slot in range(slots):
    held = len(prompts[slot // group_size]) if slot in opened else 0
    assert engine.remaining(slot) == _MAX_LENGTH - held
  for written, wanted in zip(turns(), expected):
    for slot in opened:
      assert written[slot].token_ids.tolist() == wanted[slot].token_ids.tolist()
      np.testing.assert_allclose(
        written[slot].logprobs, wanted[slot].logprobs, atol=1e-5
      )
  # One prompt, as many ways to go on as the keys have.
  ways = {tuple(wanted[s].token_ids) for s in range(slots) if s in opened}
  assert len(ways) > len(prompts)


def test_a_group_of_one_is_not_copied(monkeypatch):
  engine = _fresh()
  shapes = _counted(engine, monkeypatch)
  monkeypatch.setattr(engine, '_spread', pytest.fail)
  engine.prefill({0: _ids(0, 5), 3: _ids(3, 2)}, group_size=1)
  assert shapes == [(4, 4)] * 2
  assert [engine.remaining(slot) for slot in range(4)] == [35, 40, 40, 38]


def test_copying_stays_on_its_device():
  engine = _engine(devices=8, slots=16)
  prompts = jax.eval_shape(lambda: engine._empty_state(8))
  prompts = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=engine._rows),
    prompts,
  )
  program = engine._spread.lower(prompts, 2).compile().as_text()
  for collective in ('all-', 'collective-permute', 'reduce-scatter'):
    assert collective not in program


def test_groups_that_do_not_fit_are_refused():
  engine = _fresh()
  with pytest.raises(ValueError, match='4 slots are no multiple .*size=3'):
    engine.prefill({0: _ids(0, 2)}, group_size=3)
  with pytest.raises(ValueError, match='41 tokens .* 40 left of max_length'):
    engine.prefill({1: _ids(0, _MAX_LENGTH + 1)}, group_size=2)


def test_keys_decide():
  rows = {n: n for n in range(4)}
  one = _play(_fresh(), _keys(4), rows)
  assert _play(_fresh(), _keys(4), rows) == one
  other = _play(_fresh(), _keys(4, seed=1), rows)
  assert all(other[slot][0] != one[slot][0] for slot in rows)


def test_the_noise_is_new_at_every_position():
  # Were it a function of the row alone, a row would repeat its choice.
  keys_S = _keys(2)
  noise = [
    np.asarray(engine_lib._gumbel(keys_S, jnp.full(2, position), 5))
    for position in (3, 3, 4)
  ]
  np.testing.assert_array_equal(noise[0], noise[1])
  assert not np.isclose(noise[0], noise[2]).any()
  assert not np.isclose(noise[0][0], noise[0][1]).any()


def test_budgets_are_exact():
  engine = _fresh()
  keys = _keys(4, seed=3)
  lengths = {0: 2, 1: _MAX_LENGTH - 2, 2: _MAX_LENGTH, 3: 9}
  engine.extend({slot: _ids(slot, n) for slot, n in lengths.items()})
  reached = set()
  for max_tokens in (5, 1, 7):
    before = {slot: engine.remaining(slot) for slot in range(4)}
    written = engine.generate(
      [0, 1, 2], keys_S=keys, max_tokens=max_tokens, greedy=False
    )
    assert written.keys() == {0, 1, 2}
    for slot, turn in written.items():
      budget = min(max_tokens, before[slot])
      count = len(turn.token_ids)
      assert len(turn.logprobs) == count
      assert engine.remaining(slot) == before[slot] - count
      # It stops as soon as a stop is complete, and for no other reason.
      assert turn.stopped == _stops(turn.token_ids)
      assert not any(_stops(turn.token_ids[:n]) for n in range(count))
      assert turn.stopped or count == budget
      reached.add((turn.stopped, count == budget))
    assert engine.remaining(3) == before[3]
  assert {(True, False), (False, True)} <= reached
  assert engine.remaining(2) == 0


def test_what_does_not_fit_is_refused():
  engine = _fresh()
  engine.extend({1: _ids(0, _MAX_LENGTH - 3)})
  with pytest.raises(ValueError, match='4 tokens .* 3 left of max_length=40'):
    engine.extend({1: _ids(0, 4)})
  engine.extend({1: _ids(0, 3)})
  assert engine.remaining(1) == 0


def test_publishing_copies_the_weights():
  rows = {n: n for n in range(4)}
  whole = sharding.replicated(_mesh())
  engine = _engine()
  results = []
  for seed in (0, 1):
    training = jax.device_put(tiny.params(_MODEL, seed), whole)
    engine.publish(training)
    # The update donates its buffers: they are overwritten or gone.
    jax.jit(lambda p: jax.tree.map(lambda x: x - 7, p), donate_argnums=0)(
      training
    )
    jax.tree.map(lambda x: x.delete(), training)
    engine.reset()
    results.append(_play(engine, _keys(4), rows))
  assert results[0] == _play(_fresh(), _keys(4), rows)
  assert all(results[0][slot][0] != results[1][slot][0] for slot in rows)


def test_tokens_come_as_often_as_they_should():
  # Without the branches of its layers, the model is a Markov chain: the next
  # token depends on the last one alone, through norm and head.
  params = jax.tree.map(np.copy, _PARAMS)
  for branch in ('o_proj', 'down_proj'):
    params['layers'][branch]['kernel'][:] = 0.0
  x_VD = np.float64(params['embedding'])
  x_VD /= np.sqrt(np.mean(x_VD**2, axis=1, keepdims=True))
  scores_VV = x_VD * params['norm']['scale'] @ params['lm_head'].T
  counts_VV = np.zeros_like(scores_VV)
  engine = _fresh(params)
  slots, rounds = range(4), 48
  for seed in range(rounds):
    engine.reset()
    engine.extend({slot: _ids(4 * seed + slot, 1) for slot in slots})
    last = {slot: int(_ids(4 * seed + slot, 1)[0]) for slot in slots}
    while any(engine.remaining(slot) for slot in slots):
      written = engine.generate(
        slots, keys_S=_keys(4, seed), max_tokens=_MAX_LENGTH, greedy=False
      )
      for slot, turn in written.items():
        for token_id in turn.token_ids:
          counts_VV[last[slot], token_id] += 1
          last[slot] = token_id
  assert counts_VV.sum() == rounds * 4 * (_MAX_LENGTH - 1)

  def likelihood(temperature):
    wanted_VV = scipy.special.softmax(scores_VV / temperature, axis=1)
    wanted_VV *= counts_VV.sum(1, keepdims=True)
    assert wanted_VV.min() > 4  # or the statistic is not chi-square
    statistic = np.sum((counts_VV - wanted_VV) ** 2 / wanted_VV)
    return scipy.stats.chi2.sf(statistic, scores_VV.size - len(scores_VV))

  assert likelihood(_TEMPERATURE) > 1e-2
  assert likelihood(1.0) < 1e-6  # the statistic can tell


def test_a_tokenizer_larger_than_the_model_is_refused():
  with pytest.raises(ValueError, match='9 ids, the model only 8'):
    engine_lib.Engine(
      tiny.model(vocab_size=8),
      mesh=_mesh(),
      automaton=stops.build(_TOKENS, stop_strings=('ab',), eos_id=_EOS),
      slots=1,
      max_length=8,
      temperature=1.0,
      extend_chunk=4,
      decode_chunk=4,
    )
