"""Tables of a page that a benchmark makes line by line."""

from collections.abc import Iterable
from collections.abc import Sequence
import pathlib


def put(
  page: pathlib.Path,
  title: str,
  header: Sequence[str],
  lines: Iterable[str],
  *,
  names: Iterable[str],
) -> None:
  """Puts lines into a table, in place of those with the same first cell.

  Args:
    page: the page.
    title: the table stands between the comments `title` and `end of title`.
    header: the first two lines of the table.
    lines: the new lines.
    names: the first cells of all lines that the table may have, in order.
  """
  begin, end = f'<!-- {title} -->', f'<!-- end of {title} -->'
  before, _, rest = page.read_text(encoding='utf-8').partition(begin)
  table, _, after = rest.partition(end)
  kept = table.strip().splitlines()[len(header) :]
  found = {line.split('|')[1].strip(): line for line in [*kept, *lines]}
  rows = [found[name] for name in names if name in found]
  table = '\n'.join(['', *header, *rows, ''])
  page.write_text(before + begin + table + end + after, encoding='utf-8')
