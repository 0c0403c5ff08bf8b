"""Draws the effects of algorithms on the tokens of a saved batch."""

from collections.abc import Mapping
import math

import matplotlib
from matplotlib import figure
import numpy as np

from stppo_jax.records import plots
from stppo_jax.tools.lab import comparison
from stppo_jax.tools.lab import levels as levels_lib
from stppo_jax.tools.lab import saved_batch
from stppo_jax.tools.lab import token_changes
from stppo_jax.tools.lab import values as values_lib

_SHOWN = {'cut': 'Cut', 'weakened': 'Weakened', 'amplified': 'Amplified'}
_NUM_BINS = 60
# The share of segments that may lie outside of a histogram, on each side.
_TAIL = 0.01


def comparison_page(
  compared: comparison.Comparison, changes: token_changes.Changes
) -> figure.Figure:
  """Draws which tokens algorithms change, and the cosines between gradients.

  Args:
    compared: the comparison of some algorithms.
    changes: the shares of tokens that the same algorithms change.
  """
  labels = list(compared.cosines)
  with matplotlib.rc_context(plots.STYLE):
    size = 1.2 + 0.42 * len(labels)
    # The figure is not made by pyplot, which would choose a backend that may
    # need a display, and would keep every figure in memory until it is closed.
    page = figure.Figure(figsize=(9.5, 5.2 + size), layout='constrained')
    halves = page.subfigures(2, 1, squeeze=False, height_ratios=(5.2, size))
    top, bottom = halves[:, 0]
    panels = top.subplots(len(_SHOWN), len(changes), sharey='row')
    for row, (change, title) in zip(panels, _SHOWN.items(), strict=True):
      for axes, (grouping, (groups, by_label)) in zip(row, changes.items()):
        for i, label in enumerate(labels):
          axes.plot(
            getattr(by_label[label], change),
            marker='.',
            label=label,
            # Later lines are thinner, so that they do not hide earlier lines.
            linewidth=1.2 + 2.4 * (1 - (i + 1) / len(labels)),
            **plots.line(i),
          )
        places = range(len(groups.labels))
        axes.set_xticks(places, [''] * len(places))
        if change == 'amplified':
          axes.set_xticklabels(groups.labels, rotation=40, ha='right')
          axes.set_xlabel(grouping)
      row[0].set_ylim(bottom=0)
      row[0].set_title(f'{title}, share of the tokens')
    top.legend(*panels[0][0].get_legend_handles_labels(), loc='outside right')
    _draw_cosines(bottom.subplots(), compared.cosines)
  return page


def _draw_cosines(axes, cosines: Mapping[str, Mapping[str, float]]) -> None:
  labels = list(cosines)
  values = np.array([[cosines[a][b] for b in labels] for a in labels])
  axes.imshow(values, vmin=-1, vmax=1, cmap='PuOr_r')
  places = range(len(labels))
  axes.set_xticks(places, labels, rotation=30, ha='right')
  axes.set_yticks(places, labels)
  axes.grid(visible=False)
  axes.set_title('Cosine between the gradients')
  for (i, j), value in np.ndenumerate(values):
    colour = 'white' if abs(value) > 0.6 else 'black'
    axes.text(j, i, f'{value:.2f}', ha='center', va='center', color=colour)


