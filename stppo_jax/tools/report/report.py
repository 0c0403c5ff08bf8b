"""Writes a report about runs: a page, or Markdown with pictures."""

from collections.abc import Mapping, Sequence
import contextlib
import pathlib

from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.tools.report import comparison
from stppo_jax.tools.report import page
from stppo_jax.tools.report import run_files
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import bucket_files

MOST_DIALOGUES, MOST_MEGABYTES = 5000, 25  # the default limits of a page
_MEGABYTE = 1_000_000


def write(
  out: pathlib.Path,
  folders: Sequence[str],
  *,
  form: str = 'html',
  most_dialogues: int = MOST_DIALOGUES,
  most_megabytes: int = MOST_MEGABYTES,
  tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
  pictures: Sequence[str] = (),
) -> list[str]:
  """Writes a report about the runs that can be read, if any run can be read.

  Args:
    out: the file of the report.
    folders: the folders of runs, or their addresses in buckets.
    form: 'html' for a page, or 'md' for Markdown.
    most_dialogues: the largest number of dialogues in a page.
    most_megabytes: the approximate limit for the size of a page.
    tables: additional tables for a page, see `page.html`.
    pictures: the paths of additional PNG files for a page.

  Returns:
    A message for each run, file or line that could not be read, and for each
    experiment that cannot be compared with the first one.
  """
  runs, losses = [], []
  with contextlib.ExitStack() as stack:
    # The folders are made unique, because a run that is named twice would count
    # as two seeds.
    for folder in dict.fromkeys(folders):
      try:
        # The stack keeps the local copy of a run in a bucket until the report
        # is written, because the dialogues are read only then.
        found = bucket_files.downloaded(folder, dialogues=True)
        run = run_files.read(str(stack.enter_context(found)), folder)
      except (exits.Misconfigured, buckets.BucketError) as error:
        losses.append(str(error))
      else:
        runs.append(run)
        losses += run.losses
    if not runs:
      return losses
    groups = comparison.group(runs)
    losses += comparison.problems(groups)
    if form == 'md':
      # This import loads matplotlib, which pages do not need.
      from stppo_jax.tools.report import markdown

      markdown.write(out, groups, losses=losses)
    else:
      text = page.html(
        groups,
        losses=losses,
        most_dialogues=most_dialogues,
        most_bytes=most_megabytes * _MEGABYTE,
        tables=tables or {},
        pictures={
          pathlib.Path(name).stem: pathlib.Path(name).read_bytes()
          for name in pictures
        },
      )
      atomic_files.replace(out, text.encode())
  size = out.stat().st_size / _MEGABYTE
  count = f'{len(runs)} run' + 's' * (len(runs) != 1)
  print(f'{out}: {count}, {size:.1f} MB')
  return losses
