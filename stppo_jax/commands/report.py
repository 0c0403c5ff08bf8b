"""Make a page about runs: figures, tables, and a viewer of their dialogues.

python -m stppo_jax report DIR... [--out=FILE] [--format=html|md]
                           [--dialogues=N] [--megabytes=N]

  DIR          the folder of a run of train, its --workdir, or the address of
               its copy, its writer.copy_to; runs that differ only in their
               seed are one experiment, shown with a band
  --out        the file; report.html, or report.md with its pictures beside it
  --format     html (default): one file with everything, which opens from disk
               and loads nothing; md: tables and PNG files for papers
  --dialogues  the largest number of dialogues in the page (default 5000)
  --megabytes  about the largest size of the page (default 25)

The runs may still be going. What cannot be read (a folder that is no run, a
line that was cut off when a run was killed) is named in one line, everything
else is shown, and the exit code is 2. docs/report.md explains the page.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import pathlib
import sys

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.tools.report import comparison
from stppo_jax.tools.report import output
from stppo_jax.tools.report import page
from stppo_jax.tools.report import run_files
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import bucket_copy

_DEFAULTS = {
  '--out': '',
  '--format': 'html',
  '--dialogues': '5000',
  '--megabytes': '25',
}
_FORMATS = ('html', 'md')
_MEGABYTE = 1_000_000


def main(argv: Sequence[str]) -> int:
  """Writes the report of runs; returns the exit code."""
  folders = [word for word in argv if not word.startswith('-')]
  flags, problems = _flags([word for word in argv if word.startswith('-')])
  if not folders:
    problems.append('DIR: missing; give the folder of a run, or several')
  out = pathlib.Path(flags['--out'] or f'report.{flags["--format"]}')
  has_figures = flags['--format'] == 'md'
  if not problems and (problem := output.problem(out, has_figures=has_figures)):
    problems.append(f'--out={problem}')
  if problems:
    print('\n'.join(problems), file=sys.stderr)
    return exits.USAGE
  with contextlib.ExitStack() as stack:
    runs, losses = _read(folders, stack)
    _write(out, flags, runs, losses)
  for loss in losses:
    print(loss, file=sys.stderr)
  return 2 if losses else 0


def _write(
  out: pathlib.Path,
  flags: Mapping[str, str],
  runs: Sequence[run_files.Run],
  losses: list[str],
) -> None:
  """Writes the report, if there is a run; adds to what could not be shown."""
  if runs:
    groups = comparison.group(runs)
    losses += comparison.problems(groups)
    if flags['--format'] == 'md':
      # Late, because it loads the library that draws.
      from stppo_jax.tools.report import markdown

      markdown.write(out, groups, losses=losses)
    else:
      text = page.html(
        groups,
        losses=losses,
        most_dialogues=int(flags['--dialogues']),
        most_bytes=int(flags['--megabytes']) * _MEGABYTE,
      )
      atomic_files.replace(out, text.encode())
    size = out.stat().st_size / _MEGABYTE
    count = f'{len(runs)} run' + 's' * (len(runs) != 1)
    print(f'{out}: {count}, {size:.1f} MB')


def _flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
  """Returns the value of each flag, and what is wrong with them."""
  flags, problems = dict(_DEFAULTS), []
  for word in words:
    name, _, value = word.partition('=')
    if name not in flags:
      hint = settings.closest(name, list(flags))
      problems.append(f'{word}: unknown flag{hint}')
    elif name in ('--dialogues', '--megabytes') and not value.isdecimal():
      problems.append(f'{word}: must be a whole number, at least 0')
    elif name == '--format' and value not in _FORMATS:
      problems.append(f'{word}: must be one of {", ".join(_FORMATS)}')
    else:
      flags[name] = value
  return flags, problems


def _read(
  folders: Sequence[str], stack: contextlib.ExitStack
) -> tuple[list[run_files.Run], list[str]]:
  """Returns the runs that can be shown, and what could not be read.

  Args:
    folders: their folders, or the addresses of copies of them.
    stack: keeps the files of copies until it is closed.
  """
  runs, losses = [], []
  for folder in dict.fromkeys(folders):
    try:
      copy = bucket_copy.downloaded(folder, dialogues=True)
      run = run_files.read(str(stack.enter_context(copy)), folder)
    except (run_files.Unreadable, buckets.BucketError) as error:
      losses.append(str(error))
    else:
      runs.append(run)
      losses += run.losses
  return runs, losses
