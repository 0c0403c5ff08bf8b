"""Submit a run to machines: renders a template of launch/templates.

python -m launch.submit LAUNCHER --config=FILE.py[:ALGORITHM] --workdir=DIR
    [--OPTION=VALUE ...] [--config.KEY=VALUE ...] [--dry_run | --stop]
python -m launch.submit tpu --project=ID --zone=ZONE --reap

  LAUNCHER            local, slurm, tpu, jobset, or retriever
  --config, --workdir as for train; the same command resumes the run
  --config.KEY=VALUE  sets a key of the config
  --OPTION=VALUE      an option of the launcher; `LAUNCHER --help` lists them
  --dry_run           prints exactly what would be submitted
  --stop              ends the run instead; the same command resumes it. It
                      saves first; but a slice of tpu is deleted at once
  --reap              deletes TPU slices whose run has ended

The exit code is 2 for wrong flags and for a tool that is not installed, that of
the run for local and tpu, and otherwise that of the tool.
"""

from collections.abc import Mapping, Sequence
import math
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

from absl import flags as absl_flags

from launch import accelerators
from launch import cloud
from launch import launchers
from launch import rendering
from launch import slices
from launch import source as source_lib
from stppo_jax import exits
from stppo_jax import settings
from stppo_jax import streams
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration

# Folders that each machine has for itself.
_OWN_FOLDERS = ('/tmp', '/var/tmp', '/dev/shm', '/run')
_CANNOT_SHARE = ': workers cannot share it: each machine has its own'
_ADDRESS = re.compile(r'gs://[a-z0-9][a-z0-9._-]+(/[A-Za-z0-9_.+-]+)+')
_NAMES = (
  ', with names of letters, digits and any of . _ + -; the name of a bucket is '
  'in lowercase and has three characters or more'
)
_SECRET = re.compile(r'(?i)\w*(token|secret|password|api_key)=|://[^/\s]*@')
# The largest archive that fits into a ConfigMap, which has it in base64.
_MOST_BYTES = 2**20 * 3 // 4


def main(argv: Sequence[str], *, array: rendering.Array | None = None) -> int:
  """Renders and submits; returns the exit code.

  Args:
    argv: the name of the launcher, and flags.
    array: with the launcher slurm, the runs of an array; `argv` then has the
      flags of its first run.
  """
  doc = __doc__
  if argv and argv[0] in launchers.LAUNCHERS:
    doc = f'{doc}\n{launchers.describe(argv[0])}'
  return command_line.program(lambda argv: _main(argv, array), argv, doc)


def _main(argv: Sequence[str], array: rendering.Array | None) -> int:
  name, *words = argv
  if name.startswith('-'):
    raise exits.Misconfigured(f'{name}: the launcher must come first')
  if name not in launchers.LAUNCHERS:
    choices = settings.closest(name, list(launchers.LAUNCHERS))
    raise exits.Misconfigured(f'{name}: unknown launcher{choices}')
  flags = launchers.flags(name)
  command_line.parse(flags, words, overrides=True)
  is_reaping = name == 'tpu' and flags.reap
  needed = [x for x in flags if flags[x].default is None]
  if is_reaping:
    needed = ['project', 'zone']
  given = command_line.parse(flags, words, required=needed, overrides=True)
  if is_reaping:
    dry = '--dry_run: cannot be combined with --reap'
    command_line.refuse([*given.errors, *[dry] * flags.dry_run])
    require('gcloud')
    return cloud.reap(flags.flag_values_dict())
  source, config = _check(name, flags, given)
  values = flags.flag_values_dict()
  if source is not None and name == 'tpu':
    jobs = slices.Slices(values, given.overrides, source, config)
    return _submit_slices(values, jobs)
  text = rendering.render(
    name, values, given.overrides, source=source, array=array
  )
  launcher = launchers.LAUNCHERS[name]
  words = launcher.stop if values['stop'] else launcher.submit
  words = [_with_values(word, values) for word in words]
  if not words:
    raise exits.Misconfigured(f'{name}: has no --stop; end it with Ctrl-C')
  if values['dry_run']:
    # The text alone is on standard output.
    print(f'{shlex.join(words)}:', file=sys.stderr)
    print('' if values['stop'] else text, end='')
    return 0
  require(words[0])
  if name == 'slurm' and source is not None and not values['stop']:
    source_lib.unpack(source, pathlib.Path(values['root'], rendering.SOURCES))
    if '://' not in values['workdir']:  # Slurm does not make the folder of logs
      folder = pathlib.Path(values['workdir']).parent
      folder.mkdir(parents=True, exist_ok=True)
  if '{text}' in words:
    # The command replaces this process, so that signals reach the command.
    os.execvp(words[0], [text if w == '{text}' else w for w in words])
  return subprocess.run(words, input=text, text=True, check=False).returncode


