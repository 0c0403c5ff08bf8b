"""Writes the tables of docs/collapse.md, and its pictures, from the CSV files.

    make docs

docs/collapse holds a compressed CSV file for each study that has been run. The
text of the page is written by hand; what stands between two comments that name
a study, or a table of alarms, is replaced.
"""

from collections.abc import Mapping
import pathlib
import re

from PIL import Image

from stppo_jax.tools import score_report
from stppo_jax.tools.ablation import alarm_tables
from stppo_jax.tools.ablation import figures
from stppo_jax.tools.ablation import results
from stppo_jax.tools.ablation import study as study_lib
from stppo_jax.tools.ablation import verdict
from studies import bounds
from studies import collapse
from studies import dead_critic
from studies import forecast
from studies import gpu
from studies import long_turns
from studies import narrow_bounds
from studies import real_text
from studies import sizes
from studies import steps_ahead

_FOLDER = pathlib.Path(__file__).parent
PAGE, TABLES = _FOLDER / 'collapse.md', _FOLDER / 'collapse'
_BLOCK = r'(<!-- {kind}{name} -->\n).*?(\n<!-- end of {name} -->)'
# The tables of alarms, and the thresholds in place of the default ones.
_ALARMS = {
  'alarms': {},
  'other thresholds': {'kl': 2.5, 'explained_variance': -1.0},
}
_FIRST = 'levels'
# The studies that have files of their own.
_OWN = {
  'dead_critic': dead_critic,
  'bounds': bounds,
  'narrow_bounds': narrow_bounds,
  'steps_ahead': steps_ahead,
  'gpu': gpu,
  'real_text': real_text,
  'sizes': sizes,
  'long_turns': long_turns,
}
# Those of them with comparisons of their own, each with a heading.
_COMPARISONS = {
  'dead_critic': {
    'The comparisons that were planned': dead_critic.COMPARISONS,
    'The comparison that was added afterwards': dead_critic.ADDED,
  },
  'bounds': {'The comparisons that were planned': bounds.COMPARISONS},
  'narrow_bounds': {
    'The comparisons that were planned': narrow_bounds.COMPARISONS
  },
  'steps_ahead': {
    'The comparisons with no steps ahead': steps_ahead.COMPARISONS
  },
  'real_text': {
    'The comparisons that were planned': real_text.COMPARISONS,
    'The comparisons that were added later': real_text.ADDED,
  },
  'sizes': {'The comparisons that were planned': sizes.COMPARISONS},
  'long_turns': {'The comparisons that were planned': long_turns.COMPARISONS},
}
# What the alarms and forecasts are not judged by: a study without stress, whose
# runs do not collapse, and one that is not complete.
_APART = ('steps_ahead', 'real_text')
_COLOURS = 24  # of a picture


def studies() -> dict[str, study_lib.Study]:
  """Returns the shipped studies by name."""
  contents = collapse.studies()
  contents |= {name: file.studies()[name] for name, file in _OWN.items()}
  return {name: study_lib.parse(name, x) for name, x in contents.items()}


def page(text: str) -> str:
  """Returns the text of the page with the tables of today's files."""
  for name, study in studies().items():
    text = _replaced(text, 'study ', name, _block(study))
  for name, thresholds in _ALARMS.items():
    text = _replaced(text, '', name, _alarms(thresholds))
  return _replaced(text, '', 'forecast', _forecast())


def _replaced(text: str, kind: str, name: str, made: str) -> str:
  """Returns the text with another block between the two comments of a name."""
  block = re.compile(_BLOCK.format(kind=kind, name=name), re.DOTALL)
  text, count = block.subn(lambda m: f'{m[1]}\n{made}\n{m[2]}', text)
  if count != 1:
    raise ValueError(f'{PAGE}: needs one block of {kind}{name}')
  return text


def _table(name: str) -> pathlib.Path:
  """Returns the file of a study's runs."""
  return TABLES / f'{name}.csv.gz'


