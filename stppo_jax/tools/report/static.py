"""Makes tables, and curves as SVG, for browsers without JavaScript."""

from collections.abc import Mapping, Sequence
import html
from typing import Any

from stppo_jax import streams
from stppo_jax.tools.report import comparison
from stppo_jax.tools.report import summary

_WIDTH, _HEIGHT = 400, 150
_POINTS = 200  # the most points of a curve


def content(
  contents: Mapping[str, Any], groups: Sequence[comparison.Group]
) -> str:
  """Returns the HTML of a page's notes, tables, panels and pictures.

  Args:
    contents: the data of the page, see `page.contents`.
    groups: the runs, grouped by experiment.
  """
  rows = [['', *contents['groups']], *summary.rows(contents)]
  parts = [f'<p class="notes">{_text(note)}</p>' for note in contents['notes']]
  for title, table in {**contents['tables'], 'Summary': rows}.items():
    parts += [f'<h2>{_text(title)}</h2>', _table(table)]
  for section in contents['sections']:
    pictures = [_picture(panel, groups) for panel in section['panels']]
    parts += [f'<h2>{section["title"]}</h2>', '<div class="figures">']
    parts += [*pictures, '</div>']
  for name, source in contents['pictures'].items():
    parts.append(f'<h2>{_text(name)}</h2><img src="{source}" alt="">')
  return '\n'.join(parts)


def _text(value: Any) -> str:
  """Returns a value as text that HTML shows verbatim, on one line."""
  return html.escape(streams.escape(str(value)).replace('\n', ' '))


def _table(rows: Sequence[Sequence[Any]]) -> str:
  head, *body = (
    ''.join(f'<td>{_text(cell)}</td>' for cell in row) for row in rows
  )
  lines = ''.join(f'<tr>{row}</tr>' for row in body)
  return (
    f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
    f'<tbody>{lines}</tbody></table></div>'
  )


def _picture(
  panel: Mapping[str, Any], groups: Sequence[comparison.Group]
) -> str:
  """Returns the HTML of a panel: a curve per experiment and metric."""
  curves = {
    (members.label, metric): points
    for members in groups
    for metric in panel['metrics']
    if (points := comparison.band(members, metric))
  }
  steps = [step for points in curves.values() for step, *_ in points]
  means = [mean for points in curves.values() for _, mean, *_ in points]
  left, low = min(steps), min(means)
  # If there is only one step, or if all means are equal, the curves have a
  # width or a height of 0. The scale would divide by 0, so it divides by 1.
  across = _WIDTH / (max(steps) - left or 1)
  up = _HEIGHT / (max(means) - low or 1.0)
  lines, keys = [], []
  for number, ((label, metric), points) in enumerate(curves.items()):
    # The hues of consecutive curves are 137 degrees apart, so they differ
    # clearly.
    colour = f'hsl({137 * number % 360} 65% 50%)'
    # Of a long run, only every nth point is drawn, with the least n for which
    # there are at most `_POINTS` points. So the picture stays small.
    places = ' '.join(
      f'{across * (step - left):.1f},{_HEIGHT - up * (mean - low):.1f}'
      for step, mean, *_ in points[:: -(-len(points) // _POINTS)]
    )
    lines.append(f'<polyline points="{places}" stroke="{colour}"/>')
    name = _text(f'{label}, {metric}')
    keys.append(f'<span style="color:{colour}">{name}</span>')
  return (
    f'<figure class="card"><h3>{panel["title"]}</h3>'
    f'<svg viewBox="-4 -4 {_WIDTH + 8} {_HEIGHT + 8}" fill="none">'
    f'{"".join(lines)}</svg><p>steps {left} to {max(steps)}, '
    f'from {low:.4g} to {max(means):.4g}: {"; ".join(keys)}</p>'
    f'<p class="note">{_text(panel["note"])}</p></figure>'
  )
