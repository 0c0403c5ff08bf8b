"""An environment outside the package, from its options to its metrics."""

import sys

import pytest

from stppo_jax import types
from stppo_jax.configs import base
from stppo_jax.envs import environments
from stppo_jax.envs import protocol
from stppo_jax.envs import search
from stppo_jax.rollout import collect
from stppo_jax.rollout import pack
from stppo_jax.rollout import steps
from stppo_jax.sampling import scripted
from stppo_jax.sampling import stops
from stppo_jax.training import components
from stppo_jax.training import model_files

_STATUS = types.TrajectoryStatus


class _Guessing(protocol.Environment):
  """An environment in which a number is guessed, without a retriever."""

  stop_strings = ('!',)
  tags = ('!',)
  main_score = 'guessed'
  needs_retriever = False

  def __init__(self, max_guesses):
    self._max_guesses = max_guesses

  @classmethod
  def from_options(cls, options, retriever):
    assert retriever is None
    return cls(options['max_turns'])

  @staticmethod
  def phrases(vocabulary):
    return ['Guess', '!', *vocabulary]

  @staticmethod
  def statistics(trajectories):
    guesses = [len(trajectory.turns) for trajectory in trajectories]
    return {'env/guesses': sum(guesses) / len(guesses)}

  def prompt(self, question):
    return f'Guess {question.text}'

  async def step(self, question, turn_index, text):
    if not text.endswith('!'):
      return protocol.Step(protocol.INVALID, None, _STATUS.TRUNCATED_LENGTH)
    if text == f'{question.golden_answers[0]}!':
      return protocol.Step('guess', None, _STATUS.COMPLETED)
    if turn_index + 1 == self._max_guesses:
      return protocol.Step('guess', None, _STATUS.TRUNCATED_TURNS)
    wrong, right = int(text[:-1]), int(question.golden_answers[0])
    hint = 'more' if right > wrong else 'less'
    return protocol.Step('guess', protocol.Observation(' ', hint, ' '), None)

  def rewards(self, question, prompt, texts, status):
    right = texts[-1] == f'{question.golden_answers[0]}!'
    return {'right': float(right)}, {'guessed': float(right)}


class _Numbers:
  """A data set with two questions a step."""

  def train(self, step, count, *, resample_round):
    return [
      types.Question(str(n), 'a digit', (answer,), 'digits')
      for n, answer in zip(range(count), '37', strict=True)
    ]


_SCRIPTS = (['5!', '3!'], ['5!', '4!'], ['7!'], ['6'])


@pytest.fixture
def config(monkeypatch):
  monkeypatch.setitem(environments.ENVIRONMENTS, 'guessing', _Guessing)
  config = base.get_config('grpo')
  config.env.name = 'guessing'
  config.env.max_turns = 2
  config.rollout.update(trajectories_per_step=4, group_size=2)
  return config


def test_a_class_in_the_table_is_a_whole_environment(config):
  questions = _Numbers()
  tokenizer = model_files.build_tokenizer(config, questions)
  with components.build_services(config, questions) as services:
    assert services.retriever is None
    collector = collect.Collector(
      engine=scripted.ScriptedEngine(
        [[tokenizer.encode_text(text) for text in turns] for turns in _SCRIPTS],
        config.env.max_length,
      ),
      environment=services.environment,
      tokenizer=tokenizer,
      loop=services.loop,
      max_turn_tokens=config.env.max_turn_tokens,
      max_observation_tokens=config.env.max_observation_tokens,
      group_size=config.rollout.group_size,
    )
    step_collector = steps.StepCollector(config, services, collector)
    trajectories, metrics = step_collector.collect(0)
  assert [t.status for t in trajectories] == [
    _STATUS.COMPLETED,
    _STATUS.TRUNCATED_TURNS,
    _STATUS.COMPLETED,
    _STATUS.TRUNCATED_LENGTH,
  ]
  observation_ids = trajectories[0].turns[0].observation_ids
  assert tokenizer.decode(observation_ids) == ' less '
  named = {
    'critic/score/mean': 0.5,
    'reward/right/mean': 0.5,
    'score/guessed/mean': 0.5,
    'train/guessed/digits': 0.5,
    'env/guesses': 1.5,
    'env/ratio_of_valid_action': 5 / 6,
    'env/finish_ratio': 0.5,
  }
  assert {name: metrics[name] for name in named} == pytest.approx(named)
  assert not any(name.startswith('retrieval/') for name in metrics)
  assert 'env/number_of_valid_search' not in metrics
  batch = pack.pack(trajectories, length_bucket=8)
  written = [sum(len(turn.token_ids) for turn in t.turns) for t in trajectories]
  assert batch.loss_mask_BL.sum(axis=1).tolist() == written
  assert batch.rewards_BL.sum(axis=1).tolist() == [1, 0, 1, 0]


def test_turns_end_at_the_stop_strings_of_the_environment(config):
  tokenizer = model_files.build_tokenizer(config, _Numbers())
  automaton = stops.build(
    tokenizer.token_bytes(),
    stop_strings=environments.find(config.env.name).stop_strings,
    eos_ids=(tokenizer.eos_id,),
  )
  states = [
    automaton.next_state_ZV[automaton.START, tokenizer.encode_text(text)[0]]
    for text in ('!', '</search>')
  ]
  assert [state == automaton.stopped for state in states] == [True, False]


def test_an_unknown_name_prints_the_choices():
  assert environments.find('search') is search.SearchEnvironment
  with pytest.raises(ValueError, match="'go'; choices: .*search"):
    environments.find('go')


def test_a_missing_package_is_named_with_its_command(monkeypatch):
  monkeypatch.setitem(sys.modules, 'textworld', None)
  with pytest.raises(ValueError, match=r'pip install .*\[textworld\]'):
    environments.find('textworld').phrases([])