def _submit_slices(values: dict[str, Any], jobs: slices.Slices) -> int:
  """Runs on slices of Cloud TPU; returns the exit code of the run."""
  if values['dry_run']:
    print(shlex.join(jobs.create_command(1, 'startup.sh')), file=sys.stderr)
    print(jobs.budget, file=sys.stderr)
    print(jobs.script(1, jobs.budget.hours_left([])), end='')
    return 0
  require('gcloud')
  return jobs.stop() if values['stop'] else jobs.follow()


def require(tool: str) -> None:
  """Raises `Misconfigured` if a program is not installed here."""
  if shutil.which(tool) is None:
    raise exits.Misconfigured(
      f'{tool}: not installed; --dry_run prints the text that it would get'
    )


def _check(
  name: str, flags: absl_flags.FlagValues, given: command_line.Given
) -> tuple[source_lib.Source | None, str]:
  """Checks the values of all flags; completes the name, workdir and config.

  Returns:
    The source that the workers run, or None if the workers have the code
    already; and the config as JSON.

  Raises:
    Misconfigured: if flags are missing or wrong; the message has a line for
      each of them.
  """
  errors = list(given.errors)
  values = flags.flag_values_dict()
  workdir = values.get('workdir')
  if workdir and flags.command != 'train':
    # A run refuses a folder that is not empty before the run begins.
    workdir = flags.workdir = f'{workdir.rstrip("/")}.{flags.command}'
    values = flags.flag_values_dict()
  if workdir:
    flags.name = flags.name or rendering.name_of(workdir)
    if '://' in workdir:
      workdir = flags.workdir = workdir.rstrip('/')
    errors += _workdir_problems(name, workdir, values.get('mount', ''))
  # The default is the current folder, which is not refused even if it is in
  # /tmp.
  if name == 'slurm' and flags['root'].present and _is_own(values['root']):
    errors.append(f'--root={values["root"]}{_CANNOT_SHARE}')
  overrides = {f'config.{key}': x for key, x in given.overrides.items()}
  pairs = [*values.items(), *overrides.items()]
  errors += [
    f'--{key}: looks like a secret; put it into the file of --secrets, because '
    'arguments are logged'
    for key, value in pairs
    if _SECRET.search(f'{key}={value}' if key[:6] != 'secret' else str(value))
  ]
  # Only these values are checked here; the other flags have rules of their own.
  errors += [
    f'--{key}={streams.one_line(str(value))}: must be one line'
    for key, value in pairs
    if key in ('config', 'workdir', *overrides) and not str(value).isprintable()
  ]
  if values.get('retriever') and not errors:
    # Imported late: the import takes a while, and few runs have a retriever.
    from stppo_jax.commands import serve

    try:
      served = serve.parse(values['retriever'].split())
    except exits.Misconfigured as error:
      errors += [f'--retriever: {x}' for x in str(error).splitlines()]
    else:
      places = {
        x: served[x].value or '' for x in ('index', 'corpus', 'encoder')
      }
      errors += [
        f'--retriever: --{key}={place}: must be an absolute path of the '
        'workers, or gs://BUCKET/FOLDER'
        for key, place in places.items()
        if name != 'local' and place and not re.match('/|gs://[^/]+/.', place)
      ]
  if not errors:
    errors = _conflicts(name, values)
  command_line.refuse(errors)
  if name == 'retriever':
    return None, ''
  config = configuration.parse(
    [f'--config={values["config"]}', *rendering.flags_of(given.overrides)],
    ignored=unchecked(
      name,
      is_dry=values['dry_run'],
      has_retriever=bool(values.get('retriever')),
    ),
  )
  paths = configuration.paths(config)
  errors = _mesh_problems(config.mesh, *_devices(name, values))
  if name == 'tpu':
    errors += [
      f'--config.{key}={path}: must begin with gs://, because the workers can '
      'read no other addresses'
      for key, path in paths.items()
      if '://' in path and not path.startswith('gs://')
    ]
  command_line.refuse(errors)
  if name == 'local':
    return None, ''
  source = source_lib.pack(values['config'], paths, assets=name != 'jobset')
  flags.config = source_lib.config_flag(values['config'])
  if name == 'jobset' and len(source.data) > _MOST_BYTES:
    raise exits.Misconfigured(
      f'{len(source.data)} bytes of source: must be at most {_MOST_BYTES}, '
      'the most that a ConfigMap holds'
    )
  return source, config.to_json(sort_keys=True)


