"""Writes a report for papers: Markdown with tables, and its figures as PNG."""

from collections.abc import Sequence
import itertools
import os
import pathlib
import tempfile
from typing import Any

from stppo_jax import streams
from stppo_jax.tools.report import comparison
from stppo_jax.tools.report import figures
from stppo_jax.tools.report import output
from stppo_jax.tools.report import page
from stppo_jax.tools.report import summary
from stppo_jax.workdir import atomic_files

# Characters that would end a table cell, or begin a tag or other markup.
_MARKS = '\\`*_{}[]<>#|!~'
_KINDS = ('last', 'best')


def write(
  out: pathlib.Path,
  groups: Sequence[comparison.Group],
  *,
  losses: Sequence[str],
) -> None:
  """Writes a report as Markdown, with its figures in a folder beside it.

  Args:
    out: the Markdown file, such as NAME.md. The figures are written to the
      folder NAME-figures.
    groups: the runs, grouped by experiment.
    losses: messages about data that could not be read, which the report shows.
  """
  contents = page.contents(groups)
  folder = output.figures(out)
  labels, runs = contents['groups'], contents['runs']
  lines = [f'<!-- {output.MARK} -->', '', f'# {escape(", ".join(labels))}', '']
  lines += [f'> {escape(loss)}\n>' for loss in losses]
  rows = [
    (
      *(run['name'], labels[run['group']], run['seed'], run['state']),
      f'{run["step"]} of {run["num_steps"] or "?"}',
    )
    for run in runs
  ]
  titles = 'run', 'experiment', 'seed', 'state', 'steps'
  lines += ['', '## Runs', '', *table(titles, rows)]
  lines += ['', '## Summary', '']
  lines += ['Means over seeds; in brackets the least and largest value.', '']
  lines += table(['', *labels], summary.rows(contents))
  if contents['evaluation']:
    columns = list(itertools.product(range(len(labels)), _KINDS))
    rows = [
      (row['name'], *(summary.text(row[what][n], 3) for n, what in columns))
      for row in contents['evaluation']
    ]
    titles = ['', *(f'{labels[n]}, {what}' for n, what in columns)]
    lines += ['', '## Evaluation', '', *table(titles, rows)]
  rows = [
    (
      *(runs[alarm['run']]['name'], alarm['name'], len(alarm['steps'])),
      *(alarm['steps'][0], alarm['steps'][-1]),
    )
    for alarm in contents['alarms']
  ]
  titles = 'run', 'metric', 'steps', 'first', 'last'
  lines += ['', '## Alarms', '']
  lines += table(titles, rows) if rows else ['No alarm in any step.']
  if contents['differences']:
    rows = [
      (key, *values)
      for key, values in contents['config']
      if key in contents['differences']
    ]
    lines += ['', '## Differences of the configurations', '']
    lines += table(['key', *labels], rows)
  drawn = {}
  for section in contents['sections']:
    lines += ['', f'## {section["title"]}', '']
    for number, panel in enumerate(section['panels'], start=1):
      name = f'{section["title"]}-{number}.png'.replace(' ', '-').lower()
      drawn[name] = panel
      lines += [f'![{panel["title"]}]({folder.name}/{name})', '']
      lines += [f'*{panel["title"]}.* {escape(panel["note"])}', '']
  # The pictures are drawn in a temporary folder, so that an earlier report
  # stays as it was if drawing fails, for example on a full disk. The folder is
  # beside the report, because `os.replace` cannot move a file to another file
  # system.
  with tempfile.TemporaryDirectory(dir=out.parent) as drawing:
    for name, panel in drawn.items():
      figures.draw(panel, groups, pathlib.Path(drawing, name))
    # The text is written first, because its presence marks the folder of
    # figures as a folder of this report.
    atomic_files.replace(out, ('\n'.join(lines) + '\n').encode())
    folder.mkdir(exist_ok=True)
    for name in drawn:
      os.replace(pathlib.Path(drawing, name), folder / name)


def escape(text: Any) -> str:
  """Returns text that Markdown and HTML show verbatim, on one line."""
  text = streams.escape(str(text)).replace('\n', ' ')
  text = text.replace('&', '&amp;')
  return ''.join(f'\\{c}' if c in _MARKS else c for c in text)


def table(titles: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
  """Returns the lines of a Markdown table whose cells are shown verbatim."""
  lines = [titles, ['---'] * len(titles), *rows]
  return [
    '| ' + ' | '.join(x if x == '---' else escape(x) for x in line) + ' |'
    for line in lines
  ]
