"""The questions of a step are a function of the seed and the step."""

import dataclasses
import itertools
import json
import types

import pytest

from stppo_jax.data import questions as questions_lib
from stppo_jax.data import synthetic_wiki

_OPTIONS = {'entities_per_type': 8, 'name_pieces': 2, 'distractors': 0}


def _synthetic(seed=0, hops=(1, 2)):
  return questions_lib.SyntheticQuestions(
    seed=seed, world_seed=0, hops=hops, world_options=_OPTIONS
  )


def _worlds(questions):
  return {int(q.corpus.removeprefix('worlds/')) for q in questions}


def test_a_step_is_a_world_of_its_own():
  questions = _synthetic()
  steps = [questions.train(step, 10) for step in range(5)]
  assert steps == [_synthetic().train(step, 10) for step in range(5)]
  worlds = [_worlds(step) for step in steps]
  assert all(len(world) == 1 for world in worlds)
  assert len(set().union(*worlds)) == 5
  assert all(len({q.id for q in step}) == 10 for step in steps)


def test_worlds_of_training_demonstrations_and_evaluation_are_disjoint():
  limit = synthetic_wiki.NUM_EVALUATION_WORLDS
  last = 10**6 - limit - 1  # the last step of a run
  training = {}
  for seed, step in itertools.product((0, 1, 7), (0, 1, last)):
    (training[seed, step],) = _worlds(_synthetic(seed).train(step, 2))
  demonstrated = set()
  for seed, step in itertools.product((0, 1), (0, 1, last)):
    world, chains = _synthetic(seed).demonstration_chains(step, 2, hops=(1,))
    assert _worlds(chain.question for chain in chains) == {world.index}
    demonstrated.add(world.index)
  assert len(set(training.values())) == len(training)
  assert len(demonstrated) == 3  # the same for every seed
  assert not demonstrated & set(training.values())
  assert min(*training.values(), *demonstrated) >= limit
  evaluation = _synthetic().evaluation(4)
  assert _worlds(itertools.chain(*evaluation.values())) == {0}
  # No step lies in the worlds of another run.
  assert training[0, last] < training[1, 0]
  assert max(demonstrated) < training[0, 0]


@pytest.mark.parametrize('step', [-1, 10**6 - 1000])
def test_a_step_past_the_worlds_of_a_run_is_refused(step):
  with pytest.raises(ValueError, match=f'step {step}: .* at most 999000'):
    _synthetic().train(step, 1)


def _check_groups(evaluation, sizes):
  """Asserts that each group has so many questions, all of its data set."""
  assert {name: len(group) for name, group in evaluation.items()} == sizes
  for name, group in evaluation.items():
    assert {question.data_set for question in group} == {name}
    assert len({question.id for question in group}) == sizes[name]


def test_evaluation_is_the_same_for_every_seed():
  evaluation = _synthetic(0).evaluation(20)
  assert evaluation == _synthetic(5).evaluation(20)
  _check_groups(evaluation, {'one_hop': 20, 'two_hop': 20})
  assert _synthetic(0, hops=(2,)).evaluation(3).keys() == {'two_hop'}


def test_the_passages_are_those_of_the_questions_world():
  questions = _synthetic()
  assert questions.passages() is None
  (question,) = questions.train(3, 1)
  (world,) = _worlds([question])
  texts = {p.title: p.text for p in questions.world_passages(world)}
  name = question.id.split('/')[1]
  assert f'is {question.golden_answers[0]}' in texts[name]


def _record(question_id, data_set='nq'):
  return {
    'id': str(question_id),
    'dataset': data_set,
    'kind': 'open',
    'question': f'Q{question_id}?',
    'answers': ['x'],
  }


def _files(tmp_path, *, train=7, evaluation=(), seed=0):
  _write(tmp_path / 'train.jsonl', [_record(n) for n in range(train)])
  _write(tmp_path / 'evaluation.jsonl', evaluation)
  corpus = tmp_path / 'corpus.jsonl'
  corpus.write_text('{"id": "1", "contents": "\\"Title\\"\\nbody"}\n')
  found = 'evaluation.jsonl' if evaluation else ''
  return _load(tmp_path, seed=seed, evaluation=found, corpus='corpus.jsonl')


