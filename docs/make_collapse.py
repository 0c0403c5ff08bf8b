"""Writes the tables of docs/collapse.md, and its pictures, from the CSV files.

    make docs

docs/collapse holds a CSV file for each study that has been run. The text of the
page is written by hand; what stands between two comments that name a study, or
the alarms, is replaced.
"""

import pathlib
import re

from stppo_jax.analysis import score_report
from stppo_jax.analysis.ablation import figures
from stppo_jax.analysis.ablation import results
from stppo_jax.analysis.ablation import study as study_lib
from stppo_jax.analysis.ablation import verdict
from stppo_jax.configs import collapse
from stppo_jax.records import success

_FOLDER = pathlib.Path(__file__).parent
PAGE, TABLES = _FOLDER / 'collapse.md', _FOLDER / 'collapse'
_BLOCK = r'(<!-- {kind}{name} -->\n).*?(\n<!-- end of {name} -->)'
_ALARMS = 'alarms'
_FIRST = 'levels'


def studies() -> dict[str, study_lib.Study]:
  """Returns the shipped studies by name."""
  return {
    name: study_lib.parse(name, content)
    for name, content in collapse.studies().items()
  }


def page(text: str) -> str:
  """Returns the text of the page with the tables of today's CSV files."""
  for name, study in studies().items():
    text = _replaced(text, 'study ', name, _block(study))
  return _replaced(text, '', _ALARMS, _alarms())


def _replaced(text: str, kind: str, name: str, made: str) -> str:
  """Returns the text with another block between the two comments of a name."""
  block = re.compile(_BLOCK.format(kind=kind, name=name), re.DOTALL)
  text, count = block.subn(lambda m: f'{m[1]}\n{made}\n{m[2]}', text)
  if count != 1:
    raise ValueError(f'{PAGE}: needs one block of {kind}{name}')
  return text


def _alarms() -> str:
  """Returns what the page says of the alarms of all runs."""
  # A study may have runs of another one, which count once.
  runs = {
    (run.settings, run.seed): run
    for name in studies()
    for run in results.read(TABLES / f'{name}.csv')
  }
  collapsed = sum(
    success.curve(run.per_step('success')).collapsed for run in runs.values()
  )
  return (
    f'{len(runs)} runs, {collapsed} of them collapsed:\n\n'
    + score_report.as_markdown(verdict.alarms(list(runs.values()))).rstrip()
  )


def _block(study: study_lib.Study) -> str:
  """Returns what the page says of a study."""
  runs = results.read(TABLES / f'{study.name}.csv')
  command = (
    f'python -m stppo_jax ablate --config=configs/collapse.py:{study.name} '
    f'--workdir=runs/{study.name} --table=docs/collapse/{study.name}.csv'
  )
  if study.name != _FIRST:  # it may have runs that others need, too
    command += f' --reuse=docs/collapse/{_FIRST}.csv'
  planned = len(study.arms) * study.seeds
  if not runs:
    return (
      f'Not run yet: {planned} runs are planned. The command is\n\n'
      f'```text\n{command}\n```'
    )
  return (
    f'{len(runs)} of {planned} planned runs. The command that goes on with '
    f'them is\n\n```text\n{command}\n```\n\n'
    f'{verdict.as_markdown(study, runs)}\n'
    f'![Success over steps](collapse/{study.name}_success.png)\n\n'
    f'![Ratios, entropy, KL and critic](collapse/{study.name}_inside.png)'
  )


def main() -> None:
  """Writes the page and the pictures."""
  PAGE.write_text(page(PAGE.read_text('utf-8')), encoding='utf-8')
  for study in studies().values():
    if runs := results.read(TABLES / f'{study.name}.csv'):
      figures.draw(study, runs, TABLES, formats=('png',))


if __name__ == '__main__':
  main()
