"""Evaluate a run, or any Hugging Face directory, on sets of questions.

python -m stppo_jax evaluate --checkpoint=DIR [--sets=SETS] [--samples=N]
    [--out=DIR] [--config=FILE.py[:ALGORITHM]] [--config.KEY=VALUE ...]

Without --sets, a run is evaluated on the questions of its config. The scores
are printed, and with --out written with all answers and dialogues. The same
command continues an evaluation that was interrupted. docs/evaluation.md has
more.

  --checkpoint=DIR              the folder of a run, whose newest checkpoint is
                                evaluated, or a Hugging Face directory
  --sets=SETS                   data sets in data.root, such as nq,hotpotqa, or
                                files of questions
  --samples=N                   samples N dialogues of each question; without
                                it, one is decoded greedily
  --out=DIR                     the folder of the results
  --config=FILE.py[:ALGORITHM]  the config, by default the one of the run, or
                                configs/base.py
  --config.KEY=VALUE            sets a key of the config, such as data.root,
                                data.corpus or retrieval.url
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from stppo_jax import buckets
from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import evaluated_config
from stppo_jax.data import mixtures
from stppo_jax.data import tables
from stppo_jax.workdir import run_folder

_FLAGS = ('checkpoint', 'sets', 'samples', 'out', 'config')
# More questions than any data set has.
_ALL = 10**9


def main(argv: Sequence[str]) -> int:
  """Evaluates a checkpoint; returns the exit code."""
  given = configuration.split(
    argv, _FLAGS, overrides=True, former_names={'workdir': 'checkpoint'}
  )
  flags = given.values
  checkpoint, config, errors = evaluated_config.parse(
    given, change=lambda config: _choose_sets(config, flags.get('sets', ''))
  )
  samples = flags.get('samples', '')
  if samples and not (samples.isdecimal() and int(samples)):
    errors.append(f'--samples={samples}: must be an integer, 1 or greater')
  # The former name means a run: a score of its exported policy, with another
  # config, could be taken for the score of the run.
  means_run = any(word.startswith('--workdir') for word in argv)
  if (
    means_run
    and not evaluated_config.problem(checkpoint)
    and run_folder.command_of(checkpoint) != 'train'
  ):
    errors.append(
      f'no run in {checkpoint}: --checkpoint=DIR evaluates a Hugging Face '
      'directory'
    )
  if flags.get('out') and not errors:
    errors += run_folder.problems(
      flags['out'],
      flag='--out',
      command='evaluate',
      reads={
        **configuration.folders_read(config),
        '--checkpoint': checkpoint,
      },
      may_lie_inside=True,
    )
  if errors:
    raise configuration.ConfigurationError(errors)
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.tools import evaluation

  return evaluation.evaluate(
    config.lock(),
    checkpoint,
    samples=int(samples or 0),
    out=pathlib.Path(flags['out']) if flags.get('out') else None,
  )


def _choose_sets(config: Any, sets: str) -> None:
  """Makes the evaluation questions of a config those of `--sets`.

  Raises:
    ValueError: the text names no sets; one line.
  """
  if not sets:
    return
  try:
    elements = mixtures.parse(sets)
  except ValueError as error:
    raise ValueError(f'--sets={sets}: {error}') from error
  are_files = [_is_file(element.name) for element in elements]
  if any(are_files) and not all(are_files):
    raise ValueError(f'--sets={sets}: must be data sets or files, not both')
  data = config.data
  data.name = 'tfds'
  if any(are_files):
    # The names of the files are relative to this folder, not to data.root.
    data.name = 'jsonl'
    if data.corpus:
      root = buckets.local_folder(data.root)
      data.corpus = str((root / data.corpus).resolve())
    data.root = pathlib.Path.cwd().anchor
    sets = ','.join(map(_with_whole_path, sets.split(',')))
  data.evaluation = sets
  # Nothing is trained, but every config has training questions.
  data.train = sets
  config.evaluate.num_questions = _ALL


def _is_file(name: str) -> bool:
  return pathlib.Path(name).suffix in (*tables.SUFFIXES, '.gz')


def _with_whole_path(element: str) -> str:
  """Returns an element of a mixture with the whole path of its file."""
  file, *options = element.split()
  return ' '.join([str(pathlib.Path(file).resolve()), *options])
