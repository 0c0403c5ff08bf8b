"""Trajectories of the local engine, packed, are what the trainer reads."""

import asyncio
import functools

import jax
import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import actions
from stppo_jax.envs import protocol
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.rollout import pack
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import sampler
from stppo_jax.sampling import stops
from tests.models import tiny
from tests.rollout import dialogues
from tests.sampling import tiny_engine
from tests.sampling import vocabularies

_STATUS = types.TrajectoryStatus
_SLOTS, _MAX_LENGTH = 4, 48


class TwoAnswers(dialogues.TableEnvironment):
  """An environment that answers two turns of any text and ends at the third."""

  async def step(self, question, turn_index, text):
    self.calls.append((question.id, turn_index, text))
    if turn_index == 2:
      return dialogues.end(_STATUS.COMPLETED)
    body = question.text * (1 + turn_index)
    return protocol.Step(
      'search', protocol.Observation('\n', body, '</information>\n\n'), None
    )


_TOKENIZER = vocabularies.phrases()
_MODEL = tiny.model(vocab_size=_TOKENIZER.vocab_size)
_PARAMS = tiny.params(_MODEL)
_OPTIONS = {
  'tokenizer': _TOKENIZER,
  'max_turn_tokens': 6,
  'max_observation_tokens': 9,
}


@functools.cache
def _engine(*, deterministic):
  """Returns one engine for all tests, which compile its programs once."""
  return new_engine(deterministic=deterministic)


def params(seed):
  """Returns weights of the model of these engines."""
  return tiny.params(_MODEL, seed)


def new_engine(**changes):
  """Returns an engine of a tiny model, whose weights are those of 3 steps."""
  engine = engine_lib.Engine(
    _MODEL,
    placement=publish.Placement(
      mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
      tensor=1,
    ),
    automaton=stops.build(
      _TOKENIZER.token_bytes(),
      stop_strings=actions.STOP_STRINGS,
      eos_ids=(_TOKENIZER.eos_id,),
    ),
    options=engine_options.EngineOptions(
      slots=_SLOTS,
      max_length=_MAX_LENGTH,
      sampling=sampler.Sampling(temperature=1.0),
      prefill_chunk=12,
      decode_chunk=4,
      lookahead=1,
      lanes=1,
      batch_rows=3,
      page_size=0,
      pages=0,
      early_exit=0.25,
      **changes,
    ),
  )
  engine.publish(_PARAMS, 3)
  return engine


class _Watched:
  """An engine that calls a function before each poll."""

  def __init__(self, engine, before_poll):
    self._engine, self._before_poll = engine, before_poll

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def poll(self):
    self._before_poll()
    return self._engine.poll()


def test_sampled_trajectories_are_what_the_trainer_reads():
  engine = _engine(deterministic=True)
  keys = tiny_engine.keys(_SLOTS)
  # The first two are one question; the last one runs out of room.
  texts = ['why, and why?'] * 2 + ['who is it, and?', 'a question that is long']
  questions = [dialogues.question(text, text) for text in texts]
  environment = TwoAnswers({})
  with dialogues.collector(engine, environment, **_OPTIONS) as collector:
    trajectories = collector.collect(questions, keys)
    again = collector.collect(questions, keys)
  assert [t.status for t in trajectories] == [
    _STATUS.COMPLETED,
    _STATUS.COMPLETED,
    _STATUS.COMPLETED,
    _STATUS.TRUNCATED_LENGTH,
  ]
  assert {turn.version for t in trajectories for turn in t.turns} == {3}
  batch = pack.pack(trajectories, length_bucket=_MAX_LENGTH)
  assert batch.group_ids_B.tolist() == [0, 0, 1, 2]
  assert not np.array_equal(batch.tokens_BL[0], batch.tokens_BL[1])
  trainer = functools.partial(_MODEL.logprobs_and_entropy, temperature=1.0)
  logprobs_BL, _ = jax.device_get(jax.jit(trainer)(_PARAMS, batch.tokens_BL))
  mask_BL = batch.loss_mask_BL
  assert mask_BL.sum() > 4 * 6
  np.testing.assert_allclose(
    batch.sampler_logprobs_BL[mask_BL], logprobs_BL[mask_BL], atol=1e-5
  )
  assert not batch.sampler_logprobs_BL[~mask_BL].any()
  # The environment's texts are those of the tokens that the mask marks.
  for n, trajectory in enumerate(trajectories):
    for turn_id, turn in enumerate(trajectory.turns, start=1):
      ids = batch.tokens_BL[n][batch.turn_ids_BL[n] == turn_id]
      call = (questions[n].id, turn_id - 1, _TOKENIZER.decode(ids))
      assert call in environment.calls
      assert len(turn.observation_ids) <= 9
    (rewarded,) = np.flatnonzero(batch.rewards_BL[n])
    assert rewarded == np.flatnonzero(mask_BL[n])[-1]
  np.testing.assert_array_equal(
    pack.pack(again, length_bucket=_MAX_LENGTH).tokens_BL, batch.tokens_BL
  )


