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

MOST_DIALOGUES, MOST_MEGABYTES = 5000, 25  # of a page
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
  """Writes the report of those runs that can be read, if there is one.

  Args:
    out: the file.
    folders: the folders of runs, or their addresses in buckets.
    form: html or md.
    most_dialogues: the largest number of dialogues in a page.
    most_megabytes: about the largest size of a page.
    tables: tables of a page beside those of the runs, see `page.html`.
    pictures: PNG files that a page shows beside its own figures.

  Returns:
    A line for each thing that could not be read or shown.
  """
  runs, losses = [], []
  with contextlib.ExitStack() as stack:
    # A run that is named twice would count as two seeds.
    for folder in dict.fromkeys(folders):
      try:
        # The copy of a run in a bucket is kept until the report is written,
        # which reads the dialogues only then.
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
      # Late, because it loads the library that draws.
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
