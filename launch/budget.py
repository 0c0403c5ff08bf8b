"""Limits what the slices of a run, or of a sweep, cost."""

from collections.abc import Mapping
import json
import time
from typing import Any

from launch import cloud


def stopped(place: str) -> str:
  """Returns the address of the marker that stops a sweep.

  If the marker has text, no run of the sweep may request a further slice.

  Args:
    place: the address of the folder of the sweep.
  """
  return f'{place.rstrip("/")}.launch/stopped'


class Budget:
  """The limits of the options --max_slices, --max_hours and --max_cost.

  The limits are compared with records of slices, which the module `slices`
  writes. A slice counts from the time at which it was first seen to be active.
  """

  def __init__(self, values: Mapping[str, Any], chips: int):
    """Takes the values of the options, and the number of chips of a slice."""
    self._values, self._chips = values, chips

  def paid(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records of all slices that count towards the budget.

    Args:
      records: the records of the slices of this run. They are returned if the
        run has a budget of its own. If the run is part of a sweep, the records
        of all runs of the sweep are read and returned instead.

    Raises:
      CloudError: if the bucket cannot be read.
    """
    if not self._values['budget']:
      return records
    text = cloud.read(f'{self._values["budget"]}/*.launch/*/record')
    return list(map(json.loads, text.splitlines()))

  def hours_left(self, paid: list[dict[str, Any]]) -> float:
    """Returns the hours that the budget leaves for a further slice."""
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
      paid: the records that the method `paid` returned.
      asks: whether another slice is to be requested.

    Raises:
      Ended: if the budget is used up, or no further slice may be requested.
      CloudError: if the bucket cannot be read.
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
