"""The launchers: for each its template, its commands and its options."""

from collections.abc import Mapping
import dataclasses
import functools
import os
import pathlib
import re
import sys
from typing import Any

from absl import flags as absl_flags

from launch import accelerators
from stppo_jax.commands.flags import command_line

ROOT = pathlib.Path(__file__).resolve().parent.parent


class _Text(absl_flags.ArgumentParser):
  """Takes text that matches a pattern."""

  def __init__(self, pattern: str, allowed: str):
    self._matches = re.compile(pattern).fullmatch
    self.syntactic_help = allowed

  def parse(self, argument: str) -> str:
    # `command_line` writes the error with the rule, the flag and its value.
    if not self._matches(argument):
      raise ValueError(self.syntactic_help)
    return argument


def _text(
  pattern: str, allowed: str, default: str | None = None
) -> command_line.Definition:
  """Returns the definition of an option whose value matches a pattern.

  Args:
    pattern: the regular expression.
    allowed: the rule in words that follow "must be".
    default: the default of the option. None = the option must be given; '' =
      its value may be empty.
  """
  parser = _Text(f'({pattern})?' if default == '' else pattern, allowed)
  return functools.partial(absl_flags.DEFINE, parser, default=default)


# A line break or another control character would end a line of a script or of a
# manifest, and the text after it would be read as a new line.
_line = functools.partial(_text, '[^\x00-\x1f\x7f]+')
_path = functools.partial(
  _text, '/[^\x00-\x1f\x7f]*', 'an absolute path in one line'
)
# Names of objects of Kubernetes and of Google Cloud.
_name = functools.partial(
  _text,
  '[a-z]([-a-z0-9]{0,38}[a-z0-9])?',
  'at most 40 lowercase letters, digits and hyphens, and begin with a letter',
)
_whole = functools.partial(command_line.integer, upper_bound=10**6)
_count = functools.partial(_whole, lower_bound=1)
_restarts = functools.partial(_whole, 20, lower_bound=0)
_zone = _text(
  '[a-z]+-[a-z]+[0-9]+-(ai[0-9])?[a-z]',
  'a zone, which is a region and a letter, such as us-west4-a',
)
_project = _text(
  '([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]',
  'the id of a project: 6 to 30 lowercase letters, digits and hyphens',
)
_image = _text('[a-z0-9][a-zA-Z0-9._/:@-]*', 'the name of an image')


@dataclasses.dataclass(frozen=True)
class Launcher:
  """A way to run on machines.

  Attributes:
    template: the file of launch/templates that is rendered.
    submit: the command that takes the rendered text on its standard input. If a
      word of the command is {text}, the text takes the place of this word, and
      the command replaces this process. () = launch/slices.py gives the text to
      its slices.
    stop: the command that ends the run; () = Ctrl-C or launch/slices.py ends
      it.
    options: the definition of each option by its name, as for
      `command_line.flags`.
    run_restarts: whether launch/run.sh starts a failed run again. If False, the
      cluster does.
  """

  template: str
  submit: tuple[str, ...]
  stop: tuple[str, ...]
  options: Mapping[str, Any]
  run_restarts: bool = False


