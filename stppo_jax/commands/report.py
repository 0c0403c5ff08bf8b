"""Make a page about runs: figures, tables, and a viewer of their dialogues.

python -m stppo_jax report DIR... [--out=FILE] [--format=html|md]
                           [--dialogues=N] [--megabytes=N] [--picture=P.png ...]

  DIR          the folder of a run of train, its --workdir, also in a bucket;
               runs that differ only in their seed are one experiment, shown
               with a band
  --out        the file; report.html, or report.md with its pictures beside it
  --format     html (default): one file with everything, which opens from disk
               and loads nothing; md: tables and PNG files for papers
  --dialogues  the largest number of dialogues in the page (default 5000)
  --megabytes  about the largest size of the page (default 25)
  --picture    a PNG file that the page shows, too, such as lab compare --plot
               and lab levels --plot write; may be repeated

The runs may still be in progress. If something cannot be read, such as a folder
that is no run, or a line that was cut off when a run was killed, one line names
it. The page then shows everything else, and the exit code is 2. docs/report.md
explains the page.
"""

from collections.abc import Sequence
import pathlib
import sys

from stppo_jax.commands.flags import command_line
from stppo_jax.tools.report import output
from stppo_jax.tools.report import report

_PNG = b'\x89PNG'  # the first bytes of every PNG file


def main(argv: Sequence[str]) -> int:
  """Writes the report of runs; returns the exit code."""
  flags = command_line.flags(
    out='',
    format=command_line.one_of(('html', 'md'), 'html'),
    dialogues=command_line.integer(report.MOST_DIALOGUES, lower_bound=0),
    megabytes=command_line.integer(report.MOST_MEGABYTES, lower_bound=0),
    picture=command_line.REPEATED,
  )
  words, _, errors = command_line.parse(
    flags, argv, words=sys.maxsize, missing=command_line.NO_RUNS
  )
  out = pathlib.Path(flags.out or f'report.{flags.format}')
  wrong = {'html': '.md', 'md': '.html'}[flags.format]
  if out.suffix == wrong:
    errors.append(
      f'--out={out}: must not end in {wrong} with --format={flags.format}'
    )
  elif problem := output.problem(out, has_figures=flags.format == 'md'):
    errors.append(f'--out={problem}')
  errors += filter(None, map(_picture_problem, flags.picture))
  if flags.picture and flags.format == 'md':
    errors.append('--picture: goes with --format=html only')
  command_line.refuse(errors)
  losses = report.write(
    out,
    words,
    form=flags.format,
    most_dialogues=flags.dialogues,
    most_megabytes=flags.megabytes,
    pictures=flags.picture,
  )
  return command_line.lost(losses)


def _picture_problem(name: str) -> str:
  """Returns an error line if a file is no PNG file, otherwise ''."""
  try:
    with open(name, 'rb') as file:
      beginning = file.read(len(_PNG))
  except OSError as error:
    return f'--picture={name}: {error.strerror}'
  return '' if beginning == _PNG else f'--picture={name}: is no PNG file'
