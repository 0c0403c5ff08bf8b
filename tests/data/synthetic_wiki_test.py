"""Questions can be solved from the passages and from nothing else."""

import re

import pytest

from stppo_jax.data import synthetic_wiki
from stppo_jax.retrieval.indexes import bm25

_OPTIONS = {'entities_per_type': 12, 'name_pieces': 2, 'distractors': 0}


def _world(index, seed=0, **changes):
  return synthetic_wiki.make_world(seed, index, **(_OPTIONS | changes))


def _read(text):
  """Returns the name, type and facts in the text of a passage."""
  head = re.match(r'(\w+) is a (\w+)\.', text)
  facts = dict(re.findall(r'Its (\w+) is (\w+)\.', text))
  return head[1], head[2], facts


def _asked(text):
  """Returns the name in a question and its relations, in order."""
  path, name = re.fullmatch(
    r'(?:Who is|What is|Name|Tell me) the (.*) of (\w+)[.?]', text
  ).groups()
  return name, path.split(' of the ')[::-1]


def test_a_world_is_a_function_of_its_seed_and_index():
  assert _world(1234) == _world(1234)
  names = set(_world(1234).entities)
  assert names != set(_world(1235).entities)
  assert names != set(_world(1234, seed=1).entities)
  # Facts are drawn anew even where a name comes again.
  again = [
    (world.entities[name].facts, _world(1234).entities[name].facts)
    for world in map(_world, range(2000, 2100))
    for name in names & set(world.entities)
  ]
  assert len(again) > 20 and all(one != other for one, other in again)


def test_names_of_evaluation_worlds_are_kept_for_them():
  limit = synthetic_wiki.NUM_EVALUATION_WORLDS
  evaluation, training = (
    set().union(*(_world(index).entities for index in indices))
    for indices in (
      [*range(50), limit - 1],
      [*range(limit, limit + 50), 10**6, 10**7],
    )
  )
  assert len(evaluation) > 500 and len(training) > 500
  assert not evaluation & training
  assert all(map(synthetic_wiki.is_evaluation_name, evaluation))
  assert not any(map(synthetic_wiki.is_evaluation_name, training))


@pytest.mark.parametrize('hops', [1, 2])
def test_the_answer_follows_from_the_passages_alone(hops):
  world = _world(1001)
  texts = [passage.text for passage in world.passages()]
  facts_of = {name: facts for name, _, facts in map(_read, texts)}
  type_of = {name: kind for name, kind, _ in map(_read, texts)}
  assert len(facts_of) == 5 * 12
  for chain in world.chains(60, hops=(hops,)):
    start, relations = _asked(chain.question.text)
    assert (start, tuple(relations)) == (chain.start, chain.relations)
    assert len(relations) == hops
    answer = start
    for relation in relations:
      answer = facts_of[answer][relation]
    assert chain.question.golden_answers == (answer,)
    assert answer != start  # not in the question
    # The first word fits the type of the answer.
    first = chain.question.text.split()[0]
    if first in ('Who', 'What'):
      assert (first == 'Who') == (type_of[answer] == 'person')


def test_questions_are_different_and_hops_alternate():
  chains = _world(1003).chains(100, hops=(1, 2))
  assert [len(chain.relations) for chain in chains] == [1, 2] * 50
  for attribute in ('id', 'text'):
    assert len({getattr(c.question, attribute) for c in chains}) == 100
  assert {c.question.data_set for c in chains[::2]} == {'one_hop'}
  assert {c.question.data_set for c in chains[1::2]} == {'two_hop'}
  assert {c.question.corpus for c in chains} == {'worlds/1003'}
  again = _world(1003).chains(100, hops=(1, 2))
  assert again == chains


def test_more_questions_than_there_are_is_refused():
  world = _world(1004, entities_per_type=2)  # 5 types of 2 with 3 facts
  assert len(world.chains(30, hops=(1,))) == 30
  with pytest.raises(ValueError, match='world 1004 has fewer than 31 .*raise'):
    world.chains(31, hops=(1,))


def test_distractors_are_there_and_no_fact_points_to_them():
  world = _world(1005, distractors=25)
  names = list(world.entities)
  assert len(names) == len(world.passages()) == 5 * 12 + 25
  targets = {x for e in world.entities.values() for x in e.facts.values()}
  assert not targets & set(names[-25:])
  assert len(targets & set(names[:-25])) > 40
  assert len({world.entities[name].type for name in names[-25:]}) > 1


@pytest.mark.parametrize('pieces', [2, 3, 4])
def test_names_are_composed_of_pieces(pieces):
  opening = '|'.join(synthetic_wiki.OPENINGS)
  ending = '|'.join(synthetic_wiki.ENDINGS)
  pattern = re.compile(f'({opening})(?:{ending}){{{pieces - 1}}}')
  for name in _world(1006, name_pieces=pieces).entities:
    match = pattern.fullmatch(name)
    assert match and synthetic_wiki.first_piece(name) == match[1]
  assert len({*synthetic_wiki.OPENINGS, *synthetic_wiki.ENDINGS}) == 128


def test_more_names_than_the_pieces_can_form_are_refused():
  # There are 64 names of one piece; a quarter of them is for evaluation.
  with pytest.raises(ValueError, match='cannot form 40 names of 1 pieces'):
    _world(7, entities_per_type=8, name_pieces=1)


@pytest.mark.parametrize(
  'changes', [{'distractors': 100}, {'entities_per_type': 42}]
)
def test_a_name_finds_its_own_passage(changes):
  # 100 % of the entities, at the first place even; two are shown.
  world = _world(0, **changes)
  index = bm25.Bm25Index(world.passages())
  names = list(world.entities)
  for name, found in zip(names, index.search(names, topk=2)):
    assert found[0].id == name and found[0].text.startswith(f'{name} is a ')
  # Half a name finds nothing, and neither do the words of a question.
  openings = [synthetic_wiki.first_piece(name) for name in names]
  assert not any(index.search(openings, topk=2))
