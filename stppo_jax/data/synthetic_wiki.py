"""A synthetic encyclopedia: worlds of made-up entities and questions on them.

A world has entities of five types. Their names are composed of sub-word pieces,
so an answer has to be copied from a passage. Facts are drawn anew for every
world, so they cannot be memorised. The worlds with an index below
NUM_EVALUATION_WORLDS are for evaluation. The names of their entities never
occur in a training world: a hash of a name decides which of the two kinds of
worlds may use the name.
"""

from collections.abc import Sequence
import dataclasses
import zlib

import numpy as np

from stppo_jax import types

NUM_EVALUATION_WORLDS = 1000

# Entity type -> relation -> type of the entity that the relation points to.
RELATIONS = {
  'person': {'birthplace': 'city', 'employer': 'company', 'mentor': 'person'},
  'film': {'director': 'person', 'setting': 'city', 'producer': 'company'},
  'city': {'mayor': 'person', 'country': 'country', 'twin': 'city'},
  'company': {
    'founder': 'person',
    'headquarters': 'city',
    'rival': 'company',
  },
  'country': {
    'capital': 'city',
    'president': 'person',
    'neighbour': 'country',
  },
}

# The field {who} becomes "Who" or "What", {path} the chain of relations, such
# as "mayor of the birthplace", and {name} the name of the first entity.
_TEMPLATES = (
  '{who} is the {path} of {name}?',
  'Name the {path} of {name}.',
  'Tell me the {path} of {name}.',
)

_CONSONANTS = 'bdfgklmnprstvz'
_VOWELS = 'aeiou'
_NUM_PIECES = 64  # the number of openings, and also of endings
_EVALUATION_SHARE = 4  # one name in four belongs to the evaluation worlds

# The number of facts that lead to the answer -> the data set of the question.
_HOP_NAMES = {1: 'one_hop', 2: 'two_hop', 3: 'three_hop'}


def _pieces() -> tuple[list[str], list[str]]:
  """Returns all openings ('Bam') and endings ('kol') of names.

  The pieces are the same in every world of every seed.
  """
  syllables = [
    a + v + b for a in _CONSONANTS for v in _VOWELS for b in _CONSONANTS
  ]
  order = np.random.default_rng(7).permutation(len(syllables))
  chosen = [syllables[i] for i in order[: 2 * _NUM_PIECES]]
  openings = [piece.capitalize() for piece in chosen[:_NUM_PIECES]]
  return openings, chosen[_NUM_PIECES:]


OPENINGS, ENDINGS = _pieces()


@dataclasses.dataclass(frozen=True)
class Entity:
  """An entity with its type and its facts.

  Attributes:
    name: the name of the entity, which is unique in its world.
    type: a key of RELATIONS.
    facts: a dict from each relation to the name of the entity that the relation
      points to.
  """

  name: str
  type: str
  facts: dict[str, str]

  @property
  def text(self) -> str:
    """The passage about the entity: a sentence on its type, then its facts."""
    facts = ''.join(f'. Its {r} is {name}' for r, name in self.facts.items())
    return f'{self.name} is a {self.type}{facts}.'


@dataclasses.dataclass(frozen=True)
class Chain:
  """A question, and the relations from the entity `start` to the answer."""

  question: types.Question
  start: str
  relations: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class World:
  """A world: its index and its entities by name."""

  index: int
  entities: dict[str, Entity]

  @property
  def corpus(self) -> str:
    """The path of this world's passages on the retrieval server."""
    return f'worlds/{self.index}'

  def passages(self) -> list[types.Passage]:
    """Returns one passage per entity."""
    return [
      types.Passage(id=entity.name, title=entity.name, text=entity.text)
      for entity in self.entities.values()
    ]

  def chains(self, count: int, *, hops: Sequence[int]) -> list[Chain]:
    """Returns `count` different chains, with each number of `hops` in turn.

    Raises:
      ValueError: if too few different chains are found.
    """
    rng = np.random.default_rng((0, self.index, 1))
    names = list(self.entities)
    seen, chains = set(), []
    # Random draws repeat questions. After 100 draws for each question, the
    # world is taken to have no more different questions.
    for _ in range(100 * count):
      if len(chains) == count:
        return chains
      start = names[rng.integers(len(names))]
      path, entity = [], self.entities[start]
      for _ in range(hops[len(chains) % len(hops)]):
        path.append(list(entity.facts)[rng.integers(len(entity.facts))])
        entity = self.entities[entity.facts[path[-1]]]
      template = _TEMPLATES[rng.integers(len(_TEMPLATES))]
      if (start, *path) not in seen and entity.name != start:
        seen.add((start, *path))
        chains.append(self._chain(start, tuple(path), entity, template))
    raise ValueError(
      f'world {self.index} has fewer than {count} questions of '
      f'{tuple(hops)} hops; raise data.synthetic_wiki.entities_per_type'
    )

  def _chain(self, start, path, answer, template) -> Chain:
    text = template.format(
      who='Who' if answer.type == 'person' else 'What',
      path=' of the '.join(reversed(path)),
      name=start,
    )
    question = types.Question(
      id=f'{self.index}/{start}/{"/".join(path)}',
      text=text,
      golden_answers=(answer.name,),
      data_set=_HOP_NAMES[len(path)],
      corpus=self.corpus,
    )
    return Chain(question, start, path)