def levels_page(levels: levels_lib.Levels) -> figure.Figure:
  """Draws the ratios at each level, with the bounds on the level's ratios."""
  shown = levels.log_ratios
  tails = [np.quantile(x, (_TAIL, 1 - _TAIL)) for x in shown.values()]
  finite = [
    bound
    for x in levels.bounds.values()
    for bound in _log_bounds(x)
    if np.isfinite(bound)
  ]
  # All levels share one axis, so that the spreads of their ratios can be
  # compared.
  ends = [*np.concatenate(tails), *finite]
  edges = np.linspace(min(ends) * 1.05, max(ends) * 1.05, _NUM_BINS)
  with matplotlib.rc_context(plots.STYLE):
    page = figure.Figure(
      figsize=(7.5, 0.6 + 1.5 * len(shown)), layout='constrained'
    )
    panels = np.atleast_1d(page.subplots(len(shown), 1, sharex=True))
    for axes, (level, x) in zip(panels, shown.items(), strict=True):
      # Shares of the segments are drawn and not counts, because a batch has
      # hundreds of times more tokens than sequences.
      weights = np.full(len(x), 1 / len(x))
      axes.hist(x, edges, weights=weights, color='#BBBBBB')
      axes.set_title(f'{level}: {len(x)} segments, spread {x.std():.2g}')
      axes.set_ylabel('share')
      # Algorithms with equal bounds share a line. If their lines were drawn one
      # over the other, only the last line would be seen.
      alike: dict[levels_lib.Bounds, list[str]] = {}
      for label, bounds in levels.bounds.items():
        if bounds.level == level and not np.isnan(bounds.low):
          alike.setdefault(bounds, []).append(label)
      for i, (bounds, labels) in enumerate(alike.items()):
        outside = bounds.below + bounds.above
        text = f'{", ".join(labels)}: {outside:.1%} of the tokens outside'
        for bound in filter(math.isfinite, _log_bounds(bounds)):
          axes.axvline(bound, label=text, linewidth=1.2, **plots.line(i))
          text = '_'  # a second bound gets no entry of its own in the legend
      if alike:
        axes.legend(loc='upper left', bbox_to_anchor=(1.0, 1.0))
    panels[-1].set_xlabel('log-ratio, mean over the segment')
  return page


def _log_bounds(bounds: levels_lib.Bounds) -> tuple[float, float]:
  low = math.log(bounds.low) if bounds.low > 0 else -math.inf
  return low, math.log(bounds.high)


def values_page(
  arrays: saved_batch.Arrays, correlated: values_lib.Correlations
) -> figure.Figure:
  """Draws sampled values against a critic's values, and the correlations.

  Args:
    arrays: the arrays that `values.values` takes.
    correlated: the result of `values.correlations`.
  """
  turn_ids_BL = arrays['turn_ids_BL']
  sampled_BL = arrays['oracle_counts_BL'] > 1
  has_critic = 'old_values_BL' in arrays
  with matplotlib.rc_context(plots.STYLE):
    page = figure.Figure(figsize=(9.5, 4.2), layout='constrained')
    panels = page.subplots(1, 1 + has_critic, squeeze=False)[0]
    if has_critic:
      axes = panels[0]
      values_BL, guesses_BL = (
        arrays['oracle_values_BL'],
        arrays['old_values_BL'],
      )
      for i, turn in enumerate(np.unique(turn_ids_BL[sampled_BL])):
        own_BL = sampled_BL & (turn_ids_BL == turn)
        colour = plots.COLOURS[i % len(plots.COLOURS)]
        axes.scatter(
          guesses_BL[own_BL],
          values_BL[own_BL],
          s=9,
          color=colour,
          label=f'turn {turn}',
        )
      # The diagonal, on which the points of a perfect critic would lie.
      ends = [min(axes.get_xlim()[0], axes.get_ylim()[0])]
      ends.append(max(axes.get_xlim()[1], axes.get_ylim()[1]))
      axes.plot(ends, ends, color='#888888', linewidth=0.8)
      axes.set_title('Sampled values')
      axes.set_xlabel('value by the critic')
      axes.legend()
    axes = panels[-1]
    drawn = {'(perfect)': correlated.most, **correlated.estimators}
    for i, (name, by_turn) in enumerate(drawn.items()):
      axes.plot(
        correlated.turns, by_turn, marker='.', label=name, **plots.line(i)
      )
    axes.set_xticks(correlated.turns)
    axes.set_xlabel('turn')
    axes.set_title('Correlation of advantages with sampled advantages')
    axes.legend(loc='upper left', bbox_to_anchor=(1.0, 1.0))
  return page
