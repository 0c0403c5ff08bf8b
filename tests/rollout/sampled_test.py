"""Trajectories of the local engine, packed, are what the trainer reads."""

import functools

import jax
import numpy as np
import pytest
import scipy.special

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.rollout import pack
from tests.models import tiny
from tests.rollout import dialogues
from tests.sampling import tiny_engine

_STATUS = types.TrajectoryStatus


class Tokens(dialogues.Letters):
  """A tokenizer of the tiny engine's ids; no text has the end of sequence."""

  def encode_text(self, text, *, tags=()):
    return np.array([ord(x) % tiny_engine.EOS for x in text], np.int32)

  def decode(self, ids):
    known = len(tiny_engine.TOKENS)
    return b''.join(tiny_engine.TOKENS[n] for n in ids if n < known).decode()


class TwoAnswers(dialogues.TableEnvironment):
  """An environment that answers two turns of any text and ends at the third."""

  async def step(self, question, turn_index, text):
    self.calls.append((question.id, turn_index, text))
    if turn_index == 2:
      return dialogues.end(_STATUS.COMPLETED)
    body = question.text * (1 + turn_index)
    return protocol.Step('search', protocol.Observation('[', body, ']'), None)


OPTIONS = {
  'tokenizer': Tokens(),
  'max_turn_tokens': 6,
  'max_observation_tokens': 7,
}


class _Watched:
  """An engine that calls a function before each poll."""

  def __init__(self, engine, before_poll):
    self._engine, self._before_poll = engine, before_poll

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def poll(self):
    self._before_poll()
    return self._engine.poll()


def _mass_left(tokens_BL, top_k):
  """Returns the mass of the most probable tokens at the place of each token."""
  hidden_BLD = tiny.hidden(tiny_engine.MODEL)(tiny_engine.PARAMS, tokens_BL)
  logits_BLV = np.asarray(hidden_BLD) @ tiny_engine.PARAMS['lm_head'].T
  probs_BLV = scipy.special.softmax(logits_BLV / tiny_engine.TEMPERATURE, -1)
  mass_BL = np.sort(probs_BLV, axis=-1)[..., -top_k:].sum(-1)
  return np.roll(mass_BL, 1, axis=1)


@pytest.mark.parametrize('top_k', [0, pytest.param(3, marks=pytest.mark.slow)])
def test_sampled_trajectories_are_what_the_trainer_reads(top_k):
  engine = tiny_engine.engine(top_k=top_k)
  engine.publish(tiny_engine.PARAMS, 3)
  # The first two are one question; the last one runs out of room.
  texts = ['why?', 'why?', 'who?', 'a question that is so long']
  questions = [dialogues.question(text, text) for text in texts]
  environment = TwoAnswers({})
  with dialogues.collector(engine, environment, **OPTIONS) as collector:
    trajectories = collector.collect(questions, tiny_engine.keys(4))
  statuses = [t.status for t in trajectories]
  assert statuses == [_STATUS.COMPLETED] * 3 + [_STATUS.TRUNCATED_LENGTH]
  assert {turn.version for t in trajectories for turn in t.turns} == {3}
  batch = pack.pack(trajectories, length_bucket=tiny_engine.MAX_LENGTH)
  assert batch.group_ids_B.tolist() == [0, 0, 1, 2]
  assert not np.array_equal(batch.tokens_BL[0], batch.tokens_BL[1])
  trainer = functools.partial(
    tiny_engine.MODEL.logprobs_and_entropy, temperature=tiny_engine.TEMPERATURE
  )
  logprobs_BL = np.asarray(
    jax.jit(trainer)(tiny_engine.PARAMS, batch.tokens_BL)[0]
  )
  mask_BL = batch.loss_mask_BL
  assert mask_BL.sum() > 24
  np.testing.assert_allclose(
    batch.sampler_logprobs_BL[mask_BL], logprobs_BL[mask_BL], atol=1e-5
  )
  assert not batch.sampler_logprobs_BL[~mask_BL].any()
  truncated_BL = logprobs_BL
  if top_k:
    truncated_BL = logprobs_BL - np.log(_mass_left(batch.tokens_BL, top_k))
  # The environment's texts are those of the tokens that the mask marks.
  for n, trajectory in enumerate(trajectories):
    for turn_id, turn in enumerate(trajectory.turns, start=1):
      of_turn_L = batch.turn_ids_BL[n] == turn_id
      text = OPTIONS['tokenizer'].decode(batch.tokens_BL[n][of_turn_L])
      assert (questions[n].id, turn_id - 1, text) in environment.calls
      np.testing.assert_allclose(
        turn.truncated_logprobs, truncated_BL[n][of_turn_L], atol=1e-5
      )
      assert len(turn.observation_ids) <= OPTIONS['max_observation_tokens']
    (rewarded,) = np.flatnonzero(batch.rewards_BL[n])
    assert rewarded == np.flatnonzero(mask_BL[n])[-1]


def assert_equal(one, other):
  """Asserts equal turns, with log-probabilities of equal bits."""
  for a, b in zip(one, other, strict=True):
    assert a.status is b.status
    for x, y in zip(a.turns, b.turns, strict=True):
      for name in (
        *('token_ids', 'observation_ids'),
        *('sampler_logprobs', 'truncated_logprobs'),
      ):
        np.testing.assert_array_equal(getattr(x, name), getattr(y, name))


def test_an_interrupted_collection_leaves_nothing_behind():
  questions = [
    dialogues.question(text) for text in ('why?', 'the of', 'so', 'is')
  ]
  row_keys = tiny_engine.keys(8, seed=2)
  until = []

  def interrupt():
    if until and not until.pop():
      raise KeyboardInterrupt

  engine = _Watched(tiny_engine.engine(), interrupt)
  options = {'group_size': 2, **OPTIONS}
  with dialogues.collector(engine, TwoAnswers({}), **options) as collector:
    expected = collector.collect(questions, row_keys)
    for polls in (0, 1, 3):
      until += [False] + polls * [True]
      with pytest.raises(KeyboardInterrupt):
        collector.collect(questions, row_keys)
      assert_equal(collector.collect(questions, row_keys), expected)