class Slow(TwoAnswers):
  """An environment that answers each turn after a random time.

  Attributes:
    in_flight: turns that are being answered.
    most: most of them at the same time.
  """

  def __init__(self, seed):
    super().__init__({})
    self._rng = np.random.default_rng(seed)
    self.in_flight = self.most = 0

  async def step(self, question, turn_index, text):
    self.in_flight += 1
    self.most = max(self.most, self.in_flight)
    await asyncio.sleep(self._rng.exponential(0.005))
    self.in_flight -= 1
    return await super().step(question, turn_index, text)


def assert_equal(one, other, *, exact):
  """Asserts equal turns, with equal log-probabilities or to 1e-5."""
  atol = 0.0 if exact else 1e-5
  for a, b in zip(one, other, strict=True):
    assert a.status is b.status
    for x, y in zip(a.turns, b.turns, strict=True):
      np.testing.assert_array_equal(x.token_ids, y.token_ids)
      np.testing.assert_array_equal(x.observation_ids, y.observation_ids)
      for name in ('sampler_logprobs', 'truncated_logprobs'):
        np.testing.assert_allclose(
          getattr(x, name), getattr(y, name), rtol=0, atol=atol
        )


@pytest.mark.parametrize('deterministic', [True, False])
@pytest.mark.slow
def test_trajectories_do_not_depend_on_the_order_of_answers(deterministic):
  engine = _engine(deterministic=deterministic)
  texts = [f'{"why " * (n % 4)}{n}?' for n in range(6)]
  questions = [dialogues.question(text, text) for text in texts]
  row_keys = tiny_engine.keys(12, seed=1)

  def collected(environment):
    options = {'group_size': 2, **_OPTIONS}
    with dialogues.collector(engine, environment, **options) as collector:
      return collector.collect(questions, row_keys)

  expected = collected(TwoAnswers({}))
  assert len({t.turns[0].token_ids.tobytes() for t in expected}) > 6
  orders = set()
  for seed in range(4):
    environment = Slow(seed)
    assert_equal(collected(environment), expected, exact=deterministic)
    assert environment.most > 1
    orders.add(tuple(environment.calls))
  assert len(orders) > 1


@pytest.mark.slow
def test_the_engine_decodes_while_the_environment_answers():
  environment, waiting = Slow(0), []
  engine = _Watched(
    _engine(deterministic=False),
    lambda: waiting.append(environment.in_flight),
  )
  questions = [dialogues.question('why?')] * 12
  with dialogues.collector(engine, environment, **_OPTIONS) as collector:
    collector.collect(questions, tiny_engine.keys(12, seed=1))
  assert max(waiting) > 0  # polls did not wait for all answers


@pytest.mark.parametrize(
  'deterministic', [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_an_interrupted_collection_leaves_nothing_behind(deterministic):
  questions = [
    dialogues.question(text) for text in ('why?', 'the of', 'so', 'is')
  ]
  row_keys = tiny_engine.keys(8, seed=2)
  until = []

  def interrupt():
    if until and not until.pop():
      raise KeyboardInterrupt

  engine = _Watched(_engine(deterministic=deterministic), interrupt)
  options = {'group_size': 2, **_OPTIONS}
  with dialogues.collector(engine, TwoAnswers({}), **options) as collector:
    expected = collector.collect(questions, row_keys)
    for polls in (0, 1, 3):
      until += [False] + polls * [True]
      with pytest.raises(KeyboardInterrupt):
        collector.collect(questions, row_keys)
      again = collector.collect(questions, row_keys)
      assert_equal(again, expected, exact=deterministic)
