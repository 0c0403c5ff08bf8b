"""The launchers: for each its template, its commands and its options."""

from collections.abc import Mapping
import dataclasses
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
_MISSING = None  # the default of an option that must be given


@dataclasses.dataclass(frozen=True)
class Launcher:
  """A way to run on machines.

  Attributes:
    template: the file of launch/templates that is rendered.
    submit: the command that takes it: its standard input is the text, unless
      a word is {file}, or {text} for a script that takes this process's place.
    stop: the command that ends the run; () = Ctrl-C.
    options: name to default; None must be given.
    shared: whether the workdir must be seen by several machines.
    run_restarts: whether launch/run.sh starts a run again, and not the machines
      it runs on.
  """

  template: str
  submit: tuple[str, ...]
  stop: tuple[str, ...]
  options: Mapping[str, str | None]
  shared: bool = True
  run_restarts: bool = False


_BASH = ('bash', '-c', '{text}')
_CLOUD = {'project': _MISSING, 'zone': _MISSING}
# Options of every launcher that trains.
_COMMON = {'name': '', 'retriever': '', 'secrets': ''}
_RESTARTS = {'restarts': '20'}  # an option of the launchers that count restarts
_CLUSTER = {
  'image': _MISSING,
  'mount': '/shared',
  'claim': 'shared',
  'secret': 'stppo',
}
LAUNCHERS = {
  'local': Launcher(
    'local.sh',
    _BASH,
    (),
    _RESTARTS
    | {
      'processes': '2',
      'gpus': '0',
      'python': sys.executable,
      'root': str(ROOT),
    },
    shared=False,
    run_restarts=True,
  ),
  'slurm': Launcher(
    'slurm.sbatch',
    ('sbatch',),
    ('scancel', '--name={name}'),
    _RESTARTS
    | {
      'nodes': '1',
      'gpus': '8',
      'cpus': '64',
      'time': '24:00:00',
      'partition': _MISSING,
      'root': str(ROOT),
    },
  ),
  'tpu': Launcher(
    'tpu.sh',
    _BASH,
    (
      *('gcloud', 'compute', 'tpus', 'queued-resources', 'delete', '{name}'),
      *('--project={project}', '--zone={zone}', '--force'),
    ),
    _CLOUD
    | _RESTARTS
    | {
      'accelerator': _MISSING,  # such as v5litepod-16
      'runtime': _MISSING,  # such as v2-alpha-tpuv5-lite
      'nfs': _MISSING,  # HOST:/EXPORT, such as a Filestore
      'mount': '/shared',
      'repository': _MISSING,
      'revision': 'main',
      'worker_python': 'python3.11',
      'spot': 'true',
      'poll': '60',
    },
    run_restarts=True,
  ),
  'jobset': Launcher(
    'jobset.yaml',
    ('kubectl', 'replace', '--force', '-f', '-'),
    ('kubectl', 'delete', 'jobset', '{name}'),
    _CLUSTER
    | _RESTARTS
    | {
      'accelerator': _MISSING,  # such as tpu-v5-lite-podslice
      'topology': _MISSING,  # such as 4x4
      'workers': _MISSING,  # machines of the slice
      'chips': '4',  # chips of a machine
      'grace': '300',
    },
  ),
  'xpk': Launcher(
    'xpk.sh',
    # This process goes on beside it, because a sweep submits several.
    ('bash', '{file}'),
    (
      *('xpk', 'workload', 'delete', '--workload={name}'),
      *('--cluster={cluster}', '--project={project}', '--zone={zone}'),
    ),
    _CLOUD
    | _RESTARTS
    | {
      'cluster': _MISSING,
      'tpu_type': _MISSING,  # such as v5litepod-16
      'image': _MISSING,
      'mount': '/shared',
    },
  ),
  'sky': Launcher(
    'sky.yaml',
    ('sky', 'jobs', 'launch', '--yes', '{file}'),
    ('sky', 'jobs', 'cancel', '--yes', '--name', '{name}'),
    {
      'nodes': '1',
      'accelerators': _MISSING,  # such as H100:8
      'spot': 'true',
      'volume': _MISSING,  # the name of a volume of SkyPilot
      'mount': '/shared',
      'extra': 'cuda',
      'root': str(ROOT),
    },
  ),
  'retriever': Launcher(
    'retriever.yaml',
    ('kubectl', 'apply', '-f', '-'),
    ('kubectl', 'delete', 'deployment,service', '{name}'),
    _CLUSTER | {'name': 'retriever', 'replicas': '1', 'index': _MISSING},
  ),
}


def options(name: str) -> dict[str, str | None]:
  """Returns the options of a launcher, with their defaults."""
  common = {} if name == 'retriever' else _COMMON
  return {**common, **LAUNCHERS[name].options}
