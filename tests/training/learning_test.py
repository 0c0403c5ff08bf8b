"""Every algorithm learns: a few updates raise the reward on other questions.

The start is the weak model of the quickstart, which answers a quarter of the
one-hop questions when it is sampled. All algorithms are updated on the same
dialogues, and measured on the same questions with the same random numbers.
"""

import types as python_types

import jax
import numpy as np
import pytest

from stppo_jax.commands.flags import configuration
from stppo_jax.configs import algorithms
from stppo_jax.rollout import steps
from stppo_jax.training import build
from stppo_jax.training import components
from stppo_jax.training import engines
from stppo_jax.training import model_files
from tests.training import runs

_UPDATES = 8
# The share of right answers among 128 has a standard deviation of 0.04.
_MARGIN = 0.06
_CONFIG = {
  'rollout.group_size': 8,
  'rollout.resample_rounds': 0,
  'rollout.trajectories_per_step': 128,
  'updates.minibatch_size': 32,
  'updates.core_rows': 0,
  'model.scan_unroll': 1,  # compiles in a third of the time
  'data.synthetic_wiki.hops': '(1,)',
  'policy_optimizer.learning_rate': 5e-4,
  'policy_optimizer.warmup_updates': 0,
  'value_optimizer.warmup_updates': 0,
}
_GAINS = {'env.rewards.information_gain': 1.0}
# What the descriptions of these algorithms ask for.
_OWN = {
  'igpo': _GAINS,
  'a2tgpo': _GAINS,
  # Dialogues have some 16 policy tokens. With its alpha of 0.05, lambda would
  # be 0, and it would learn by imitation alone, whatever the advantages are.
  'vapo': {'algorithm.advantage.alpha': 1.0},
}


def _config(algorithm):
  changes = _CONFIG | _OWN.get(algorithm, {})
  return configuration.parse(
    [f'--config={runs.REPO}/configs/quickstart.py:{algorithm}']
    + [f'--config.{key}={value}' for key, value in changes.items()]
  )


def _parts(config):
  """Returns questions, tokenizer, learner and placement, on one device."""
  questions = components.build_questions(config)
  tokenizer = model_files.build_tokenizer(config, questions)
  devices = jax.devices()[:1]
  mesh = components.build_mesh(config, devices)
  shape = model_files.build_model_config(config, tokenizer, mesh)
  learner, placement = components.build_learner(config, shape, mesh, devices)
  return questions, tokenizer, learner, placement


@pytest.fixture(scope='module')
def start():
  """The start of all algorithms.

  It has the tokenizer, the dialogues that all are updated on, the share of
  right answers to other questions, the frozen reference, and a function that
  returns the dialogues of a step of a state's policy.
  """
  config = _config('token_ppo')
  questions, tokenizer, learner, placement = _parts(config)
  with components.build_services(config, questions) as services:
    shared = config, services, tokenizer
    engine = engines.build(*shared, learner.decoded, placement)
    dialogues = engines.build_collector(*shared, engine, group_size=8)
    collector = steps.StepCollector(config, services, dialogues)

    def sampled(state, step):
      engines.publish(engine, learner, state.params, 0)
      return collector.collect(step)[0]

    trajectories, others = (sampled(learner.start(), n) for n in (0, 1))
    yield python_types.SimpleNamespace(
      tokenizer=tokenizer,
      trajectories=trajectories,
      before=_right(others),
      reference=learner.reference(),
      sampled=sampled,
    )


def _right(trajectories):
  """Returns the share of right answers."""
  return np.mean([t.rewards['exact_match'] for t in trajectories])


def _updated(algorithm, start, *, sign):
  """Returns the policy after some updates with the advantages times a sign."""
  config = _config(algorithm)
  _, _, learner, _ = _parts(config)
  state = learner.start()
  packed, _ = build.pack_step(
    start.trajectories,
    state,
    0,
    config=config,
    tokenizer=start.tokenizer,
    learner=learner,
    sentences=steps.build_sentences(config, start.tokenizer),
  )
  batch, _ = learner.annotate(state, packed, reference=start.reference)
  batch = batch.replace(advantages_BL=sign * batch.advantages_BL)
  count = len(start.trajectories)
  for rows in learner.minibatches(count, 0, num_updates=_UPDATES):
    state, _ = learner.update(state, batch, rows, 0)
  return state


# A program of the update for each, which takes some ten seconds.
@pytest.mark.slow
@pytest.mark.parametrize(
  ('algorithm', 'sign'),
  [
    *((name, 1) for name in algorithms.ALGORITHMS),
    # With negated advantages, it answers fewer.
    *((name, -1) for name in ('st_ppo', 'atpo', 'vapo')),
  ],
)
def test_it_answers_more_questions_than_its_start(algorithm, sign, start):
  after = _right(start.sampled(_updated(algorithm, start, sign=sign), 1))
  assert sign * (after - start.before) > _MARGIN
