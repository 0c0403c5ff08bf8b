"""Collecting a step: which groups are replaced, and with which keys.

There are four groups of two trajectories. A letter stands for the rewards of
a group: 'v' different ones (varied), '=' equal ones (uniform), 'x' none,
because the infrastructure failed them, 'h' half of them.
"""

import types as types_lib

import jax
import numpy as np
import pytest

from stppo_jax import keys
from stppo_jax import types
from stppo_jax.envs import search
from stppo_jax.rollout import steps
from stppo_jax.training import components
from stppo_jax.training import model_files
from tests.rollout import dialogues
from tests.training import runs

_STATUS = types.TrajectoryStatus
_REWARDS = {
  'v': (0.0, 1.0),
  '=': (1.0, 1.0),
  'x': (None, None),
  'h': (0.5, None),
}
_STEP = 5


class _World(dialogues.Ready):
  """A fake of questions, collector, retriever and event loop in one.

  Attributes:
    asked: (step, count, resample_round) of each round of questions.
    keys: bits of the keys of each collection.
    waits: the number of waits for the retriever.
  """

  def __init__(self, *rounds):
    self._rounds = list(rounds)
    self.asked, self.keys = [], []
    self.collected = []
    self._queries = 0
    self.questions = self.retriever = self.loop = self
    self.environment = search.SearchEnvironment

  def train(self, step, count, *, resample_round):
    self.asked.append((step, count, resample_round))
    return [
      types.Question(f'{resample_round}{n}', '?', ('x',), 'nq')
      for n in range(count)
    ]

  def collect(self, questions, row_keys):
    self._queries += 1
    self.keys.append(np.asarray(jax.random.key_data(row_keys)).tolist())
    self.collected.append(' '.join(question.id for question in questions))
    collected = self._rounds.pop(0)
    return [
      _trajectory(question, reward)
      for question, letter in zip(questions, collected, strict=True)
      for reward in _REWARDS[letter]
    ]

  def statistics(self):
    queries, self._queries = self._queries, 0
    return {'retrieval/ok': queries}


def _trajectory(question, reward):
  score = 0.0 if reward is None else reward
  return dialogues.trajectory(
    question=question,
    rewards={'exact_match': score},
    status=_STATUS.INFRA_ERROR if reward is None else _STATUS.COMPLETED,
    scores={'em': score},
  )


def _collect(world, rounds, refill_rounds=0):
  """Returns (question id of each group, metrics) of a step."""
  trajectories, metrics = _collect_rows(world, rounds, refill_rounds)
  ids = [trajectory.question.id for trajectory in trajectories]
  assert ids[::2] == ids[1::2]
  return ids[::2], metrics


def _collect_rows(world, rounds, refill_rounds):
  config = runs.config(
    rollout__trajectories_per_step=8,
    rollout__group_size=2,
    rollout__resample_rounds=rounds,
    rollout__min_valid_fraction=0.5,
    rollout__refill_rounds=refill_rounds,
  )
  sampler = types_lib.SimpleNamespace(
    collect=world.collect,
    statistics=lambda: {'engine/ok': 7.0},
    finish=lambda: None,
  )
  collector = steps.StepCollector(config, world, sampler)
  return collector.collect(_STEP)


@pytest.mark.parametrize(
  ('rounds', 'collected', 'expected', 'replaced'),
  [
    (0, ['v==v'], '00 01 02 03', 0),
    # Nothing to replace: no round.
    (3, ['vvvv'], '00 01 02 03', 0),
    # In place, as many as needed, in the order of the questions.
    (3, ['v==v', '=vvv'], '00 11 12 03', 2),
    # Another round for what is left.
    (3, ['v===', '==v=', 'v==v'], '00 12 20 23', 3),
    # Out of rounds: the uniform ones collected last fill the places.
    (1, ['=v==', '=v=='], '11 01 13 12', 1),
    (2, ['====', '===v', '===='], '13 23 22 21', 1),
    # Failed rows are no sign of a lack of variance.
    (1, ['x=vv', 'v==='], '00 10 02 03', 1),
  ],
)
def test_uniform_groups_are_replaced(rounds, collected, expected, replaced):
  world = _World(*collected)
  ids, metrics = _collect(world, rounds)
  assert ids == expected.split()
  used = len(collected) - 1
  assert metrics['rollout/resampled_groups'] == replaced
  assert metrics['rollout/resample_rounds'] == used
  assert world.asked == [(_STEP, 4, n) for n in range(used + 1)]
  # The metrics of the step describe its first questions.
  valid = collected[0].replace('x', '')
  uniform = valid.count('=') / len(valid)
  assert metrics['rollout/zero_variance_groups'] == uniform
  assert metrics['train/em/nq'] == pytest.approx(0.5 + 0.5 * uniform)
  assert metrics['rollout/valid_fraction'] == len(valid) / 4
  assert metrics['retrieval/ok'] == used + 1
  assert metrics['engine/ok'] == 7