def make_world(
  seed: int,
  index: int,
  *,
  entities_per_type: int,
  name_pieces: int,
  distractors: int,
) -> World:
  """Returns a world; equal arguments give the same world on every host.

  Args:
    seed: the seed of the encyclopedia.
    index: the number of the world; below NUM_EVALUATION_WORLDS for evaluation.
    entities_per_type: the number of entities of each of the five types.
    name_pieces: the number of sub-word pieces in a name, at least 2.
    distractors: the number of extra entities that no fact points to.

  Raises:
    ValueError: if the pieces cannot form enough different names.
  """
  rng = np.random.default_rng((seed, index))
  evaluation = index < NUM_EVALUATION_WORLDS
  count = entities_per_type * len(RELATIONS) + distractors
  names = _draw_names(rng, count, name_pieces, evaluation)
  kinds = [kind for kind in RELATIONS for _ in range(entities_per_type)]
  kinds += list(rng.choice(list(RELATIONS), size=distractors))
  targets = {kind: [] for kind in RELATIONS}
  for name, kind in zip(names[: len(names) - distractors], kinds):
    targets[kind].append(name)
  entities = {}
  for name, kind in zip(names, kinds):
    facts = {}
    for relation, target in RELATIONS[kind].items():
      choices = [n for n in targets[target] if n != name]
      facts[relation] = choices[rng.integers(len(choices))]
    entities[name] = Entity(name, str(kind), facts)
  return World(index, entities)


def make_passages(seed: int, world: int, **options: int) -> list[types.Passage]:
  """Returns the passages of a world; `make_world` describes the arguments."""
  return make_world(seed, world, **options).passages()


def first_piece(name: str) -> str:
  """Returns the first piece of a name."""
  return name[: len(OPENINGS[0])]


def is_evaluation_name(name: str) -> bool:
  """Returns whether a name is reserved for evaluation worlds."""
  return zlib.crc32(name.encode()) % _EVALUATION_SHARE == 0


def _draw_names(rng, count, name_pieces, evaluation) -> list[str]:
  # `names` is a dict, because a dict keeps its order. The order of a set of
  # strings varies between processes.
  names = {}
  for _ in range(200 * count):
    if len(names) == count:
      return list(names)
    name = OPENINGS[rng.integers(_NUM_PIECES)] + ''.join(
      ENDINGS[rng.integers(_NUM_PIECES)] for _ in range(name_pieces - 1)
    )
    if is_evaluation_name(name) == evaluation:
      names[name] = None
  raise ValueError(
    f'cannot form {count} names of {name_pieces} pieces; raise '
    'data.synthetic_wiki.name_pieces or lower entities_per_type'
  )


def vocabulary() -> list[str]:
  """Returns the strings that get a token of their own.

  The order of the strings decides their token ids. A model that is trained
  already would break if the order changed.
  """
  relations = sorted({r for table in RELATIONS.values() for r in table})
  words = ['?', '.', '. Its', ' is a', ' is', ' the', ' of', ' of the']
  words += [' Who', ' What', ' Name', ' Tell me', ' find', ' done', '.\n']
  words += FILLER_WORDS + [f' {word}' for word in [*RELATIONS, *relations]]
  names = [f' {piece}' for piece in OPENINGS] + ENDINGS
  return list(dict.fromkeys(words + names))


FILLER_WORDS = [
  f' {word}'
  for word in 'well so now then perhaps maybe first next let me see'.split()
]