def _write(path, records):
  path.write_text('\n'.join(map(json.dumps, records)))


def _load(root, *, train='train.jsonl', evaluation='', corpus='', seed=0):
  data = dict(train=train, evaluation=evaluation, corpus=corpus)
  data = types.SimpleNamespace(name='jsonl', root=str(root), **data)
  return questions_lib.load(data, seed=seed)


@pytest.mark.parametrize('step', [0, 1, 4])
def test_resampling_rounds_of_a_file_share_no_question(tmp_path, step):
  questions = _files(tmp_path, train=12)
  rounds = [
    [q.id for q in questions.train(step, 3, resample_round=n)] for n in range(4)
  ]
  assert rounds[0] == [q.id for q in questions.train(step, 3)]
  assert sorted(sum(rounds, [])) == sorted(str(n) for n in range(12))
  other = questions.train(step + 4, 3, resample_round=1)  # of the next epoch
  assert [q.id for q in other] != rounds[1]
  with pytest.raises(ValueError, match='has 12 questions; .* needs 15'):
    questions.train(step, 3, resample_round=4)


def test_resampling_rounds_of_a_world_share_no_question():
  questions = _synthetic()
  rounds = [questions.train(2, 10, resample_round=n) for n in range(3)]
  assert rounds[0] == questions.train(2, 10)
  assert len({q.id for group in rounds for q in group}) == 30
  assert len(set.union(*map(_worlds, rounds))) == 1
  for group in rounds:  # the numbers of hops alternate in every round
    assert [q.data_set for q in group] == ['one_hop', 'two_hop'] * 5
  assert rounds[1] == _synthetic().train(2, 10, resample_round=1)
  options = _OPTIONS | {'entities_per_type': 2}
  small = dataclasses.replace(questions, world_options=options)
  with pytest.raises(ValueError, match='fewer than 80 questions'):
    small.train(2, 40, resample_round=1)


def test_evaluation_is_a_fixed_sample_of_each_data_set(tmp_path):
  records = [_record(n, 'nq' if n % 3 else 'popqa') for n in range(30)]
  questions = _files(tmp_path, evaluation=records, seed=3)
  sample = questions.evaluation(8)
  _check_groups(sample, {'nq': 8, 'popqa': 8})
  assert _files(tmp_path, evaluation=records, seed=4).evaluation(8) == sample
  # A sample, not the head of the file.
  assert [int(q.id) for q in sample['popqa']] != list(range(0, 24, 3))
  _check_groups(questions.evaluation(100), {'nq': 20, 'popqa': 10})
  assert _files(tmp_path).evaluation(8) == {}


def test_a_file_is_one_corpus(tmp_path):
  questions = _files(tmp_path)
  (passage,) = questions.passages()
  assert (passage.title, passage.text) == ('Title', 'body')
  with pytest.raises(LookupError, match='no world 3'):
    questions.world_passages(3)
  # Passages of another server cannot be read.
  with pytest.raises(ValueError, match="data.corpus=''"):
    _load(tmp_path).passages()


@pytest.mark.parametrize('count', [3, 10])
def test_resampling_rounds_of_a_weighted_mixture_share_no_question(
  tmp_path, count
):
  for name in 'ab':
    _write(tmp_path / f'{name}.jsonl', [_record(n, name) for n in range(30)])
  questions = _load(
    tmp_path,
    train='a.jsonl weight=3, b.jsonl weight=1 limit=20',
    evaluation='a.jsonl limit=5, b.jsonl limit=7',
  )
  for step in (0, 1, 40):
    rounds = [questions.train(step, count, resample_round=n) for n in range(4)]
    together = {(q.data_set, q.id) for q in sum(rounds, [])}
    assert len(together) == 4 * count
    assert rounds[2] == questions.train(step, count, resample_round=2)
  _check_groups(questions.evaluation(100), {'a': 5, 'b': 7})
