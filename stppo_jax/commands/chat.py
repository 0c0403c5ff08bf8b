"""Ask a run, or any Hugging Face directory, questions, and see it search.

python -m stppo_jax chat --checkpoint=DIR [--config=FILE.py[:ALGORITHM]]
    [--config.KEY=VALUE ...]

Reads questions from the standard input, one on each line, and prints for each
what was searched, what was found, and the answer. Control characters of models
and passages are shown as their escapes.

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
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.tools import chat

  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors='replace')
  return chat.chat(config, checkpoint, sys.stdin)
