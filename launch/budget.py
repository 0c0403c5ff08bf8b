"""Limits what the slices of a run, or of a sweep, cost."""

from collections.abc import Mapping
import json
import time
from typing import Any

from launch import cloud


def stopped(place: str) -> str:
  """Returns the address that says whether runs of a sweep may still begin."""
  return f'{place.rstrip("/")}.launch/stopped'


class Budget:
  """The limits of the options --max_slices, --max_hours and --max_cost.

  The module `slices` writes the records. A slice counts from the time at which
  it was seen to be active.
  """

  def __init__(self, values: Mapping[str, Any], chips: int):
    """Takes the values of the options, and the number of chips of a slice."""
    self._values, self._chips = values, chips

  def paid(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records that count: of all runs of a sweep, or of this run.

    Raises:
      CloudError: the bucket could not be read.
    """
    if not self._values['budget']:
      return records
    text = cloud.read(f'{self._values["budget"]}/*.launch/*/record')
    return list(map(json.loads, text.splitlines()))

  def hours_left(self, paid: list[dict[str, Any]]) -> float:
    """Returns the number of hours for which a further slice may be paid."""
    v = self._values
    most = v['max_hours']
    if v['max_cost']:
      most = min(most, v['max_cost'] / v['price'] / self._chips)
    return max(0.0, most - _hours(paid))

  def __str__(self) -> str:
    hours = self.hours_left([])
    price, number = self._values['price'], self._values['max_slices']
    cost = hours * self._chips * price
    return (
      f'at most {hours:g} h of {self._chips} chips, in up to {number} slices '
      f'one after the other: {hours * self._chips:g} chip-hours, '
      + (f'which cost {cost:.2f}' if price else 'give --price for the cost')
      + '; --max_hours, --max_cost and --max_slices limit them'
    )

  def check(self, paid: list[dict[str, Any]], *, asks: bool = False) -> None:
    """Checks that the slices have not used up the budget.

    Args:
      paid: see `paid`.
      asks: whether another slice is to be requested.

    Raises:
      Ended: the budget is used up, or no further slice may be requested.
      CloudError: the bucket could not be read.
    """
    v, hours = self._values, _hours(paid)
    spent = {'max_hours': hours, 'max_cost': hours * self._chips * v['price']}
    # A slice that never existed does not count. A slice that was requested and
    # may still come counts.
    had = sum(x['active'] > 0 or not x['ended'] for x in paid)
    if asks:
      spent['max_slices'] = had
      if v['budget'] and cloud.read(stopped(v['budget'])).strip():
        raise cloud.Ended('the sweep was stopped')
    for key, used in spent.items():
      if v[key] and used >= v[key]:
        raise cloud.Ended(
          f'--{key}={v[key]:g} is spent ({had} slices, {hours:.2f} hours); the '
          'same command with a larger value goes on'
        )


def _hours(paid: list[dict[str, Any]]) -> float:
  now = time.time()
  seconds = ((x['ended'] or now) - x['active'] for x in paid if x['active'])
  return sum(seconds) / 3600
