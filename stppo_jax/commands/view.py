"""Show the dialogues of a run in the terminal.

python -m stppo_jax view DIR [--evaluation] [--step=N] [--number=N] [--tokens]
                        [FILTERS]

  DIR           the folder of a run of train, its --workdir, also in a bucket
  --evaluation  the dialogues of evaluations, not those that were trained on
  --step        the step; by default the last one that has dialogues
  --number      shows that dialogue of the step; without it, a list of them
  --tokens      shows ratio, advantage, value and entropy of each token too,
                where they are recorded (writer.token_details)
  --status      lists only dialogues that ended with this status
  --least       lists only dialogues whose reward is at least this
  --most        lists only dialogues whose reward is at most this
  --searches    lists only dialogues with this number of searches
  --text        lists only dialogues that contain the text

Control characters and invisible characters are shown as escapes. If something
cannot be read, one line names it, and the exit code is 2. `report` makes a page
with all dialogues.
"""

from collections.abc import Sequence

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.tools.report import run_files
from stppo_jax.tools.report import terminal
from stppo_jax.workdir import bucket_files


def main(argv: Sequence[str]) -> int:
  """Prints dialogues; returns the exit code."""
  flags = command_line.flags(
    evaluation=False,
    step=command_line.integer(),
    number=command_line.integer(),
    tokens=False,
    status=command_line.one_of(terminal.STATUSES),
    least=command_line.number(),
    most=command_line.number(),
    searches=command_line.integer(lower_bound=0),
    text='',
  )
  given = command_line.parse(
    flags, argv, words=1, missing='DIR: missing; give the folder of a run'
  )
  if None not in (flags.least, flags.most) and flags.least > flags.most:
    given.errors.append(
      f'--least={flags.least:g}: must not be above --most={flags.most:g}'
    )
  command_line.refuse(given.errors)
  (folder,) = given.words
  losses: list[str] = []
  try:
    with bucket_files.downloaded(folder, dialogues=True) as path:
      run_files.check(str(path), folder)
      lines = terminal.lines(str(path), losses, flags)
  except buckets.BucketError as error:
    raise exits.Misconfigured(str(error)) from error
  print('\n'.join(lines))
  return command_line.lost(losses)