def test_keys_depend_on_step_and_round():
  first, again = _World('====', '====', '===='), _World('====', '====', '====')
  _collect(first, 2)
  _collect(again, 2)
  assert first.keys == again.keys
  bits = [tuple(key) for collected in first.keys for key in collected]
  assert len(set(bits)) == len(bits) == 3 * 8
  # The first round has the keys of a step without resampling.
  key = keys.step_key(runs.config().seed, _STEP, keys.Purpose.COLLECT)
  own = np.asarray(jax.random.key_data(keys.row_keys(key, 0, 8))).tolist()
  assert first.keys[0] == own


def test_a_round_in_an_outage_is_collected_again(said):
  world = _World('v=v=', 'xxxv', 'xxxx', 'v=v=')
  ids, metrics = _collect(world, 1)
  assert ids == '00 10 02 12'.split()
  assert world.waits == 2 and world.keys[1] == world.keys[2] == world.keys[3]
  failed = 'step 6: 6 of 8 trajectories failed because of the infrastructure; '
  assert said[0].startswith(f'{failed}the first cause: not known; all ')
  assert metrics['rollout/valid_fraction'] == 1.0
  assert metrics['rollout/resample_rounds'] == 1


@pytest.mark.parametrize(
  ('rounds', 'collected', 'refilled'),
  [
    # Nothing failed, and nothing is collected again.
    (2, ['v=v='], 0),
    (0, ['vx=v'], 0),
    # Only what failed is, in as many rounds as it takes and as there are.
    (1, ['vx=v', 'v'], 2),
    (2, ['xxv=', 'vx', '='], 4),
    (2, ['xxv=', 'vx', 'x'], 2),
    (1, ['h=v=', 'v'], 1),
  ],
)
def test_failed_rows_are_collected_again(said, rounds, collected, refilled):
  world = _World(*collected)
  trajectories, metrics = _collect_rows(world, 0, refill_rounds=rounds)
  ids = [trajectory.question.id for trajectory in trajectories]
  assert ids == '00 00 01 01 02 02 03 03'.split()
  assert metrics['rollout/refilled_rows'] == refilled
  num_failed = sum({'x': 2, 'h': 1}.get(letter, 0) for letter in collected[0])
  valid = 1 - (num_failed - refilled) / 8
  assert metrics['rollout/valid_fraction'] == valid
  if 'h' in collected[0]:
    # `h` has the rewards 0.5 and none, and keeps the first; `v` has 0 and 1.
    assert [t.reward for t in trajectories[:2]] == [0.5, 1.0]
  # What is collected again has the keys that it had.
  first = dict(zip(world.collected[0].split(), _pairs(world.keys[0])))
  for names, row_keys in zip(world.collected[1:], world.keys[1:], strict=True):
    assert [first[name] for name in names.split()] == _pairs(row_keys)
  line = f'step 6: {refilled} of {num_failed} failed trajectories were refilled'
  assert (line in said) == bool(rounds and num_failed)


def _pairs(row_keys):
  """Returns the keys of each group of two trajectories."""
  return list(zip(row_keys[::2], row_keys[1::2], strict=True))


def test_a_lasting_outage_ends_the_step():
  world = _World('v=v=', 'xxxx', 'xxxx', 'xxxx')
  with pytest.raises(
    steps.Outage, match='step 6: collected 3 times; .*8 of 8 '
  ):
    _collect(world, 1)
  assert world.waits == 3


@pytest.mark.parametrize('level', ['token', 'sentence'])
def test_only_ratios_of_sentences_need_a_splitter(level):
  config = runs.config()
  config.algorithm.ratio.level = level
  questions = components.build_questions(config)
  tokenizer = model_files.build_tokenizer(config, questions)
  split = steps.build_sentences(config, tokenizer)
  assert (split is None) == (level == 'token')
  if split:
    ids = tokenizer.encode_text('done. find it.\n')
    assert split(ids).max() > 1
