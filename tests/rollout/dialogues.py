"""A tokenizer and an environment that are easy to follow by hand."""

from collections.abc import Mapping
import contextlib

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.envs import search
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.sampling import scripted


class Letters:
  """A tokenizer with a token for each character, its code point."""

  def encode_text(self, text, *, tags=()):
    return np.array([ord(letter) for letter in text], np.int32)

  def encode_prompt(self, text, *, tools=()):
    return self.encode_text(text)

  def neutralise(self, text):
    return text

  def decode(self, ids):
    return ''.join(map(chr, ids))


class TableEnvironment(protocol.Environment):
  """An environment that looks up its answer to a text in a table.

  Attributes:
    prompted: the question id of every call of `prompt`.
    calls: question id, turn index and text of every call of `step`.
    ends: question id, prompt, texts and status of every call of `rewards`.
  """

  max_turns = 2
  tags = ()

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


def search_environment(retriever, *, max_turns=2, **rewards):
  """Returns an environment that pays for right answers and what is named."""
  weights = dict.fromkeys(search.REWARD_NAMES, 0.0) | {'exact_match': 1.0}
  return search.SearchEnvironment(
    retriever=retriever,
    max_turns=max_turns,
    prompt_template='',
    rewards=weights | rewards,
    reward_scope='response',
  )


def observe(body, action='search', reward=0.0):
  """Returns a step with the observation [body]."""
  observation = protocol.Observation('[', body, ']')
  return protocol.Step(action, observation, None, reward)


def end(status, action='answer'):
  """Returns a step that ends the trajectory."""
  return protocol.Step(action, None, status)


def question(text, question_id='q', data_set='nq'):
  return types.Question(question_id, text, ('x',), data_set)


def turn(ids, logprobs, observation, reward=0.0):
  """Returns a turn that searches."""
  return types.Turn(
    np.array(ids, np.int32),
    np.array(logprobs, np.float32),
    np.array(observation, np.int32),
    'search',
    reward,
  )


def trajectory(
  turns=(),
  *,
  prompt=(1, 2),
  rewards=(),
  status=types.TrajectoryStatus.COMPLETED,
  **options,
):
  """Returns a trajectory; each of the turns has the arguments of `turn`."""
  return types.Trajectory(
    question=options.pop('question', question('why?')),
    prompt_ids=np.array(prompt, np.int32),
    turns=tuple(turn(*each) for each in turns),
    rewards=dict(rewards),
    status=status,
    **options,
  )


class Ready:
  """A retriever that is ready, which counts the waits, and its event loop."""

  waits = 0

  async def wait_until_ready(self):
    self.waits += 1

  def run(self, coroutine):
    with pytest.raises(StopIteration):
      coroutine.send(None)


# Larger than all texts of the tests.
_LIMITS = {'max_turn_tokens': 100, 'max_observation_tokens': 100}


def collect_scripts(
  scripts, environment, questions, *, max_length=100, **options
):
  """Returns trajectories in which row n writes the texts of scripts[n].

  The options are those of a collector; its limits are larger than all texts.
  """
  encode = options.get('tokenizer', Letters()).encode_text
  ids = [
    [encode(turn, tags=environment.tags) for turn in turns] for turns in scripts
  ]
  engine = scripted.ScriptedEngine(ids, max_length)
  with collector(engine, environment, **options) as made:
    return made.collect(questions, keys=None)


@contextlib.contextmanager
def collector(engine, environment, **options):
  """Yields a collector with an event loop; its limits exceed all texts."""
  with event_loop.EventLoop() as loop:
    yield make_collector(engine, environment, loop, **options)


def make_collector(engine, environment, loop, **options):
  """Returns a collector whose limits exceed all texts."""
  options = {'tokenizer': Letters(), **_LIMITS, **options}
  return collect.Collector(
    engine=engine, environment=environment, loop=loop, **options
  )


def letters(*scripts):
  """Returns scripts for `ScriptedEngine` from a text for each turn."""
  encode = Letters().encode_text
  return [[encode(text) for text in turns] for turns in scripts]
