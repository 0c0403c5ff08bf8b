"""Reads studies: which algorithms, settings and seeds are compared.

A config file describes its studies in a function `studies()`, see
docs/your_own_study.md. An arm is a config that is trained once for each seed.
Every arm belongs to a group, and is compared with the other arms of the group.
A start is a policy that `sft` trains once. If an arm names a start, the arm's
runs train from this policy, whatever their seed.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import re
from typing import Any

from stppo_jax import settings

_KEYS = ('title', 'seeds', 'arms', 'starts')
_ALL_PAIRS = 4  # the most arms of a group in which all pairs are compared


@dataclasses.dataclass(frozen=True)
class Arm:
  """One config of a study.

  Attributes:
    group: the name of the arm's group; '' in a study with a single group.
    name: the name of the arm, which no other arm of the group has.
    algorithm: the arm's algorithm, a key of the table of algorithms.
    start: the name of the supervised start that the arm trains from. '' means
      that the arm trains from the policy that its config names.
    changes: the values that the arm sets, by dotted config key.
  """

  group: str
  name: str
  algorithm: str
  start: str
  changes: Mapping[str, Any]

  @property
  def key(self) -> tuple[str, str]:
    """Returns the group and the name, a pair that is unique in the study."""
    return self.group, self.name

  def run_name(self, seed: int) -> str:
    """Returns the name of the arm's run that has this seed.

    The name can be used as the name of a folder.
    """
    words = [self.group, self.name, f'seed{seed}']
    return '-'.join(file_name(word) for word in words if word)


@dataclasses.dataclass(frozen=True)
class Study:
  """Arms that are trained with the same seeds and compared.

  Attributes:
    name: the name of the study in the config file.
    title: a few words on the settings that the study varies.
    seeds: the number of seeds that the study is planned with.
    arms: the arms of the study, group by group.
    starts: maps the name of a supervised start to the values that it sets, by
      dotted config key.
  """

  name: str
  title: str
  seeds: int
  arms: Sequence[Arm]
  starts: Mapping[str, Mapping[str, Any]]

  @property
  def groups(self) -> dict[str, list[Arm]]:
    """Returns the arms by the name of their group, in the study's order."""
    groups: dict[str, list[Arm]] = {}
    for arm in self.arms:
      groups.setdefault(arm.group, []).append(arm)
    return groups

  def pairs(self) -> list[tuple[Arm, Arm]]:
    """Returns the pairs of arms to compare: (arm, the arm to subtract).

    In a small group, all pairs are compared. In a group of more than
    `_ALL_PAIRS` arms, each arm is compared with the first arm of the group.
    """
    pairs = []
    for arms in self.groups.values():
      found = list(itertools.combinations(arms, 2))
      if len(arms) > _ALL_PAIRS:
        found = found[: len(arms) - 1]
      pairs += [(second, first) for first, second in found]
    return pairs

  def of_groups(self, names: Sequence[str]) -> 'Study':
    """Returns the study with only the named groups.

    Raises:
      ValueError: the study has no group with one of the names.
    """
    for name in names:
      if name not in self.groups:
        named = [group for group in self.groups if group]
        single = ', which has a single group, without a name'
        choices = settings.closest(name, named) if named else single
        raise ValueError(f'{name}: no group of study {self.name}{choices}')
    arms = [arm for arm in self.arms if arm.group in names]
    return dataclasses.replace(self, arms=arms)


def parse(name: str, content: Any) -> Study:
  """Returns the study that a dict describes.

  Raises:
    ValueError: `content` does not describe a study.
  """
  start = f'study {name}: '
  if not isinstance(content, dict):
    raise ValueError(f'{start}must be a dict, not {type(content).__name__}')
  for key in content:
    if key not in _KEYS:
      choices = settings.closest(str(key), _KEYS)
      raise ValueError(f'{start}unknown key {key!r}{choices}')
  seeds, starts = content.get('seeds'), content.get('starts', {})
  groups: Any = content.get('arms')
  # `isinstance` would accept True as an int, which would then mean one seed.
  if type(seeds) is not int or seeds < 1:
    raise ValueError(
      f'{start}seeds={seeds!r}: must be a whole number, 1 or more'
    )
  if not _is_nested(groups) or not all(map(_is_nested, groups.values())):
    raise ValueError(
      f'{start}arms must be a dict of groups, such as '
      "{'': {'token_ppo': {}, 'st_ppo': {}}}"
    )
  for group in groups:
    if ',' in str(group):
      raise ValueError(
        f'{start}group {group!r}: must have no comma, because commas separate '
        'the groups of --groups'
      )
  arms = [
    _arm(start, group, arm, dict(changes), starts)
    for group, members in groups.items()
    for arm, changes in members.items()
  ]
  # Different arms may still give the same folder name, because `file_name`
  # replaces characters.
  names = [arm.run_name(0) for arm in arms]
  for run in names:
    if names.count(run) > 1:
      raise ValueError(f'{start}two arms have runs named {run}')
  return Study(name, content.get('title', name), seeds, arms, starts)


def _arm(start, group, name, changes, starts) -> Arm:
  made = changes.pop('start', '')
  if made and made not in starts:
    choices = settings.closest(made, list(starts))
    raise ValueError(f'{start}arm {name}: unknown start {made!r}{choices}')
  return Arm(group, name, changes.pop('algorithm', name), made, changes)


def file_name(text: str) -> str:
  """Returns a text with `_` in place of characters unfit for a file name."""
  return re.sub(r'[^A-Za-z0-9_.+-]+', '_', text)


def _is_nested(value: Any) -> bool:
  """Returns whether a value is a non-empty dict whose values are dicts."""
  return (
    isinstance(value, dict)
    and bool(value)
    and all(isinstance(x, dict) for x in value.values())
  )
