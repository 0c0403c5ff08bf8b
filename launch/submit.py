"""Submit a run to machines: renders a template of launch/templates.

python -m launch.submit LAUNCHER --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--OPTION=VALUE ...] [--config.KEY=VALUE ...] [--dry_run | --stop]

  LAUNCHER            local, slurm, tpu, jobset, xpk, sky, or retriever
  --config, --workdir as for train; the same command resumes the run
  --config.KEY=VALUE  sets a key of the config
  --OPTION=VALUE      an option of the launcher; launch/README.md lists them
  --dry_run           prints exactly what would be submitted
  --stop              ends the run instead: it saves, and can be resumed

The exit code is 2 for wrong flags and for a tool that is not installed,
otherwise that of the tool.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

from absl import flags as absl_flags

from launch import launchers
from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import overrides as overrides_lib

_TEMPLATES = launchers.ROOT / 'launch' / 'templates'
_FIELD = re.compile(r'\{\{(\w+)(?::(shell|plain))?\}\}')
_LITERAL = re.compile(r'\d+|true|false')
_NAME = re.compile(r'[a-z]([-a-z0-9]{0,38}[a-z0-9])?')
# Folders of one machine, which no other sees and a new one does not have.
_OWN_FOLDERS = ('/tmp', '/var/tmp', '/dev/shm', '/run')
_OF_RUNS = ('config', 'workdir')
_SECRET = re.compile(r'(?i)\w*(token|secret|password|api_key)=|://[^/\s]*@')


# The flags of many runs, and how many of them run at once.
Array = tuple[Sequence[Sequence[str]], str]


def main(argv: Sequence[str], *, array: Array | None = None) -> int:
  """Renders and submits; returns the exit code.

  Args:
    argv: the name of the launcher, and flags.
    array: with the launcher slurm, the runs of an array; `argv` then has the
      flags of its first run.
  """
  if not argv or argv[0] in ('-h', '--help', 'help'):
    print(__doc__)
    return 0 if argv else 2
  name, *flags = argv
  try:
    if name not in launchers.LAUNCHERS:
      choices = settings.closest(name, list(launchers.LAUNCHERS))
      raise exits.Misconfigured(f'{name}: unknown launcher{choices}')
    launcher = launchers.LAUNCHERS[name]
    parsed = flags_for(name, 'dry_run', 'stop')
    needed = {} if name == 'retriever' else dict.fromkeys(_OF_RUNS)
    needed |= launchers.options(name)
    given = command_line.parse(
      parsed,
      flags,
      required=[key for key, default in needed.items() if default is None],
      overrides=True,
    )
    values = _values(name, parsed, given)
    text = render(name, values, given.overrides, array=array)
  except exits.Misconfigured as error:
    print(error, file=sys.stderr)
    return 2
  words = launcher.stop if parsed.stop else launcher.submit
  words = [_with_values(word, values) for word in words]
  if not words:
    print(f'{name}: has no --stop; end it with Ctrl-C', file=sys.stderr)
    return 2
  if parsed.dry_run:
    # The text alone is on standard output.
    print(f'{shlex.join(words)}:', file=sys.stderr)
    print('' if parsed.stop else text, end='')
    return 0
  # A script needs the tool that ends its run, too.
  is_script = words[0] == 'bash' and bool(launcher.stop)
  tool = launcher.stop[0] if is_script else words[0]
  if shutil.which(tool) is None:
    print(
      f'{tool}: not installed; --dry_run prints what it would be given',
      file=sys.stderr,
    )
    return 2
  if name == 'slurm':  # it does not make the folder of its logs
    folder = pathlib.Path(values['workdir']).parent
    folder.mkdir(parents=True, exist_ok=True)
  return _submit(words, text)


def render(
  name: str,
  values: Mapping[str, str],
  overrides: Mapping[str, str | bool],
  *,
  array: Array | None = None,
) -> str:
  """Returns the text that a launcher submits.

  Args:
    name: the name of the launcher.
    values: the values of its options, of config and of workdir.
    overrides: keys of the config, as `command_line.parse` returns them.
    array: the runs of an array, see `main`.
  """
  launcher = launchers.LAUNCHERS[name]
  fields: dict[str, object] = {'root': str(launchers.ROOT), **values}
  if name == 'retriever':
    where = ['--host=0.0.0.0', '--port=8000']
    fields['serve'] = [f'--index={values["index"]}', *where]
    return _fill(launcher.template, fields)
  train = [f'--config={values["config"]}', f'--workdir={values["workdir"]}']
  train += flags_of(overrides)
  variables = {
    'RESTARTS': values['restarts'] if launcher.run_restarts else '0',
    'RETRIEVER': values['retriever'],
    'SECRETS': values['secrets'],
  }
  variables = {key: value for key, value in variables.items() if value}
  assignments = [f'{key}={value}' for key, value in variables.items()]
  fields |= {
    'env': ['env', *assignments],
    'env_list': [{'name': k, 'value': x} for k, x in variables.items()],
    'env_map': variables,
    'train': train,
    'command': shlex.join(['env', *assignments, 'launch/run.sh', *train]),
    'log': f'{values["workdir"].rstrip("/")}.slurm.log',
  }
  if name == 'tpu':
    fields['startup'] = _fill('startup.sh', fields)
    fields['spot'] = '--spot' if values['spot'] == 'true' else ''
  if array is not None:
    runs, fields['jobs'] = array
    fields['last'] = len(runs) - 1
    fields['cases'] = ''.join(
      f'  {n}) set -- {shlex.join(flags)} ;;\n' for n, flags in enumerate(runs)
    )
    folder = pathlib.PurePosixPath(values['workdir']).parent
    fields['log'] = f'{folder}/%a.slurm.log'
    return _fill('array.sbatch', fields)
  return _fill(launcher.template, fields)


def _fill(template: str, fields: Mapping[str, object]) -> str:
  """Returns a template with its fields.

  `{{name}}` is quoted as the language of the file needs it, `{{name:shell}}` as
  the shell does, and `{{name:plain}}` not at all.
  """
  text = (_TEMPLATES / template).read_text('utf-8')
  default = 'yaml' if template.endswith('.yaml') else 'shell'

  def quoted(match: re.Match) -> str:
    field, language = fields[match[1]], match[2] or default
    if language == 'plain':
      return str(field)
    if language == 'yaml':  # JSON is YAML
      is_literal = isinstance(field, str) and _LITERAL.fullmatch(field)
      return str(field) if is_literal else json.dumps(field)
    if isinstance(field, list):
      return shlex.join(field)
    return shlex.quote(str(field))

  return _FIELD.sub(quoted, text)


def flags_for(name: str, *switches: str) -> absl_flags.FlagValues:
  """Returns the flags of a launcher, for texts, and switches."""
  return command_line.flags(
    config=None,
    workdir=None,
    **launchers.options(name),
    **dict.fromkeys(switches, False),
  )


def _values(
  name: str, flags: absl_flags.FlagValues, given: command_line.Given
) -> dict[str, str]:
  """Returns the checked values of all flags.

  Raises:
    Misconfigured: some are missing or wrong.
  """
  launcher, errors = launchers.LAUNCHERS[name], list(given.errors)
  values = {
    key: value
    for key, value in flags.flag_values_dict().items()
    if not isinstance(value, bool)
  }
  values = {key: x or '' for key, x in values.items() if x is not None}
  if name != 'retriever' and 'workdir' in values:
    values['name'] = values['name'] or name_of(values['workdir'])
    if launcher.shared:
      errors += _workdir_problems(values['workdir'], values.get('mount', ''))
  if not _NAME.fullmatch(values['name'] or 'x'):
    errors.append(
      f'--name={values["name"]}: must be at most 40 lowercase letters, digits '
      'and hyphens, and begin with a letter'
    )
  for key in ('restarts', 'nodes', 'processes', 'workers', 'replicas', 'gpus'):
    if values.get(key) and not values[key].isdecimal():
      errors.append(f'--{key}={values[key]}: must be a whole number')
  if name == 'local' and not errors:
    processes, gpus = int(values['processes']), int(values['gpus'])
    if not processes or gpus % processes:
      errors.append(
        f'--processes={processes}: must be greater than 0 and divide '
        f'--gpus={gpus}, because each process gets as many'
      )
  pairs = [*values.items(), *given.overrides.items()]
  errors += [
    f'--{key}: looks like a secret; put it into the file of --secrets, because '
    'arguments are logged'
    for key, value in pairs
    if _SECRET.search(f'{key}={value}' if key != 'secret' else str(value))
  ]
  if not errors and name != 'retriever':
    words = flags_of(given.overrides)
    configuration.parse([f'--config={values["config"]}', *words])
  command_line.refuse(errors)
  return values


def _workdir_problems(workdir: str, mount: str) -> list[str]:
  """Returns why the machines of a run cannot share its folder."""
  start, path = f'--workdir={workdir}: ', pathlib.PurePosixPath(workdir)
  if '://' in workdir:
    return [
      f'{start}a bucket; mount a file system that all workers share, and copy '
      'the folder to the bucket with --config.writer.copy_to'
    ]
  if not path.is_absolute():
    return [f'{start}must be absolute, because workers start elsewhere']
  if any(path.is_relative_to(own) for own in _OWN_FOLDERS):
    return [f'{start}workers cannot share it: each machine has its own']
  if mount and not path.is_relative_to(mount):
    return [f'{start}workers share only --mount={mount}; give a folder in it']
  return []


def name_of(workdir: str) -> str:
  """Returns the name of the job that runs in a folder.

  It ends with digits of the whole path: of two jobs of the same name, the
  second would replace the first, or be stopped with it.
  """
  path = pathlib.PurePosixPath(workdir)
  digits = hashlib.sha256(str(path).encode()).hexdigest()[:6]
  name = re.sub(r'[^a-z0-9]+', '-', path.name.lower()).strip('-')
  name = name if name[:1].isalpha() else f'run-{name}'
  return f'{name[:33].rstrip("-")}-{digits}'


def flags_of(overrides: Mapping[str, str | bool]) -> list[str]:
  """Returns the flags that set keys of a config."""
  return [overrides_lib.as_flag(key, text) for key, text in overrides.items()]


def _with_values(word: str, values: Mapping[str, str]) -> str:
  return re.sub(r'\{(\w+)\}', lambda m: values.get(m[1], m[0]), word)


def _submit(words: Sequence[str], text: str) -> int:
  """Gives a text to a command; returns its exit code."""
  if '{text}' in words:
    # In the place of this process, so that signals reach it.
    os.execvp(words[0], [text if w == '{text}' else w for w in words])
  with tempfile.NamedTemporaryFile('w', suffix='.yaml') as file:
    file.write(text)
    file.flush()
    words = [file.name if w == '{file}' else w for w in words]
    return subprocess.run(words, input=text, text=True, check=False).returncode


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
