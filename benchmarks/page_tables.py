"""Writes the tables of docs/sharding.md, whose lines a benchmark makes."""

import argparse
from collections.abc import Callable, Iterable
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGE = _ROOT / 'docs' / 'sharding.md'


def main(
  title: str, line: Callable[[str], str], names: Iterable[str], doc: str | None
) -> None:
  """Prints lines of a table, and puts them into the page with `--write`.

  Args:
    title: the title of the table, which stands in the page between the comments
      `title` and `end of title`. The benchmark's module has this name, too.
    line: a function that compiles programs for a TPU slice and returns a line.
      It takes the name of the line.
    names: the names of all lines, in order. The first cell of a line is the
      line's name with a space in place of `@`.
    doc: the help text of the command.
  """
  parser = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--only', default='')
  parser.add_argument('--write', action='store_true')
  parser.add_argument('--name', choices=[*names], help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.name:
    import jax

    jax.config.update('jax_platforms', 'cpu')
    # The cache of compiled programs can store, but not load, a program for
    # chips that this machine does not have.
    jax.config.update('jax_enable_compilation_cache', False)
    print(line(flags.name))
    return
  module = f'benchmarks.{title.replace(" ", "_")}'
  for name in names:
    if flags.only in name:
      # Each line is made in a process of its own, whose end frees its memory.
      done = subprocess.run(
        [sys.executable, '-m', module, f'--name={name}'],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
      )
      row = done.stdout.splitlines()[-1]
      print(row, flush=True)
      if flags.write:
        text = with_row(_PAGE.read_text('utf-8'), title, row, names)
        _PAGE.write_text(text, 'utf-8')


def with_row(text: str, title: str, row: str, names: Iterable[str]) -> str:
  """Returns a page with a row that replaces the row with the same first cell.

  Args:
    text: the page.
    title: see `main`.
    row: the new row.
    names: see `main`.
  """
  table = text.partition(f'<!-- {title} -->')[2].partition('<!--')[0]
  lines = table.strip().splitlines()
  found = {line.split('|')[1].strip(): line for line in [*lines[2:], row]}
  cells = [name.replace('@', ' ') for name in names]
  rows = [found[cell] for cell in cells if cell in found]
  return replaced(text, title, '\n'.join([*lines[:2], *rows]))


def replaced(text: str, title: str, made: str) -> str:
  """Returns a page with the text `made` between the two comments of a title."""
  begin, end = f'<!-- {title} -->', f'<!-- end of {title} -->'
  before, _, rest = text.partition(begin)
  return f'{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}'
