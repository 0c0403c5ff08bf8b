"""Draws the success and other metrics of a study's runs against the step."""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any

import matplotlib
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from stppo_jax.records import plots
from stppo_jax.tools import success_curve
from stppo_jax.tools.ablation import results
from stppo_jax.tools.ablation import statistics
from stppo_jax.tools.ablation import study as study_lib

# In inches: the width and height of a panel, and the margins of the page.
_WIDTH, _HEIGHT = 3.4, 1.8
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.6, 2.0, 0.75, 0.5
# Maps the title of a panel to the column of the table that the panel shows, and
# to whether the vertical axis is logarithmic.
_INSIDE = {
  'Share outside, token ratio': ('clip_token', False),
  'Share outside, turn ratio': ('clip_turn', False),
  'Largest turn ratio': ('ratio_max_turn', True),
  'Entropy (nats)': ('entropy', False),
  'KL to the reference': ('kl_reference', False),
  'Explained variance': ('explained_variance', False),
}
# Maps a column to the lowest value that its axis shows. The explained variance
# has no lower bound, because a value model can be wrong by any factor.
_LEAST = {'explained_variance': -1.0}
_SAVED: Mapping[str, dict[str, Any]] = {
  'png': {'format': 'png', 'dpi': 110},
  'svg': {'format': 'svg', 'metadata': {'Date': None}},
}


class _PlainNumbers(ticker.LogFormatter):
  """Labels the ticks of a logarithmic axis as 1.28, and not as 1.28 × 10⁰."""

  def __call__(self, x: float, pos: int | None = None) -> str:
    # Matplotlib's formatter returns '' for the minor ticks that have no room.
    return f'{x:g}' if super().__call__(x, pos) else ''


def draw(
  study: study_lib.Study,
  runs: Sequence[results.Run],
  folder: pathlib.Path,
  *,
  formats: Sequence[str] = tuple(_SAVED),
) -> list[pathlib.Path]:
  """Draws the figures of a study.

  Args:
    study: the study.
    runs: the finished runs of the study, at least one.
    folder: the folder in which the pictures are written.
    formats: the file formats to write: 'png', 'svg' or both.

  Returns:
    The paths of the pictures.
  """
  found = {run.key for run in runs}
  groups = {
    group: arms
    for group, arms in study.groups.items()
    if any(arm.key in found for arm in arms)
  }
  by_arm = {
    arm.key: [run for run in runs if run.key == arm.key] for arm in study.arms
  }
  panels = {'Success': ('success', False)}
  folder.mkdir(parents=True, exist_ok=True)
  paths = []
  # A fixed salt makes equal data give equal bytes of SVG. The font type none
  # keeps text as text, so that it can be searched.
  svg: dict[Any, Any] = {'svg.hashsalt': study.name, 'svg.fonttype': 'none'}
  with matplotlib.rc_context(plots.STYLE | svg):
    for name, rows, height in (
      ('success', panels, 1.4 * _HEIGHT),
      ('inside', _INSIDE, _HEIGHT),
    ):
      page = _page(study, groups, by_arm, rows, height)
      for suffix in formats:
        paths.append(folder / f'{study.name}_{name}.{suffix}')
        # With bbox_inches='tight', the picture grows to hold names of arms and
        # titles that are wider than the margins.
        page.savefig(paths[-1], bbox_inches='tight', **_SAVED[suffix])
  return paths


def _page(
  study: study_lib.Study,
  groups: Mapping[str, Sequence[study_lib.Arm]],
  by_arm: Mapping[tuple[str, str], Sequence[results.Run]],
  rows: Mapping[str, tuple[str, bool]],
  height: float,
) -> figure.Figure:
  """Returns a page of panels: one column per group, and one row per metric."""
  # The panels are placed by hand, because an automatic layout takes as long as
  # the drawing itself.
  width = _LEFT + _WIDTH * len(groups) + _RIGHT
  tall = _TOP + height * len(rows) + _BOTTOM
  page = figure.Figure(figsize=(width, tall))
  grid = page.subplots(
    len(rows),
    len(groups),
    squeeze=False,
    sharex=True,
    sharey='row',
    gridspec_kw={
      'left': _LEFT / width,
      'right': 1 - _RIGHT / width,
      'bottom': _BOTTOM / tall,
      'top': 1 - _TOP / tall,
      'hspace': 0.3,
      'wspace': 0.08,
    },
  )
  # Arms with the same name get the same colour in all groups.
  names = list(dict.fromkeys(arm.name for arm in study.arms))
  # Maps the name of an arm to its line, and to its number of seeds per group.
  legend: dict[str, tuple[Any, list[int]]] = {}
  for row, (title, (column, is_log)) in enumerate(rows.items()):
    for place, (group, arms) in enumerate(groups.items()):
      axes = grid[row][place]
      # The group is on a line of its own, because "Success: rate 1e-4" would
      # read as a success rate.
      head = [group] * (row == 0 and bool(group))
      axes.set_title('\n'.join([*head, title]))
      for arm in arms:
        curves = [run.per_step(column) for run in by_arm[arm.key]]
        if not curves:
          continue
        line = _draw(axes, curves, names.index(arm.name))
        if row == 0:
          legend.setdefault(arm.name, (line, []))[1].append(len(curves))
      if is_log:
        axes.set_yscale('log')
        axes.yaxis.set_major_formatter(_PlainNumbers())
        axes.yaxis.set_minor_formatter(_PlainNumbers())
      if column in _LEAST:
        axes.set_ylim(_LEAST[column], 1.0)
  for axes in grid[-1]:
    axes.set_xlabel('step')
  grid[0][-1].legend(
    [line for line, _ in legend.values()],
    [f'{name}, {_seeds(counts)}' for name, (_, counts) in legend.items()],
    loc='upper left',
    bbox_to_anchor=(1.0, 1.0),
  )
  title = f'{study.title}: means of {success_curve.WINDOW} steps'
  page.suptitle(
    title.replace('$', r'\$'),
    x=_LEFT / width,
    y=1 - 0.1 / tall,
    ha='left',
    va='top',
  )
  return page


def _seeds(counts: Sequence[int]) -> str:
  """Returns the number of seeds of an arm as text.

  If the number differs between groups, the text is a range.

  Args:
    counts: the number of seeds that the arm has in each group.
  """
  if min(counts) < max(counts):
    return f'{min(counts)} to {max(counts)} seeds'
  return f'{counts[0]} seed' + 's' * (counts[0] > 1)


def _draw(axes, curves: Sequence[np.ndarray], number: int) -> Any:
  """Draws a thin curve for each seed of an arm, and a thick curve of the mean.

  All curves are smoothed.

  Returns:
    The thick curve.
  """
  style = plots.line(number)
  smooth = [
    plots.trailing_mean(values, success_curve.WINDOW) for values in curves
  ]
  for values in smooth:
    places = np.arange(1, len(values) + 1)
    axes.plot(places, values, alpha=0.3, linewidth=0.6, **style)
  length = max(map(len, smooth))
  table = np.full((len(smooth), length), math.nan)
  for row, values in zip(table, smooth):
    row[: len(values)] = values
  means = [statistics.over_numbers(np.mean, column) for column in table.T]
  (thick,) = axes.plot(np.arange(1, length + 1), means, **style)
  return thick