_COMMON = {
  'command': command_line.one_of(('train', 'first_hour'), 'train'),
  'name': _name(''),
  'retriever': _line('the arguments of `serve` in one line', ''),
}
_CLUSTER = {
  'image': _image,
  'mount': _path('/shared'),
  'claim': _name('shared'),
  'secret': _name('stppo'),
}
LAUNCHERS = {
  'local': Launcher(
    'local.sh',
    ('bash', '-c', '{text}'),
    (),
    _COMMON
    | {
      'secrets': _line('a file', ''),
      'processes': _count(2),
      'gpus': _whole(0, lower_bound=0),
      'python': _line('a program', sys.executable),
      'root': _path(str(ROOT)),
      'restarts': _restarts(),
    },
    run_restarts=True,
  ),
  'slurm': Launcher(
    'slurm.sbatch',
    ('sbatch',),
    ('scancel', '--name={name}'),
    _COMMON
    | {
      'secrets': _path(''),
      'nodes': _count(1),
      'gpus': _whole(8, lower_bound=0),
      'cpus': _count(64),
      # Slurm reads 24 and 24:00 as minutes, and 0 as no limit.
      'time': _text(
        r'(?!0+:00:00)\d+:[0-5]\d:[0-5]\d|\d+-\d\d:[0-5]\d:[0-5]\d',
        'a time of Slurm, H:MM:SS or D-HH:MM:SS',
        '24:00:00',
      ),
      'partition': _text(
        r'[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*', 'names of partitions'
      ),
      'python': _path(sys.executable),
      'root': _path(os.getcwd()),
      'restarts': _restarts(),
    },
  ),
  'tpu': Launcher(
    'startup.sh',
    (),
    (),
    _COMMON
    | {
      'secrets': _text('[A-Za-z0-9_-]+', 'the name of a secret', ''),
      'project': _project,
      'zone': _zone,
      'accelerator': _line('a slice, such as v5litepod-16'),
      'runtime': _text('[a-z0-9][a-z0-9.-]*', 'a runtime version', ''),
      'spot': True,
      'reserved': False,
      'network': _text('[a-zA-Z0-9./-]+', 'the name of a network', ''),
      'subnetwork': _text('[a-zA-Z0-9./-]+', 'the name of a subnetwork', ''),
      'service_account': _text(
        r'[a-z0-9.-]+@[a-z0-9.-]+', 'the address of a service account', ''
      ),
      'wait': command_line.number(24.0, lower_bound=0.1, upper_bound=10**4),
      'max_slices': _count(20),
      'max_hours': command_line.number(24.0, lower_bound=0.1),
      'price': command_line.number(0.0, lower_bound=0.0),
      'max_cost': command_line.number(0.0, lower_bound=0.0),
      # The folder of the runs that share one budget.
      'budget': _text('gs://[^\\s*]+', 'an address in a bucket', ''),
      'restarts': _restarts(),
      'poll': _whole(60, lower_bound=1, upper_bound=300),
      'on_interrupt': command_line.one_of(('', 'keep', 'delete'), ''),
      'watch': False,
      'reap': False,
    },
    run_restarts=True,
  ),
  'jobset': Launcher(
    'jobset.yaml',
    ('kubectl', 'replace', '--force', '-f', '-'),
    ('kubectl', 'delete', '--ignore-not-found', 'jobset,configmap', '{name}'),
    _COMMON
    | _CLUSTER
    | {
      'accelerator': command_line.one_of(
        [x.label for x in accelerators.GENERATIONS.values()]
      ),
      'topology': _line('the chips along each axis, such as 4x4'),
      'chips': _text('[1-9]', 'a number of chips', ''),
      'grace': _count(300),
      'restarts': _restarts(),
    },
  ),
  'retriever': Launcher(
    'retriever.yaml',
    ('kubectl', 'apply', '-f', '-'),
    ('kubectl', 'delete', 'deployment,service', '{name}'),
    _CLUSTER
    | {
      'name': _name('retriever'),
      'replicas': _count(1),
      'index': _text(
        '/[^\x00-\x1f\x7f]*|gs://[a-z0-9][a-z0-9._-]+/[^\x00-\x20\x7f*?@]+',
        'an absolute path or gs://BUCKET/INDEX',
      ),
    },
  ),
}
SWITCHES = {'dry_run': False, 'stop': False}
# The meaning and the unit of numbers, which the rules of these options lack.
_COUNTED = {
  'wait': 'hours until a slice must be there',
  'max_hours': 'hours of all slices together',
  'price': 'the price of a chip for an hour',
  'max_cost': 'the most that all slices may cost at that price',
  'poll': 'seconds between two looks at a slice',
  'grace': 'seconds to save in',
  'restarts': 'how often a run that failed is started again',
}


def flags(name: str) -> absl_flags.FlagValues:
  """Returns the definitions of a launcher's flags, before any are parsed."""
  run = {} if name == 'retriever' else {'config': None, 'workdir': None}
  return command_line.flags(**run, **LAUNCHERS[name].options, **SWITCHES)


def describe(name: str) -> str:
  """Returns the options of a launcher, with their rules and defaults."""
  lines = [f'The options of {name}:\n']
  for key in LAUNCHERS[name].options:
    flag = flags(name)[key]
    default = '; required' if flag.default is None else ''
    if flag.default not in (None, ''):
      default = f'; {flag.default} by default'
    counted = f'{_COUNTED[key]}: ' if key in _COUNTED else ''
    lines.append(f'  --{key:18}{counted}{command_line.rule(flag)}{default}')
  return '\n'.join(lines)
