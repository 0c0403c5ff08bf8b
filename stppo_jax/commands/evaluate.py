"""Evaluate a run, or any Hugging Face directory, on sets of questions.

python -m stppo_jax evaluate --checkpoint=DIR [--sets=SETS] [--samples=N]
    [--out=DIR] [--config=FILE.py[:ALGORITHM]] [--config.KEY=VALUE ...]

Without --sets, a run is evaluated on the questions of its config. The scores
are printed. With --out, the scores, all answers and all dialogues are written
to a folder. The same command continues an evaluation that was interrupted.
docs/evaluation.md has more.

  --checkpoint=DIR              the folder of a run, whose newest checkpoint is
                                evaluated, or a Hugging Face directory; also in
                                a bucket
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

from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import evaluated_config


def main(argv: Sequence[str]) -> int:
  """Evaluates a checkpoint; returns the exit code."""
  flags = command_line.flags(
    sets='',
    out='',
    samples=command_line.integer(lower_bound=1, upper_bound=10_000),
  )
  checkpoint, config = evaluated_config.parse(argv, flags=flags)
  # Imported late, so that a wrong flag is reported before jax is loaded.
  from stppo_jax.tools import evaluation

  return evaluation.evaluate(
    config,
    checkpoint,
    samples=flags.samples or 0,
    out=pathlib.Path(flags.out) if flags.out else None,
  )
