"""The texts that launchers submit, rendered from launch/templates."""

import base64
from collections.abc import Mapping, Sequence
import hashlib
import json
import pathlib
import re
import shlex
from typing import Any

from launch import accelerators
from launch import cloud
from launch import launchers
from launch import source as source_lib
from stppo_jax.commands.flags import overrides as overrides_lib

SOURCES = '.sources'  # the folder of unpacked sources, in the folder --root
_TEMPLATES = pathlib.Path(__file__).parent / 'templates'
_FIELD = re.compile(r'\{\{(\w+)(:plain)?\}\}')

# The flags of each run, and the number of runs that run at the same time.
Array = tuple[Sequence[Sequence[str]], str]


def render(
  name: str,
  values: Mapping[str, Any],
  overrides: Mapping[str, str | bool],
  *,
  source: source_lib.Source | None = None,
  array: Array | None = None,
) -> str:
  """Returns the text that a launcher submits.

  Args:
    name: the name of the launcher.
    values: the values of the launcher's options, of config and of workdir.
    overrides: keys of the config, as `command_line.parse` returns them.
    source: the source that the workers run; None = they have the code already.
    array: the runs of an array of Slurm; None to submit a single run.
  """
  launcher = launchers.LAUNCHERS[name]
  fields = {**values, **_fields(name, values, source)}
  if name != 'retriever':
    is_run = values['command'] == 'train'
    variables = {
      'COMMAND': '' if is_run else f'launch.{values["command"]}',
      'RESTARTS': str(values['restarts'] if launcher.run_restarts else 0),
      'RETRIEVER': values['retriever'],
      'SECRETS': '' if name == 'tpu' else values.get('secrets', ''),
    }
    variables = {key: value for key, value in variables.items() if value}
    fields['env'] = ['env', *(f'{key}={x}' for key, x in variables.items())]
    fields['env_list'] = [{'name': k, 'value': x} for k, x in variables.items()]
    fields['flags'] = flags_of_run(values, overrides)
  if array is None:
    return _fill(launcher.template, fields)
  # An array is one job whose tasks differ in their flags: the script chooses
  # the flags of a run by the number of its task.
  runs, fields['jobs'] = array
  fields['last'] = len(runs) - 1
  cases = [shlex.join(map(_travelling, flags)) for flags in runs]
  fields['cases'] = ''.join(
    f'  {n}) set -- {words} ;;\n' for n, words in enumerate(cases)
  )
  if '://' not in values['workdir']:
    folder = pathlib.PurePosixPath(values['workdir']).parent
    fields['log'] = f'{folder}/%a.slurm.log'
  return _fill('array.sbatch', fields)


def _fields(
  name: str, values: Mapping[str, Any], source: source_lib.Source | None
) -> dict[str, Any]:
  """Returns the values of the fields that only this launcher's template has."""
  if name == 'retriever':
    where = ['--host=0.0.0.0', '--port=8000']
    mounts, volumes = _shared(values, values['index'])
    return {
      'serve': [f'--index={values["index"]}', *where],
      'mounts': mounts,
      'volumes': volumes,
    }
  if source is None:
    return {}
  if name == 'slurm':
    folder = f'{values["root"]}/{SOURCES}'
    log = values['workdir'].rstrip('/')
    if '://' in log:
      log = f'{folder}/{values["name"]}'
    return {
      'source': f'{folder}/{source.name.partition(".")[0]}',
      'log': f'{log}.slurm.log',
    }
  if name == 'tpu':
    place = values['place'].rpartition('/')[0]
    # `patience` gives the launcher several polls to see that a run has ended,
    # before its workers delete the slice themselves. `delay` is the first pause
    # between two tries of the setup; each pause is twice the pause before.
    return {
      'patience': cloud.PATIENCE * values['poll'],
      'delay': -(-values['poll'] // 6),
      'left': round(3600 * values['left']),
      'machines': accelerators.find(values['accelerator']).machines,
      'source': f'{place}/{source.name}',
    }
  nodes, chips = accelerators.nodes(
    values['accelerator'], values['topology'], values['chips']
  )
  archive = base64.b64encode(source.data).decode()
  if values['dry_run']:
    archive = f'{len(archive)} bytes: {source.name}'
  mounts, volumes = _shared(values, values['workdir'])
  of_source: dict[str, Any] = {'configMap': {'name': values['name']}}
  return {
    'workers': nodes,
    'chips': chips,
    'archive': archive,
    'mounts': [{'name': 'source', 'mountPath': '/source'}, *mounts],
    'volumes': [{'name': 'source', **of_source}, *volumes],
  }


def _shared(values: Mapping[str, Any], place: str) -> tuple[list, list]:
  """Returns the mounts and the volumes that give pods access to a folder.

  If `place` is an address in a bucket, pods need neither mounts nor volumes.
  """
  if '://' in place:
    return [], []
  claim = {'claimName': values['claim']}
  return (
    [{'name': 'shared', 'mountPath': values['mount']}],
    [{'name': 'shared', 'persistentVolumeClaim': claim}],
  )


def _fill(template: str, fields: Mapping[str, Any]) -> str:
  """Returns a template in which values replace the fields.

  The value of `{{name}}` is quoted by the rules of the file's language, and the
  value of `{{name:plain}}` is not quoted.
  """
  text = (_TEMPLATES / template).read_text('utf-8')

  def quoted(match: re.Match) -> str:
    field = fields[match[1]]
    if match[2]:
      return str(field)
    if template.endswith('.yaml'):  # JSON is YAML
      return json.dumps(field)
    if isinstance(field, list):
      return shlex.join(field)
    return shlex.quote(str(field))

  return _FIELD.sub(quoted, text)


def flags_of_run(
  values: Mapping[str, Any], overrides: Mapping[str, str | bool]
) -> list[str]:
  """Returns the flags of the command that the workers run."""
  flags = [f'--config={values["config"]}', f'--workdir={values["workdir"]}']
  if values['command'] != 'train':
    flags.append(f'--report={values["workdir"]}/report.json')
  return flags + flags_of(overrides)


def _travelling(flag: str) -> str:
  """Returns a flag as workers need it.

  Workers read the config file from the unpacked source, so --config gets the
  path that the file has there.
  """
  name, _, value = flag.partition('=')
  return (
    flag if name != '--config' else f'{name}={source_lib.config_flag(value)}'
  )


def name_of(workdir: str) -> str:
  """Returns the name of the job that runs in a folder.

  The name ends with digits of a hash of the whole path, because jobs of
  different folders need different names: a second job of the same name would
  replace the first job, or be stopped together with it.
  """
  path = pathlib.PurePosixPath(workdir)
  digits = digest(str(path))[:6]
  name = re.sub(r'[^a-z0-9]+', '-', path.name.lower()).strip('-')
  name = name if name[:1].isalpha() else f'run-{name}'
  # Google Cloud and Kubernetes take 40 characters for the longest name.
  return f'{name[:33].rstrip("-")}-{digits}'


def flags_of(overrides: Mapping[str, str | bool]) -> list[str]:
  """Returns the flags that set keys of a config."""
  return [overrides_lib.as_flag(key, text) for key, text in overrides.items()]


def digest(text: str) -> str:
  """Returns the first 16 digits of the SHA-256 of a text."""
  return hashlib.sha256(text.encode()).hexdigest()[:16]
