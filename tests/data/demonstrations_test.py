"""Demonstrations, collected in the real environment."""

import re

import numpy as np
import pytest

from stppo_jax import types
from stppo_jax.data import demonstrations as demonstrations_lib
from stppo_jax.data import questions as questions_lib
from stppo_jax.data import synthetic_wiki
from stppo_jax.envs import prompts
from stppo_jax.retrieval import fakes
from stppo_jax.retrieval.indexes import bm25
from stppo_jax.sampling import tokenizer as tokenizer_lib
from tests.rollout import dialogues

_OPTIONS = {'entities_per_type': 42, 'name_pieces': 2, 'distractors': 0}
_TOKENIZER = tokenizer_lib.phrase_tokenizer(
  prompts.phrases(synthetic_wiki.vocabulary())
)


def _demonstrations(
  hops=(1, 2),
  seed=0,
  error_rate=0.0,
  clean_one_hop_steps=0,
  clean_steps=0,
  **options,
):
  return demonstrations_lib.SyntheticDemonstrations(
    questions=questions_lib.SyntheticQuestions(
      seed=seed, world_seed=0, hops=hops, world_options=_OPTIONS
    ),
    noise=demonstrations_lib.Noise(
      seed, error_rate, clean_one_hop_steps + clean_steps
    ),
    one_hop_steps=clean_one_hop_steps,
    **options,
  )


def _collect(demonstrations, step, count):
  """Returns trajectories in the real environment with a real index."""
  batch = demonstrations.batch(step, count)
  (world,) = {question.corpus for question, _ in batch}
  passages = demonstrations.questions.world_passages(int(world.split('/')[1]))
  index = bm25.Bm25Index(passages)
  retriever = fakes.FakeRetriever(lambda query: index.search([query], 2)[0])
  environment = dialogues.search_environment(retriever, max_turns=4, format=2.0)
  return dialogues.collect_scripts(
    [turns for _, turns in batch],
    environment,
    [question for question, _ in batch],
    tokenizer=_TOKENIZER,
    max_length=1000,
  )


def _check_share(scores, expected):
  """Asserts that the mean of scores of 0 and 1 is within its noise."""
  deviation = np.sqrt(expected * (1 - expected) / len(scores))
  assert abs(np.mean(scores) - expected) < 3 * deviation + 0.01


def _queries(turns):
  return [re.search('<search> (.*)</search>', turn)[1] for turn in turns[:-1]]


@pytest.mark.parametrize('hops', [1, 2, 3])
def test_without_errors_every_answer_is_right_and_in_a_passage(hops):
  trajectories = _collect(_demonstrations((hops,)), step=3, count=64)
  assert {t.scores['em'] for t in trajectories} == {1.0}
  assert {t.reward for t in trajectories} == {3.0}  # well formed too
  for trajectory in trajectories:
    assert trajectory.status is types.TrajectoryStatus.COMPLETED
    actions = [turn.action for turn in trajectory.turns]
    assert actions == ['search'] * hops + ['answer']
    # The last search found a passage with the answer.
    found = _TOKENIZER.decode(trajectory.turns[-2].observation_ids)
    assert f' is {trajectory.question.golden_answers[0]}.' in found


def test_the_share_of_right_answers_follows_from_the_error_rate():
  # No turn may have an error; a few wrong facts still lead to the answer.
  rate = 0.3
  demonstrations = _demonstrations(error_rate=rate)
  right = {1: [], 2: []}
  for step in range(4):
    for trajectory in _collect(demonstrations, step, 80):
      hops = 1 + (trajectory.question.data_set == 'two_hop')
      right[hops].append(trajectory.scores['em'])
  for hops, scores in right.items():
    _check_share(scores, (1 - rate) ** (hops + 1))


@pytest.mark.parametrize(
  'repair_rate',
  [0.5, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.0, 1.0))],
)
def test_errors_of_the_first_turn_can_be_repaired(repair_rate):
  rate = 0.6
  demonstrations = _demonstrations(
    (1, 2, 3), error_rate=rate, error_turns=1, repair_rate=repair_rate
  )
  right = [
    trajectory.scores['em']
    for step in range(4)
    for trajectory in _collect(demonstrations, step, 90)
  ]
  # Half of the errors search for half a name, the other half do not search.
  _check_share(right, 1 - rate * (1 - repair_rate / 2))
  # Neither is there an error behind the first turn, nor a third query.
  for question, turns in demonstrations.batch(0, 90):
    queries = _queries(turns)
    halves = [query in synthetic_wiki.OPENINGS for query in queries]
    assert not any(halves[1:])
    hops = 1 + question.text.count(' of the ')
    assert len(queries) in {0, 1, hops, hops + any(halves)}


def test_every_kind_of_error_occurs():
  demonstrations = _demonstrations((2,), error_rate=0.3)
  searches, queries, misread = set(), [], 0
  for step in range(3):
    for question, turns in demonstrations.batch(step, 60):
      searches.add(len(turns) - 1)
      assert re.fullmatch('.*<answer> [A-Z][a-z]+</answer>', turns[-1])
      queries += _queries(turns)
      golden = f'<answer> {question.golden_answers[0]}</answer>'
      misread += len(turns) == 3 and golden not in turns[-1]
  assert searches == {0, 1, 2}
  half = sum(query in synthetic_wiki.OPENINGS for query in queries)
  # 0.15 of the decisions search for half a name, 0.7 for a full one.
  assert 0.12 < half / len(queries) < 0.24
  assert misread > 5


def test_the_first_steps_have_no_errors_and_before_that_one_hop():
  demonstrations = _demonstrations(
    (1, 2), error_rate=1.0, clean_one_hop_steps=2, clean_steps=3
  )
  for step in range(7):
    batch = demonstrations.batch(step, 8)
    data_sets = {question.data_set for question, _ in batch}
    assert data_sets == ({'one_hop'} if step < 2 else {'one_hop', 'two_hop'})
    for question, turns in batch:
      assert (question.golden_answers[0] in turns[-1]) == (step < 5)


@pytest.mark.parametrize('error_rate', [0.0, 0.3])
def test_think_words_change_only_the_thought(error_rate):
  plain, wordy = (
    _demonstrations((1,), error_rate=error_rate, think_words=n).batch(0, 8)
    for n in (0, 5)
  )
  thought = re.compile('<think>(.*?)</think>')
  words = [word.strip() for word in synthetic_wiki.FILLER_WORDS]
  plain, wordy = ([x for _, turns in y for x in turns] for y in (plain, wordy))
  for turn in plain:  # only the text of the next action
    assert len(thought.match(turn)[1].split()) <= 2
  for turn in wordy:
    head = thought.match(turn)[1].split()[:5]
    assert len(head) == 5 and set(head) <= set(words)
  if not error_rate:  # the words are drawn from the stream of the errors
    actions = [[thought.sub('', turn) for turn in x] for x in (plain, wordy)]
    assert actions[0] == actions[1]


def test_a_step_is_always_the_same():
  demonstrations = _demonstrations(error_rate=0.3)
  one = demonstrations.batch(5, 16)
  assert _demonstrations(error_rate=0.3).batch(5, 16) == one
  assert demonstrations.batch(6, 16) != one
  other = _demonstrations(error_rate=0.3, seed=1).batch(5, 16)
  assert [q for q, _ in other] == [q for q, _ in one]  # other errors
  assert other != one
