"""Groups the runs of each experiment, and lists how experiments differ."""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import statistics
from typing import Any

from stppo_jax.configs import schema
from stppo_jax.tools.report import run_files

# Config keys in which the runs of one experiment may differ: the seed, the
# length and the devices of a run, and what the run saves and reports.
_OF_A_RUN = (
  'seed',
  'title',
  'num_steps',
  'checkpoint',
  'writer',
  'profile',
  'alarms',
  'mesh',
  'evaluate.every',
  'retrieval.url',
)
_ABSENT = '(absent)'
_LABEL_KEYS = 3  # the most config keys in a label


@dataclasses.dataclass(frozen=True)
class Group:
  """The runs of one experiment, such as runs with different seeds.

  The configs of these runs may differ only in the keys of `_OF_A_RUN`.

  Attributes:
    label: a text for legends that tells the group from all other groups.
    runs: the runs of the group, at least one.
  """

  label: str
  runs: list[run_files.Run]


def group(runs: Sequence[run_files.Run]) -> list[Group]:
  """Returns the groups of runs, in the order of each group's first run."""
  by_settings: dict[str, list[run_files.Run]] = {}
  for run in runs:
    by_settings.setdefault(_settings(run), []).append(run)
  groups = list(by_settings.values())
  labels = _labels([members[0] for members in groups])
  return [Group(label, members) for label, members in zip(labels, groups)]


def differences(runs: Sequence[run_files.Run]) -> list[str]:
  """Returns the config keys whose values differ between runs."""
  return [
    key
    for key in _keys(runs)
    if len({_text(run.recorded.get(key, _ABSENT)) for run in runs}) > 1
  ]


def _keys(runs: Sequence[run_files.Run]) -> list[str]:
  return sorted({key for run in runs for key in run.recorded})


def problems(groups: Sequence[Group]) -> list[str]:
  """Returns a message for each group not comparable with the first group.

  Two runs can be compared if they have the same environment. If both runs were
  evaluated, they must also have an evaluation score in common.
  """
  first = groups[0].runs[0]
  found = []
  for other in (members.runs[0] for members in groups[1:]):
    start = f'{first.place} and {other.place}: cannot be compared: '
    tasks = [_environment(run) for run in (first, other)]
    scores = [_scores(run) for run in (first, other)]
    if tasks[0] != tasks[1]:
      found.append(f'{start}env.name is {tasks[0]} and {tasks[1]}')
    elif all(scores) and not set(scores[0]) & set(scores[1]):
      texts = ' and '.join(map(', '.join, scores))
      found.append(f'{start}they have no evaluation in common: {texts}')
  return found


def names(runs: Sequence[run_files.Run]) -> list[str]:
  """Returns short names of runs; runs of different folders differ in name."""
  parts = [pathlib.Path(run.place).resolve().parts for run in runs]
  # A name is the end of the path, just long enough to tell all runs apart.
  depth = 1
  while depth < max(map(len, parts)):
    if len({part[-depth:] for part in parts}) == len(set(parts)):
      break
    depth += 1
  return ['/'.join(part[-depth:]) for part in parts]


def band(members: Group, metric: str) -> list[tuple[int, float, float, float]]:
  """Returns (step, mean, min, max) of a metric over the runs of a group.

  There is one tuple for each step in which some run has the metric.
  """
  values: dict[int, list[float]] = {}
  for run in members.runs:
    for step, value in run.column(metric).items():
      values.setdefault(step, []).append(value)
  return [
    (step, statistics.fmean(x), min(x), max(x))
    for step, x in sorted(values.items())
  ]


def _environment(run: run_files.Run) -> str:
  # The recorded config of an earlier version lacks newer keys. These keys get
  # the values that runs had before the keys existed.
  return {**schema.earlier(), **run.recorded}['env.name']


def _scores(run: run_files.Run) -> list[str]:
  return [name for name in run.columns if name.startswith('val/')]


def _settings(run: run_files.Run) -> str:
  """Returns a text of a run's config values without the keys of `_OF_A_RUN`."""
  if not run.recorded:  # a run without a config is a group of its own
    return run.place
  return _text({k: v for k, v in run.recorded.items() if not _is_free(k)})


def _is_free(key: str) -> bool:
  return any(key == k or key.startswith(f'{k}.') for k in _OF_A_RUN)


def _labels(runs: Sequence[run_files.Run]) -> list[str]:
  """Returns a label for each run, which begins with the title of the run.

  If several runs have the same title, some settings in which these runs differ
  are added. If labels are still equal, names of folders are added, too.
  """
  titles = [run.title for run in runs]
  labels = []
  for run, title in zip(runs, titles):
    # Runs with the same title are told apart by their settings, which say more
    # to a reader than names of folders.
    namesakes = [r for r, t in zip(runs, titles) if t == title]
    keys = [key for key in differences(namesakes) if not _is_free(key)]
    words = [title]
    for key in keys[:_LABEL_KEYS]:
      value = _shown(run.recorded.get(key, _ABSENT))
      words.append(f'{key.rpartition(".")[2]}={value}')
    labels.append(' '.join(words))
  # Labels may still be equal, for runs without a config or for runs that differ
  # in more keys than a label shows. Names of folders then tell them apart.
  return [
    label if labels.count(label) == 1 else f'{label} ({name})'
    for label, name in zip(labels, names(runs))
  ]


def _shown(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)


def _text(value: Any) -> str:
  return json.dumps(value, sort_keys=True, default=str)


def config_rows(runs: Sequence[run_files.Run]) -> list[tuple[str, list[str]]]:
  """Returns (key, the value of each run as text) for each config key."""
  return [
    (key, [_shown(run.recorded.get(key, _ABSENT)) for run in runs])
    for key in _keys(runs)
  ]