def _tables() -> list[pathlib.Path]:
  """Returns the files of the studies by which alarms are judged."""
  names = [name for name in studies() if name not in _APART]
  return [path for name in names if (path := _table(name)).exists()]


def _forecast() -> str:
  """Returns what the page says of the metrics that forecast a collapse."""
  files = _tables()
  words = ' '.join(f'docs/collapse/{path.name}' for path in files)
  rows = score_report.as_markdown(forecast.of_tables(files)).rstrip()
  return f'```text\npython -m studies.forecast {words}\n```\n\n{rows}'


def _alarms(thresholds: Mapping[str, float]) -> str:
  """Returns what the page says of the alarms of all runs.

  Args:
    thresholds: the thresholds in place of those that the runs had. If there are
      any, the table has only their alarms.
  """
  files = _tables()
  words = [f'docs/collapse/{path.name}' for path in files]
  words += [f'--{name}={threshold:g}' for name, threshold in thresholds.items()]
  rings = [
    alarm_tables.of_table(run, thresholds)
    for run in results.distinct(x for path in files for x in results.read(path))
  ]
  rows = alarm_tables.table(rings, list(thresholds) or results.ALARMS)
  return (
    f'```text\npython -m stppo_jax alarms {" ".join(words)}\n```\n\n'
    f'{alarm_tables.title(rings)}:\n\n{score_report.as_markdown(rows).rstrip()}'
  )


def _copied(name: str) -> int:
  """Returns how many runs of a study the table of the first one has."""
  if name == _FIRST:
    return 0
  first, ours = (
    [(run.settings, run.seed) for run in results.read(_table(x))]
    for x in (_FIRST, name)
  )
  return sum(run in first for run in ours)


def _block(study: study_lib.Study) -> str:
  """Returns what the page says of a study."""
  runs = results.read(_table(study.name))
  planned = len(study.arms) * study.seeds
  copies = ''
  file = study.name if study.name in _OWN else 'collapse'
  command = (
    f'python -m stppo_jax ablate --config=studies/{file}.py:{study.name} '
    f'--workdir=runs/{study.name} --table=docs/collapse/{study.name}.csv.gz'
  )
  copied = _copied(study.name)
  if copied or (not runs and study.name not in (_FIRST, *_OWN)):
    command += f' --reuse=docs/collapse/{_FIRST}.csv.gz'
  if copied:
    copies = f'; {copied} of them are in study 1'
  if not runs:
    return (
      f'Not run yet: {planned} runs are planned{copies}. The command is\n\n'
      f'```text\n{command}\n```'
    )
  seeds = sorted({run.seed for run in runs})
  if seeds[0]:
    command += f' --seeds={",".join(map(str, seeds))}'
  made = 'All' if len(runs) == planned else f'{len(runs)} of'
  found = verdict.tables(study, runs)
  for title, comparisons in _COMPARISONS.get(study.name, {}).items():
    found[title] = dead_critic.analysis(runs, comparisons)
  return (
    f'{made} {planned} runs have been made{copies}. The command is\n\n'
    f'```text\n{command}\n```\n\n'
    f'{verdict.as_markdown(found)}\n'
    f'![Success over steps](collapse/{study.name}_success.png)\n\n'
    f'![Ratios, entropy, KL and critic](collapse/{study.name}_inside.png)'
  )


def main() -> None:
  """Writes the page and the pictures."""
  PAGE.write_text(page(PAGE.read_text('utf-8')), encoding='utf-8')
  for study in studies().values():
    if runs := results.read(_table(study.name)):
      for picture in figures.draw(study, runs, TABLES, formats=('png',)):
        _shrink(picture)


def _shrink(path: pathlib.Path) -> None:
  """Writes a picture again with few colours, in a quarter of the bytes."""
  with Image.open(path) as picture:
    # The octree keeps the colours of thick lines, which a median cut mixes.
    few = picture.convert('RGB').quantize(
      _COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
    )
  few.save(path, optimize=True)


if __name__ == '__main__':
  main()
