"""Draws the figures of a report as PNG."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

import matplotlib
from matplotlib import figure

from stppo_jax.records import plots
from stppo_jax.tools.report import comparison


def draw(
  panel: Mapping[str, Any],
  groups: Sequence[comparison.Group],
  path: pathlib.Path,
) -> None:
  """Draws a panel: a line with a band for each experiment and metric.

  The line is the mean over the experiment's seeds. The band goes from the least
  to the largest value over the seeds.

  Args:
    panel: a panel of `panels.layout`.
    groups: the runs, grouped by experiment.
    path: the PNG file to write or replace.
  """
  with matplotlib.rc_context(plots.STYLE):
    page = figure.Figure(figsize=(5.2, 3.0), layout='constrained')
    axes = page.subplots()
    axes.set_title(panel['title'])
    for number, members in enumerate(groups):
      for place, metric in enumerate(panel['metrics']):
        points = comparison.band(members, metric)
        if not points:
          continue
        # Colours tell experiments apart. With only one experiment, they tell
        # metrics apart.
        colour = number if len(groups) > 1 else place
        dash = place if len(groups) > 1 else 0
        steps, means, low, high = zip(*points)
        style: dict[str, Any] = {
          'color': plots.COLOURS[colour % len(plots.COLOURS)]
        }
        words = [members.label] if len(groups) > 1 else []
        words += [metric] if len(panel['metrics']) > 1 or not words else []
        axes.fill_between(steps, low, high, alpha=0.2, linewidth=0, **style)
        axes.plot(
          steps,
          means,
          plots.DASHES[dash % len(plots.DASHES)],
          # Matplotlib would show the text between two dollar signs as a
          # formula.
          label=', '.join(words).replace('$', r'\$'),
          **style,
        )
    plots.mark_steps(axes)
    if axes.get_legend_handles_labels()[0]:
      axes.legend(fontsize=7)
  plots.save(page, path)
