"""Files of questions that the model of the quickstart can answer."""

import json
import pathlib

from stppo_jax.data import readers
from stppo_jax.data import synthetic_wiki

_WORLD = dict(entities_per_type=8, name_pieces=2, distractors=0)


def write(folder: pathlib.Path, count: int) -> None:
  """Writes questions.jsonl, with gold passages, and corpus.jsonl.

  Args:
    folder: the folder of the files.
    count: the number of questions of each of one and two hops.
  """
  world = synthetic_wiki.make_world(0, 0, **_WORLD)
  rows = []
  for hops in (1, 2):
    for chain in world.chains(count, hops=(hops,)):
      name, gold = chain.start, []
      for relation in chain.relations:
        gold.append(name)
        name = world.entities[name].facts[relation]
      fields = readers.fields_of(chain.question)
      rows.append(fields | {'gold_pids': gold, 'hops': hops})
  passages = [
    {'pid': p.id, 'title': p.title, 'text': p.text} for p in world.passages()
  ]
  for name, lines in (('questions', rows), ('corpus', passages)):
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (folder / f'{name}.jsonl').write_text(text, encoding='utf-8')
