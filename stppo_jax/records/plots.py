"""Draws pictures of a run from its `metrics.jsonl`."""

from collections.abc import Mapping
import io
import json
import math
import pathlib
from typing import Any

import matplotlib
from matplotlib import figure
from matplotlib import ticker
import numpy as np

from stppo_jax.workdir import atomic_files

_SCORE = 'critic/score/mean'
_EVALUATION = 'val/'  # followed by the name of the score and of the data set
_LEVELS = ('token', 'turn', 'sequence')
_KL = {
  'actor/ppo_kl': 'to the sampling policy',
  'critic/kl': 'to the reference',
}
_WINDOW = 5  # the number of steps over which the mean score is taken
# The palette of Okabe and Ito, which colour-blind people can distinguish.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
DASHES = ('-', '--', ':', '-.')
_GREY = '#666666'
STYLE: dict[Any, Any] = {
  'font.family': 'sans-serif',
  'font.size': 9,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.edgecolor': _GREY,
  'axes.labelcolor': '#222222',
  'axes.titlesize': 9,
  'axes.titlelocation': 'left',
  'axes.grid': True,
  'axes.grid.axis': 'y',
  'grid.color': '#E5E5E5',
  'grid.linewidth': 0.6,
  'axes.axisbelow': True,
  'xtick.color': _GREY,
  'ytick.color': _GREY,
  'legend.frameon': False,
  'lines.linewidth': 1.6,
  'savefig.dpi': 200,
}


def read_metrics(path: str | pathlib.Path) -> dict[str, np.ndarray]:
  """Returns a float64 array for each metric, nan in steps without the metric.

  Args:
    path: the file metrics.jsonl of a run.

  Raises:
    ValueError: the file has no line yet.
  """
  text = pathlib.Path(path).read_text(encoding='utf-8')
  rows = [json.loads(line) for line in text.splitlines() if line]
  if not rows:
    raise ValueError(f'{path}: no steps yet')
  numbers = [
    {k: v for k, v in row.items() if isinstance(v, int | float)} for row in rows
  ]
  names = dict.fromkeys(name for row in numbers for name in row)
  return {
    name: np.array([row.get(name, math.nan) for row in numbers], np.float64)
    for name in names
  }


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
  """Returns the mean of the last `window` values up to each index.

  Values that are nan are left out. If all these values are nan, the mean is
  nan.
  """
  recent = [values[max(i - window, 0) : i] for i in range(1, len(values) + 1)]
  recent = [x[~np.isnan(x)] for x in recent]
  return np.array([x.mean() if len(x) else math.nan for x in recent])


def learning_curve(
  metrics_path: str | pathlib.Path,
  png_path: str | pathlib.Path,
  *,
  title: str = '',
) -> None:
  """Writes a PNG file with the picture that `draw` makes.

  Args:
    metrics_path: the file metrics.jsonl of a run.
    png_path: the PNG file to write or replace.
    title: the text above the panels.

  Raises:
    ValueError: the file of the metrics has no line.
  """
  save(draw(metrics_path, title=title), png_path)


def save(page: figure.Figure, path: str | pathlib.Path, **options: Any) -> None:
  """Writes a figure as PNG, and replaces an earlier file.

  Args:
    page: the figure.
    path: the PNG file.
    **options: options of `Figure.savefig`.
  """
  picture = io.BytesIO()
  with matplotlib.rc_context(STYLE):
    page.savefig(picture, format='png', **options)
  atomic_files.replace(pathlib.Path(path), picture.getvalue())


def line(number: int) -> dict[str, Any]:
  """Returns the colour and dashes of a line; lines 0 to 23 all look different.

  Args:
    number: the number of the line in the picture.
  """
  turns, colour = divmod(number, len(COLOURS))
  return {'color': COLOURS[colour], 'linestyle': DASHES[turns % len(DASHES)]}


def mark_steps(axes: Any) -> None:
  """Puts ticks at whole steps on the horizontal axis."""
  axes.set_xlabel('step')
  axes.xaxis.set_major_locator(
    ticker.MaxNLocator(integer=True, steps=[1, 2, 5, 10])
  )


def draw(metrics_path: str | pathlib.Path, *, title: str = '') -> figure.Figure:
  """Draws score, clip fraction and KL over steps, one below the other.

  The top panel shows the training score of each step (dots), its mean over five
  steps, and the main score of every evaluation set. The middle panel shows the
  share of tokens outside the clipping band, for each ratio level. The bottom
  panel shows the KL divergence. Metrics that were not logged are left out.

  Args:
    metrics_path: the file metrics.jsonl of a run.
    title: the text above the panels.

  Raises:
    ValueError: the file of the metrics has no line.
  """
  metrics = read_metrics(metrics_path)
  with matplotlib.rc_context(STYLE):
    page = figure.Figure(figsize=(6.0, 6.4), layout='constrained')
    if title:
      # Matplotlib would show the text between two $ as a formula.
      page.suptitle(title.replace('$', r'\$'))
    score, clip, kl = page.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    _draw_score(score, metrics)
    _draw_clip(clip, metrics)
    _draw_kl(kl, metrics)
    mark_steps(kl)
    for axes in (score, clip, kl):
      if axes.get_legend_handles_labels()[0]:
        axes.legend(loc='upper left', bbox_to_anchor=(1.0, 1.0))
  return page


def _draw_score(axes, metrics: Mapping[str, np.ndarray]):
  axes.set_title('Score')
  axes.set_ylim(-0.03, 1.03)
  steps = metrics['step']
  if _SCORE in metrics:
    values = metrics[_SCORE]
    axes.plot(steps, values, '.', color=_GREY, alpha=0.35, markersize=4)
    mean = trailing_mean(values, _WINDOW)
    label = f'train, mean of {_WINDOW} steps'
    axes.plot(steps, mean, color=_GREY, label=label)
    # Weights and penalties can take rewards out of [0, 1].
    top = max(1.0, float(np.nanmax(values, initial=1.0)))
    bottom = min(0.0, float(np.nanmin(values, initial=0.0)))
    margin = 0.03 * (top - bottom)
    axes.set_ylim(bottom - margin, top + margin)
  sets = sorted(name for name in metrics if name.startswith(_EVALUATION))
  for i, name in enumerate(sets):
    # Evaluations are rare. Steps without an evaluation are left out, because
    # their nans would leave gaps in the line.
    evaluated = ~np.isnan(metrics[name])
    axes.plot(
      steps[evaluated],
      metrics[name][evaluated],
      'o-',
      color=COLOURS[i % len(COLOURS)],
      markersize=4,
      label=name,
    )


def _draw_clip(axes, metrics):
  axes.set_title('Share of tokens outside the clipping band')
  for level, colour in zip(_LEVELS, COLOURS):
    low, high = f'clipfrac/{level}/low', f'clipfrac/{level}/high'
    if low in metrics and high in metrics:
      share = metrics[low] + metrics[high]
      axes.plot(metrics['step'], share, color=colour, label=f'{level} ratio')
  axes.set_ylim(bottom=0.0)


def _draw_kl(axes, metrics):
  axes.set_title('KL divergence (nats per token)')
  for (name, label), colour in zip(_KL.items(), COLOURS):
    if name in metrics:
      axes.plot(metrics['step'], metrics[name], color=colour, label=label)
