"""A synthetic encyclopedia: worlds of made-up entities and questions on them.

World w of a seed holds entities of five types. A name is composed of sub-word
pieces, so an answer has to be copied from a passage; facts are drawn anew for
every world, so they cannot be memorised. Names of evaluation worlds (w <
NUM_EVALUATION_WORLDS) never occur in any other world: a hash of the name
decides which side it belongs to.
"""

from collections.abc import Sequence
import dataclasses
import zlib

import numpy as np

from stppo_jax import types

NUM_EVALUATION_WORLDS = 1000

# Type -> relation -> type of the entity it points to.
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

# Templates start with the word that asks for the type of the answer.
_TEMPLATES = (
  '{who} is the {path} of {name}?',
  'Name the {path} of {name}.',
  'Tell me the {path} of {name}.',
)

_CONSONANTS = 'bdfgklmnprstvz'
_VOWELS = 'aeiou'
_NUM_PIECES = 64  # of each kind: openings and endings
_EVALUATION_SHARE = 4  # one name in four belongs to the evaluation worlds

_HOP_NAMES = {1: 'one_hop', 2: 'two_hop'}


def _pieces() -> tuple[list[str], list[str]]:
  """64 openings ('Bam') and 64 endings ('kol'), always the same ones."""
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
  """An entity, its type, and its facts: relation to name of the target."""

  name: str
  type: str
  facts: dict[str, str]

  @property
  def text(self) -> str:
    """The passage: one sentence on the type, one a fact."""
    facts = ''.join(f'. Its {r} is {name}' for r, name in self.facts.items())
    return f'{self.name} is a {self.type}{facts}.'


@dataclasses.dataclass(frozen=True)
class Chain:
  """A question with its solution: the relations to follow from `start`."""

  question: types.Question
  start: str
  relations: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class World:
  """Entities by name, and where its passages are served."""

  index: int
  entities: dict[str, Entity]

  @property
  def corpus(self) -> str:
    """Path of this world's passages on the retrieval server."""
    return f'worlds/{self.index}'

  def passages(self) -> list[types.Passage]:
    """One passage an entity."""
    return [
      types.Passage(id=entity.name, title=entity.name, text=entity.text)
      for entity in self.entities.values()
    ]

  def chains(
    self, count: int, *, hops: Sequence[int], seed: int
  ) -> list[Chain]:
    """`count` different questions; the i-th has hops[i % len(hops)] hops.

    Raises:
      ValueError: the world holds fewer such questions.
    """
    rng = np.random.default_rng((seed, self.index, 1))
    names = list(self.entities)
    seen, chains = set(), []
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
  """World `index` of `seed`: the same one on every host and in every run.

  Args:
    seed: of the encyclopedia.
    index: below NUM_EVALUATION_WORLDS for evaluation.
    entities_per_type: entities of each of the five types.
    name_pieces: sub-word pieces a name is composed of, at least 2.
    distractors: further entities that no fact points to.

  Raises:
    ValueError: more names asked for than the pieces can form.
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
  """The passages of one world; options as for `make_world`."""
  return make_world(seed, world, **options).passages()


def first_piece(name: str) -> str:
  """The first piece of a name, half a query."""
  return name[: len(OPENINGS[0])]


def is_evaluation_name(name: str) -> bool:
  """Whether the name is kept for evaluation worlds."""
  return zlib.crc32(name.encode()) % _EVALUATION_SHARE == 0


def _draw_names(rng, count, name_pieces, evaluation) -> list[str]:
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
  """Strings that deserve a token of their own in this encyclopedia."""
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