def unchecked(
  name: str, *, is_dry: bool, has_retriever: bool = True
) -> list[Any]:
  """Returns the checks of a config that are not made before a run is submitted.

  Args:
    name: the name of the launcher.
    is_dry: whether nothing is submitted, because of --dry_run.
    has_retriever: whether the run gets a retriever of its own.
  """
  ignored = configuration.OF_THIS_MACHINE if name != 'local' else ()
  return [
    # Missing passages must be found here, before a machine is paid for. A run
    # with a retriever of its own does not read them.
    *(x for x in ignored if has_retriever or x is not configuration.PASSAGES),
    # A dry run leaves out checks that take seconds; a real submission makes
    # them.
    *(configuration.SLOW if is_dry else ()),
  ]


def _conflicts(name: str, values: Mapping[str, Any]) -> list[str]:
  """Returns a line for each option that is wrong or does not fit another."""
  if name == 'local' and values['gpus'] % values['processes']:
    return [
      f'--processes={values["processes"]}: must divide '
      f'--gpus={values["gpus"]}, because all processes get the same number'
    ]
  if name == 'tpu':
    errors = []
    try:
      accelerators.find(values['accelerator'])
    except ValueError as error:
      errors.append(f'--accelerator={values["accelerator"]}: {error}')
    if values['spot'] and values['reserved']:
      errors.append('--reserved: needs --nospot')
    if values['stop'] and values['dry_run']:
      errors.append('--dry_run: not allowed with --stop')
    if values['max_cost'] and not values['price']:
      errors.append('--max_cost: needs --price, the price of a chip-hour')
    return errors
  if name == 'jobset':
    try:
      accelerators.nodes(
        values['accelerator'], values['topology'], values['chips']
      )
    except ValueError as error:
      return [str(error)]
  return []


def _devices(name: str, values: Mapping[str, Any]) -> tuple[int, int]:
  """Returns the number of machines, and the number of devices of a machine.

  If the number of devices is not known, it is 0.
  """
  if name == 'tpu':
    found = accelerators.find(values['accelerator'])
    return found.machines, found.chips // found.machines
  if name == 'jobset':
    label = values['accelerator']
    nodes, chips = accelerators.nodes(
      label, values['topology'], values['chips']
    )
    kinds = accelerators.GENERATIONS.values()
    return nodes, chips * next(x.devices for x in kinds if x.label == label)
  return values.get('nodes', 1), values['gpus']


def _mesh_problems(mesh: Any, machines: int, devices: int) -> list[str]:
  """Returns a line if the mesh of a config does not fit the machines.

  Args:
    mesh: the section `mesh` of the config.
    machines: the number of machines.
    devices: the number of devices of a machine; 0 if it is not known.
  """
  learning = devices - round(mesh.collect_fraction * devices)
  learning *= max(machines - mesh.collectors, 1)
  sizes = {axis: mesh[axis] for axis in ('data', 'fsdp', 'expert', 'tensor')}
  known = math.prod(size for size in sizes.values() if size != -1)
  rest = learning % known if -1 in sizes.values() else learning - known
  if not devices or not rest:
    return []
  given = ' '.join(f'--config.mesh.{x}={size}' for x, size in sizes.items())
  return [
    f'{given}: the sizes must multiply to {learning}, the devices that learn '
    f'on {machines} machine{"s" * (machines > 1)} with {devices} each; take '
    'other machines, or set one --config.mesh.AXIS=-1'
  ]


def _workdir_problems(name: str, workdir: str, mount: str) -> list[str]:
  """Returns why the machines of a run cannot share its folder."""
  start, path = f'--workdir={workdir}: ', pathlib.PurePosixPath(workdir)
  if name == 'local':
    return []
  if '://' in workdir or name == 'tpu':
    is_good = _ADDRESS.fullmatch(workdir)
    return [] if is_good else [f'{start}must be gs://BUCKET/RUN{_NAMES}']
  if not path.is_absolute():
    return [f'{start}must be absolute, because workers start in other folders']
  if _is_own(workdir):
    return [f'--workdir={workdir}{_CANNOT_SHARE}']
  if mount and not path.is_relative_to(mount):
    return [f'{start}workers share only --mount={mount}; give a folder in it']
  return []


def _is_own(folder: str) -> bool:
  """Returns whether each machine has a folder of its own at this path."""
  path = pathlib.PurePosixPath(folder)
  return any(path.is_relative_to(own) for own in _OWN_FOLDERS)


def _with_values(word: str, values: Mapping[str, Any]) -> str:
  return re.sub(r'\{(\w+)\}', lambda m: str(values.get(m[1], m[0])), word)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
