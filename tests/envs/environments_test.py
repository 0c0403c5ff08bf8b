"""An environment outside the package, from its options to its metrics."""

import sys

import pytest

from stppo_jax import types
from stppo_jax.configs import base
from stppo_jax.envs import environments
from stppo_jax.envs import protocol
from stppo_jax.rollout import collect
from stppo_jax.rollout import steps
from stppo_jax.sampling import scripted
from stppo_jax.training import components
from stppo_jax.training import model_files

_STATUS = types.TrajectoryStatus


class _Guessing(protocol.Environment):
  """An environment in which a number is guessed, without a retriever."""

  stop_strings = ('!',)
  tags = ('!',)
  main_score = 'guessed'
  needs_retriever = False

  @classmethod
  def from_options(cls, options, retriever):
    assert retriever is None and options['name'] == 'guessing'
    return cls()

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
    if text in question.golden_answers:
      return protocol.Step('guess', None, _STATUS.COMPLETED)
    if turn_index:
      return protocol.Step('guess', None, _STATUS.TRUNCATED_TURNS)
    return protocol.Step('guess', protocol.Observation(' ', 'no', ' '), None)

  def rewards(self, question, prompt, texts, status):
    right = float(texts[-1] in question.golden_answers)
    return {'right': right}, {'guessed': right}


class _Numbers:
  """A data set with two questions a step."""

  def train(self, step, count, *, resample_round):
    return [
      types.Question(str(n), 'a digit', (answer,), 'digits')
      for n, answer in zip(range(count), ('3!', '7!'), strict=True)
    ]


_SCRIPTS = (['5!', '3!'], ['5!', '4!'], ['7!'], ['6!', '7!'])


def test_a_class_in_the_table_is_a_whole_environment(monkeypatch):
  monkeypatch.setitem(environments.ENVIRONMENTS, 'guessing', _Guessing)
  config = base.get_config('grpo')
  config.env.name = 'guessing'
  config.rollout.update(trajectories_per_step=4, group_size=2)
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
  ends = [t.status is _STATUS.COMPLETED for t in trajectories]
  assert ends == [True, False, True, True]
  observation_ids = trajectories[0].turns[0].observation_ids
  assert tokenizer.decode(observation_ids) == ' no '
  named = {
    'critic/score/mean': 0.75,
    'reward/right/mean': 0.75,
    'score/guessed/mean': 0.75,
    'train/guessed/digits': 0.75,
    'env/guesses': 7 / 4,
    'env/finish_ratio': 0.75,
  }
  assert {name: metrics[name] for name in named} == pytest.approx(named)
  assert not any(name.startswith('retrieval/') for name in metrics)
  assert 'env/number_of_valid_search' not in metrics


def test_a_missing_package_is_named_with_its_command(monkeypatch):
  monkeypatch.setitem(sys.modules, 'textworld', None)
  with pytest.raises(ValueError, match=r'pip install .*\[textworld\]'):
    environments.find('textworld').phrases([])
