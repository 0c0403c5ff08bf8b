"""Dialogues that are collected with a server."""

import types as python_types

import numpy as np

from stppo_jax import types
from stppo_jax.configs import base
from stppo_jax.configs import schema
from stppo_jax.envs import actions
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.http import server as http_server
from stppo_jax.rollout import collect
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import engines
from tests.models import tiny
from tests.sampling import tiny_engine
from tests.sampling.remote import fake_servers
from tests.sampling.remote import model_server


class _Talk(protocol.Environment):
  """An environment that answers twice and then ends the dialogue."""

  stop_strings = actions.STOP_STRINGS
  tags = ()

  def prompt(self, question):
    return question.text

  async def step(self, question, turn_index, text):
    if turn_index == 2:
      return protocol.Step('answer', None, types.TrajectoryStatus.COMPLETED)
    observation = protocol.Observation('[', 'cab' * (turn_index + 1), ']')
    return protocol.Step('search', observation, None)

  def rewards(self, question, prompt, texts, status):
    return {'right': float(len(texts))}, {'em': 1.0}


def _collect(engine, loop):
  collector = collect.Collector(
    engine=engine,
    environment=_Talk(),
    tokenizer=fake_servers.Tokens(),
    loop=loop,
    max_turn_tokens=fake_servers.TURN,
    max_observation_tokens=6,
    group_size=2,
  )
  questions = [
    types.Question(str(n), text, ('x',), 'd')
    for n, text in enumerate(('abc', '[sea</]', 'b'))
  ]
  return collector.collect(questions, tiny_engine.keys(6), greedy=True)


def _same_trajectories(ours, theirs):
  for our, their in zip(ours, theirs, strict=True):
    assert our.status == their.status and len(our.turns) == len(their.turns)
    for a, b in zip(our.turns, their.turns):
      np.testing.assert_array_equal(a.token_ids, b.token_ids)
      np.testing.assert_array_equal(a.observation_ids, b.observation_ids)
      np.testing.assert_allclose(
        a.sampler_logprobs, b.sampler_logprobs, atol=1e-5
      )


def test_ids_are_never_made_from_text(served):
  other_spelling = fake_servers.change_choice(
    token_ids=[6, 7, 8], logprobs={'token_logprobs': [-1.0, -2.0, -3.0]}
  )
  tokens = fake_servers.Tokens()
  engine = served.vllm_engine(concurrency=1)
  served.model.requests.clear()
  served.faults.answers = [other_spelling]
  first, *_ = _collect(engine, served.loop)
  turn = first.turns[0]
  assert turn.token_ids.tolist() == [6, 7, 8]
  assert tokens.decode([6, 7, 8]) == '</search>x'
  assert tokens.encode_text('</search>x'[:9]).tolist() == [10]
  prompt = first.prompt_ids.tolist()
  observation = turn.observation_ids.tolist()
  prompts = [request.prompt_ids for request in served.model.requests]
  assert [*prompt, 6, 7, 8, *observation] in prompts


def test_a_failed_turn_is_an_infra_error_of_its_row_alone(served):
  engine = served.vllm_engine()
  healthy = _collect(engine, served.loop)
  prompt = healthy[2].prompt_ids.tolist()

  def fault(reply):
    (choice,) = reply['choices']
    ids = choice['prompt_token_ids']
    if ids[: len(prompt)] == prompt and len(ids) > len(prompt):
      choice['logprobs'] = None

  engine.statistics()
  served.faults.answers = [fault] * 20
  trajectories = _collect(engine, served.loop)
  for n in (2, 3):  # the group's first turns were fine
    assert trajectories[n].status is types.TrajectoryStatus.INFRA_ERROR
    assert len(trajectories[n].turns) == 1
  for n in (0, 1, 4, 5):
    _same_trajectories([trajectories[n]], [healthy[n]])
  assert engine.statistics()['engine/failures'] == 2


def test_a_config_collects_with_a_server(served):
  tokenizer = tokenizer_lib.phrase_tokenizer(prompts.phrases(['b', 'c']))
  policy = tiny.model(vocab_size=tokenizer.vocab_size, num_layers=1)
  model = model_server.ModelServer(
    policy,
    tiny.params(policy),
    token_bytes=tokenizer.token_bytes(),
    max_length=64,
  )
  config = base.get_config()
  config.rollout.engine = 'remote'
  (line,) = schema.check(config)
  assert 'rollout.remote.url' in line
  config.rollout.remote.model = 'tiny'
  config.env.max_length, config.env.max_turn_tokens = 64, 9
  config.model.eos_token_ids = (tokenizer.eos_id, 0)
  services = python_types.SimpleNamespace(environment=_Talk(), loop=served.loop)
  with http_server.EmbeddedServer(model.app) as server:
    config.rollout.remote.url = server.url
    assert not schema.check(config)
    engine = engines.build(config, services, tokenizer, policy, None)
    collector = engines.build_collector(config, services, tokenizer, engine)
    engine.publish(tiny.params(policy, seed=1), 7)
    question = types.Question('q', 'abc', ('x',), 'd')
    (trajectory,) = collector.collect([question], tiny_engine.keys(1))
  assert [turn.version for turn in trajectory.turns] == [7, 7, 7]
  assert trajectory.status is types.TrajectoryStatus.COMPLETED
  last = model.requests[-1]
  assert last.stop_strings == ['</search>', '</answer>']
  assert last.stop_ids == [tokenizer.eos_id, 0]
