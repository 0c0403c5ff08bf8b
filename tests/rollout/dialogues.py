"""A tokenizer and an environment that one can follow by hand."""

from collections.abc import Mapping

import numpy as np

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.sampling import scripted


class Letters:
  """One token a character, its code point."""

  def encode_text(self, text):
    return np.array([ord(letter) for letter in text], np.int32)

  encode_prompt = encode_text

  def decode(self, ids):
    return ''.join(map(chr, ids))


class TableEnvironment:
  """An environment that answers from a table of what the policy wrote.

  Attributes:
    prompted: question id of every prompt.
    calls: (question id, turn index, text) of every step.
    ends: (question id, prompt, texts, status) of every trajectory.
  """

  max_turns = 2

  def __init__(self, steps: Mapping[str, protocol.Step], rewards=None):
    self._steps = steps
    self._rewards = rewards or {'right': 0.75, 'form': 0.25}
    self.prompted, self.calls, self.ends = [], [], []

  def prompt(self, question):
    self.prompted.append(question.id)
    return question.text

  async def step(self, question, turn_index, text):
    self.calls.append((question.id, turn_index, text))
    return self._steps[text]

  def rewards(self, question, prompt, texts, status):
    self.ends.append((question.id, prompt, list(texts), status))
    return self._rewards, {'em': 1.0}


def observe(body, action='search', reward=0.0):
  """A step that answers [body]."""
  observation = protocol.Observation('[', body, ']')
  return protocol.Step(action, observation, None, reward)


def end(status, action='answer'):
  """A step that ends the trajectory."""
  return protocol.Step(action, None, status)


def question(text, question_id='q'):
  return types.Question(question_id, text, ('x',), 'nq')


def collect_scripts(
  scripts,
  environment,
  questions,
  *,
  tokenizer=None,
  max_length=100,
  max_turn_tokens=100,
  max_observation_tokens=100,
  group_size=1,
):
  """Trajectories in which the policy writes the texts of its script."""
  tokenizer = tokenizer or Letters()
  ids = [[tokenizer.encode_text(turn) for turn in turns] for turns in scripts]
  with event_loop.EventLoop() as loop:
    player = make_collector(
      scripted.ScriptedEngine(ids, max_length),
      environment,
      loop,
      tokenizer=tokenizer,
      max_turn_tokens=max_turn_tokens,
      max_observation_tokens=max_observation_tokens,
      group_size=group_size,
    )
    return player.collect(questions, keys=None)


def make_collector(
  engine,
  environment,
  loop,
  *,
  tokenizer=None,
  max_turn_tokens=100,
  max_observation_tokens=100,
  group_size=1,
):
  """A collector that cuts nothing."""
  return collect.Collector(
    engine=engine,
    environment=environment,
    tokenizer=tokenizer or Letters(),
    loop=loop,
    max_turn_tokens=max_turn_tokens,
    max_observation_tokens=max_observation_tokens,
    group_size=group_size,
  )


def letters(*scripts):
  """Scripts of `ScriptedEngine`, a text for each turn."""
  encode = Letters().encode_text
  return [[encode(text) for text in turns] for turns in scripts]
