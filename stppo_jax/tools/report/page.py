"""Makes the HTML page: one file, which opens from disk and loads nothing.

The file contains its style, its program, and its data as JSON in a script
element. A content security policy names the digest of the program, so a browser
runs no other program on the page. The policy also forbids loading files.
"""

import base64
from collections.abc import Mapping, Sequence
import hashlib
import importlib.resources
import json
import re
from typing import Any

from stppo_jax.tools.report import comparison
from stppo_jax.tools.report import dialogue_data
from stppo_jax.tools.report import output
from stppo_jax.tools.report import panels
from stppo_jax.tools.report import run_files
from stppo_jax.tools.report import static
from stppo_jax.tools.report import summary

# The type of the script elements with packed dialogues. The type names no
# script language, so the browser does not run them.
_PART = 'application/octet-stream'
_FILES = 'page'
_PROGRAMS = ('base.js', 'charts.js', 'tables.js', 'viewer.js', 'page.js')
_HEAD_ROOM = 1 << 20  # bytes kept free for the program, the tables, the index


def html(
  groups: Sequence[comparison.Group],
  *,
  losses: list[str],
  most_dialogues: int,
  most_bytes: int,
  tables: Mapping[str, Sequence[Sequence[str]]],
  pictures: Mapping[str, bytes],
) -> str:
  """Returns the HTML of a page about runs.

  Args:
    groups: the runs, grouped by experiment.
    losses: messages about data that could not be read, which the page shows at
      its top. A message is added for each dialogue that cannot be read.
    most_dialogues: the largest number of dialogues in the page.
    most_bytes: the approximate limit for the size of the page, in bytes.
    tables: maps the title of a table to the rows of the table. A row is a list
      of texts, and the first row is the heading. These tables come before the
      summary.
    pictures: maps the name of a picture to the content of a PNG file, which
      becomes a part of the page.
  """
  runs = [run for members in groups for run in members.runs]
  content = contents(groups)
  packed = [dialogue_data.pack_json(metrics(run)) for run in runs]
  encoded = dialogue_data.encode(
    runs,
    most=most_dialogues,
    most_bytes=most_bytes - sum(map(len, packed)) - _HEAD_ROOM,
    losses=losses,
  )
  content |= {
    'tables': tables,
    'pictures': {
      name: f'data:image/png;base64,{base64.b64encode(picture).decode()}'
      for name, picture in pictures.items()
    },
    # `losses` is read only now, because `encode` adds messages to it.
    'notes': [*losses, *encoded.notes],
    'metrics': packed,
    'index': dialogue_data.pack_json(encoded.index),
  }
  program = '\n'.join(map(_file, _PROGRAMS))
  fills = {
    'MARK': output.MARK,
    # The digest covers all text between the tags of the script, with the line
    # breaks of the template. If one character differs, no browser runs the
    # program.
    'DIGEST': _digest(f'\n{program}\n'),
    'STYLE': _file('page.css'),
    'PROGRAM': program,
    # The parts come after the program, which unpacks a part only if one of its
    # dialogues is shown. Most parts are never shown.
    'PARTS': '\n'.join(
      f'<script type="{_PART}" id="part-{number}">{packed}</script>'
      for number, packed in enumerate(encoded.parts)
    ),
    'STATIC': static.content(content, groups),
    'DATA': _script_json(content),
  }
  # All names in double brackets are replaced in one pass. Otherwise such a name
  # in an inserted text of a run would be replaced, too.
  return re.sub(r'\[\[(\w+)\]\]', lambda m: fills[m[1]], _file('template.html'))


def contents(groups: Sequence[comparison.Group]) -> dict[str, Any]:
  """Returns the data of the page, except metrics and dialogues, as plain types.

  A list about runs has one element for each run, and a list about groups has
  one element for each group, in the order of `groups`. Where an element gives
  a group's mean and range over seeds, it is a result of `summary.spread`.
  """
  runs = [run for members in groups for run in members.runs]
  firsts = [members.runs[0] for members in groups]
  numbers = [n for n, members in enumerate(groups) for _ in members.runs]
  names = dict.fromkeys(n for run in runs for n in run.columns)
  return {
    'groups': [members.label for members in groups],
    'runs': [
      {
        'name': name,
        'folder': run.place,
        'group': number,
        'seed': run.seed,
        'state': run.state.state,
        'note': run.state.note,
        'step': run.lines[-1]['step'],
        'num_steps': run.state.num_steps,
      }
      for run, name, number in zip(runs, comparison.names(runs), numbers)
    ],
    'summary': [
      {
        'name': line.name,
        'note': line.note,
        'digits': line.digits,
        'groups': [
          summary.spread([line.value(run) for run in members.runs])
          for members in groups
        ],
        'runs': [line.value(run) for run in runs],
      }
      for line in summary.lines(runs)
    ],
    'evaluation': summary.evaluation_table(groups),
    'alarms': [alarm._asdict() for alarm in summary.alarms(runs)],
    'by_turn': [summary.outside_by_turn(run) for run in runs],
    'phases': [summary.phases(run) for run in runs],
    'sections': panels.layout(list(names)),
    'lines': list(map(_lines, firsts)),
    'config': comparison.config_rows(firsts),
    'differences': comparison.differences(firsts),
  }


def metrics(run: run_files.Run) -> dict[str, Any]:
  """Returns the steps of a run, and a column of values for each metric.

  A column has one value for each step. The value is None if the step does not
  have the metric.
  """
  steps = [line['step'] for line in run.lines]
  return {
    'steps': steps,
    'columns': {
      name: [dialogue_data.rounded(column.get(step)) for step in steps]
      for name, column in run.columns.items()
    },
  }


def _lines(run: run_files.Run) -> Mapping[str, Any]:
  """Returns the config values that figures draw as horizontal lines, by key."""
  return {
    key: run.recorded[key]
    for key in panels.LINES.values()
    if run_files.is_number(run.recorded.get(key))
  }


def _script_json(value: Any) -> str:
  """Returns a value as JSON that cannot end the script element around it."""
  # HTML has no escapes inside a script element, which ends at the first
  # </script>, even in a string. So <, > and & are written as escapes of JSON.
  text = json.dumps(value, separators=(',', ':'), allow_nan=False)
  for character in '<>&':
    text = text.replace(character, f'\\u{ord(character):04x}')
  return text


def _file(name: str) -> str:
  folder = importlib.resources.files('stppo_jax.tools.report') / _FILES
  return (folder / name).read_text('utf-8')


def _digest(program: str) -> str:
  """Returns the digest by which a content security policy allows a script."""
  return base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
