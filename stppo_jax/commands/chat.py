"""Ask a run, or any Hugging Face directory, questions, and see it search.

python -m stppo_jax chat --checkpoint=DIR [--config=FILE.py[:ALGORITHM]]
    [--config.KEY=VALUE ...]

Reads questions from the standard input, one on each line. For each question it
prints the searches, the passages that were found, and the answer. Control
characters in texts of the model and in passages are shown as escapes.

  --checkpoint=DIR              the folder of a run, whose newest checkpoint is
                                asked, or a Hugging Face directory
  --config=FILE.py[:ALGORITHM]  the config, by default the one of the run, or
                                configs/base.py
  --config.KEY=VALUE            sets a key of the config, such as retrieval.url
"""

from collections.abc import Sequence
import io
import sys

from stppo_jax.commands.flags import evaluated_config


def main(argv: Sequence[str]) -> int:
  """Answers questions until the input ends; returns the exit code."""
  checkpoint, config = evaluated_config.parse(argv)
  # Imported late, so that a wrong flag is reported before jax is loaded.
  from stppo_jax.tools import chat

  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors='replace')
  return chat.chat(config, checkpoint, sys.stdin)
