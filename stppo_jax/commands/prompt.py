"""Show what the model reads: the tokens of a prompt and of a dialogue.

python -m stppo_jax prompt --config=FILE.py[:ALGORITHM]
    [--config.KEY=VALUE ...] [--question=TEXT] [--turn=TEXT ...]

  --config=FILE.py[:ALGORITHM]  the config of the run
  --config.KEY=VALUE            sets a key of the config
  --question=TEXT               the question; by default the first one of the
                                training data
  --turn=TEXT                   what the policy writes in a turn; may be given
                                several times. By default, an example of each
                                action

Prints the prompt as text, and each token of the dialogue on a line: its
position, its id, a remark, and its text. The remark marks special and added
tokens of the tokenizer, tokens that are part of a tag, and the stop or end
token with which a turn ends. No retriever is asked, and every search finds the
same example passage. No weights are read.
"""

from collections.abc import Sequence

from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration


def main(argv: Sequence[str]) -> int:
  """Prints a dialogue; returns the exit code."""
  flags = command_line.flags(question='', turn=command_line.REPEATED)
  config = configuration.parse(
    argv, flags=flags, ignored=[configuration.PASSAGES]
  )
  # Imported late, so that a wrong flag is reported before jax is loaded.
  from stppo_jax.tools import prompt

  for line in prompt.lines(config, flags.question, flags.turn):
    print(line)
  return 0
