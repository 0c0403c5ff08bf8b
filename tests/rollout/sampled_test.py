"""Trajectories of the real engine, packed, are what the trainer reads."""

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.rollout import pack
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import stops
from tests.models import tiny
from tests.rollout import dialogues
from tests.sampling import vocabularies

_STATUS = types.TrajectoryStatus
_SLOTS, _MAX_LENGTH = 4, 48


class _Patient(dialogues.Told):
  """Answers two turns, whatever they say; the third is the last."""

  async def step(self, question, turn_index, text):
    self.calls.append((question.id, turn_index, text))
    if turn_index == 2:
      return dialogues.end(_STATUS.COMPLETED)
    body = question.text * (1 + turn_index)
    return protocol.Step(
      'search', protocol.Observation('\n', body, '</information>\n\n'), None
    )


def test_sampled_trajectories_are_what_the_trainer_reads():
  tokenizer = vocabularies.phrases()
  model = tiny.model(vocab_size=tokenizer.vocab_size)
  params = tiny.params(model)
  engine = engine_lib.Engine(
    model,
    mesh=mesh_lib.make_mesh(
      data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]
    ),
    automaton=stops.build(tokenizer.token_bytes(), eos_id=tokenizer.eos_id),
    slots=_SLOTS,
    max_length=_MAX_LENGTH,
    temperature=1.0,
    extend_chunk=8,
    decode_chunk=4,
  )
  engine.publish(params)
  keys = jax.random.split(jax.random.key(0), _SLOTS)
  # The first two are one question; the last one runs out of room.
  texts = ['why?', 'why?', 'the of', 'a question that goes on, and on']
  questions = [dialogues.question(text, text) for text in texts]
  environment = _Patient({})
  with event_loop.EventLoop() as loop:
    collector = collect.Collector(
      engine=engine,
      environment=environment,
      tokenizer=tokenizer,
      loop=loop,
      max_turn_tokens=6,
      max_observation_tokens=9,
    )
    trajectories = collector.collect(questions, keys)
    again = collector.collect(questions, keys)
  assert [t.status for t in trajectories] == [
    _STATUS.COMPLETED,
    _STATUS.COMPLETED,
    _STATUS.COMPLETED,
    _STATUS.TRUNCATED_LENGTH,
  ]
  batch = pack.pack(trajectories, length_bucket=_MAX_LENGTH)
  assert batch.group_ids_B.tolist() == [0, 0, 1, 2]
  assert not np.array_equal(batch.tokens_BL[0], batch.tokens_BL[1])
  logprobs_BL, _ = jax.jit(model.logprobs_and_entropy)(
    params, batch.tokens_BL, temperature=1.0
  )
  mask_BL = batch.loss_mask_BL
  assert mask_BL.sum() > 4 * 6
  np.testing.assert_allclose(
    batch.sampler_logprobs_BL[mask_BL], logprobs_BL[mask_BL], atol=1e-5
  )
  assert not batch.sampler_logprobs_BL[~mask_BL].any()
  # What the environment was told is the text of the tokens under the mask.
  for n, trajectory in enumerate(trajectories):
    for turn_id, turn in enumerate(trajectory.turns, start=1):
      ids = batch.tokens_BL[n][batch.turn_ids_BL[n] == turn_id]
      told = (questions[n].id, turn_id - 1, tokenizer.decode(ids))
      assert told in environment.calls
      assert len(turn.observation_ids) <= 9
    (rewarded,) = np.flatnonzero(batch.rewards_BL[n])
    assert rewarded == np.flatnonzero(mask_BL[n])[-1]
  np.testing.assert_array_equal(
    pack.pack(again, length_bucket=_MAX_LENGTH).tokens_BL, batch.tokens_BL
  )
