"""Measures what `configs/own.py` learns from a user's questions and passages.

    python -m benchmarks.own_data QUESTIONS.jsonl PASSAGES.jsonl FOLDER

The benchmark holds out a quarter of the questions, and trains on the other
questions, on two cores and with an empty cache of compiled programs. Then the
supervised start and the trained policy are evaluated on held-out and on
training questions, greedily and by sampling.
If the benchmark is stopped, the same command goes on. On a machine with other
work, the CPU seconds tell how long an idle machine would have taken: half of
them, if both cores were busy all the time.
"""

from collections.abc import Sequence
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from benchmarks import measure

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_GOAL = 1500  # the most seconds on two cores
_HELD_OUT = 4  # one question in four is held out
_SCORE = 'substring_match'
_SETS = {'test': 'held out', 'train': 'trained on'}
_SAMPLES = {'greedy': [], 'sampled': ['--samples=1']}


def split(
  questions: pathlib.Path, passages: pathlib.Path, data: pathlib.Path
) -> None:
  """Writes the files that `configs/own.py` reads.

  The id of a question decides whether the question is held out, so the same
  questions are held out in all runs.

  Args:
    questions: a file of questions with ids, in the form of docs/data.md.
    passages: the file of passages for these questions.
    data: the folder in which the files are written.
  """
  parts: dict[str, list[str]] = {name: [] for name in _SETS}
  for line in questions.read_text('utf-8').splitlines():
    row = json.loads(line)
    row.pop('dataset', None)  # scores are reported under the names of the files
    number = int(hashlib.sha256(str(row['id']).encode()).hexdigest(), 16)
    name = 'train' if number % _HELD_OUT else 'test'
    parts[name].append(json.dumps(row) + '\n')
  data.mkdir(parents=True, exist_ok=True)
  for name, lines in parts.items():
    (data / f'{name}.jsonl').write_text(''.join(lines), 'utf-8')
  shutil.copy(passages, data / 'corpus.jsonl')


def report(
  folder: pathlib.Path,
  *,
  questions: int,
  cores: int,
  arguments: Sequence[str],
) -> str:
  """Returns the tables of the scores and of the seconds.

  Args:
    folder: the folder that has the folder `data`; the run and its evaluations
      are written into it, too.
    questions: the number of held-out questions, and of training questions, that
      are evaluated.
    cores: the number of cores in use.
    arguments: further arguments of `train`.
  """
  run = folder / 'run'
  config = ['--config=configs/own.py', f'--config.data.root={folder}/data']
  config += arguments
  sets = ', '.join(f'{name}.jsonl limit={questions}' for name in _SETS)
  commands = {'start and training': ['train', *config, f'--workdir={run}']}
  results = {}
  for policy, source in {
    'start': [f'--checkpoint={run}/start/policy', *config],
    'trained': [f'--checkpoint={run}'],
  }.items():
    for kind, flags in _SAMPLES.items():
      results[policy, kind] = folder / f'{policy}-{kind}'
      commands[f'evaluation: {policy}, {kind}'] = [
        *('evaluate', *source, *flags),
        *(f'--sets={sets}', f'--out={results[policy, kind]}'),
      ]
  spent = {name: _spent(folder, name, x) for name, x in commands.items()}
  spent['all'] = [sum(x) for x in zip(*spent.values())]
  scored = {
    key: json.loads((path / 'results.json').read_text('utf-8'))['sets']
    for key, path in results.items()
  }
  scores = []
  for name, part in _SETS.items():
    for kind in _SAMPLES:
      before, after = (
        scored[policy, kind][name]['scores'][_SCORE]
        for policy in ('start', 'trained')
      )
      majority = scored['start', kind][name]['baseline']
      numbers = (f'{x:.3f}' for x in (before, after, after - before, majority))
      scores.append((f'{part}, {kind}', *numbers))
  seconds = [
    (name, f'{wall:.0f}', f'{cpu:.0f}') for name, (wall, cpu) in spent.items()
  ]
  seconds.append(('goal', f'{_GOAL}', f'{cores * _GOAL}'))
  head = ('questions', 'start', 'trained', 'difference', 'majority')
  tables = [(head, scores), (('part', 'seconds', 'CPU'), seconds)]
  return '\n\n'.join(measure.table(*table) for table in tables)


def _spent(
  folder: pathlib.Path, name: str, arguments: Sequence[str]
) -> list[float]:
  """Runs a command unless it is done; returns its seconds and CPU seconds.

  The seconds are kept in a file, so that the seconds of attempts that were
  stopped count, too.
  """
  path = folder / 'seconds.json'
  known = json.loads(path.read_text('utf-8')) if path.exists() else {}
  *spent, done = known.get(name, (0.0, 0.0, False))
  if done:
    return spent
  start, before = time.monotonic(), sum(os.times()[2:4])  # CPU of children
  try:
    subprocess.run(
      [sys.executable, '-m', 'stppo_jax', *arguments],
      cwd=_ROOT,
      env=os.environ | {'JAX_COMPILATION_CACHE_DIR': f'{folder}/compiled'},
      stdout=sys.stderr,
      check=True,
    )
    done = True
  finally:
    spent[0] += time.monotonic() - start
    spent[1] += sum(os.times()[2:4]) - before
    known[name] = [*spent, done]
    path.write_text(json.dumps(known), 'utf-8')
  return spent


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser('own_data', questions=256)
  parser.set_defaults(cores=2)
  for name in ('file', 'passages', 'folder'):
    parser.add_argument(name, type=lambda x: pathlib.Path(x).resolve())
  parser.add_argument('arguments', nargs='*', help='flags of train, after --')
  flags = measure.start(parser, arguments)
  split(flags.file, flags.passages, flags.folder / 'data')
  print(
    report(
      flags.folder,
      questions=flags.questions,
      cores=flags.cores,
      arguments=flags.arguments,
    )
  )


if __name__ == '__main__':
  main()
