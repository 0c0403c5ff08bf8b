"""Train the arms of a study on machines, and compare them.

python -m launch.study --config=FILE.py[:STUDY] --workdir=DIR --on=LAUNCHER
    [--out=gs://BUCKET/FOLDER] [--seeds=N | --seeds=N,N,...]
    [--groups=GROUP,...] [--jobs=N] [--table=FILE.csv] [--reuse=FILE.csv,...]
    [--OPTION=VALUE ...] [--config.KEY=VALUE ...]
    [--dry_run | --status | --stop]

  --config, --seeds, --groups, --table, --reuse, --config.KEY=VALUE
                 as for `python -m stppo_jax ablate`
  --workdir=DIR  the folder here with the tables and the page of the study
  --on=LAUNCHER  slurm, jobset, or tpu (a slice for each run); local trains as
                 `ablate` does
  --out=ADDRESS  the folder of the runs in a bucket; by default they are in DIR,
                 which all machines must then see
  --jobs, --OPTION, --dry_run, --status, --stop
                 as for `python -m launch.sweep`

Each arm and seed is a run of its own. With tpu, the command follows all runs,
which spend one budget; with the others it ends when they are submitted. The
same command goes on: a lost run is resumed, and those that have finished are
compared, whatever the others do. A study with supervised starts is refused:
train one with `sft`, and name it in the study as model.path.
"""

from collections.abc import Sequence
import pathlib
import shutil
import sys

from launch import submit
from launch import sweep
from stppo_jax import buckets
from stppo_jax import exits
from stppo_jax.commands.flags import ablation_flags
from stppo_jax.commands.flags import command_line
from stppo_jax.tools import run_state
from stppo_jax.tools.ablation import study_runs
from stppo_jax.workdir import bucket_files
from stppo_jax.workdir import run_folder

_OF_ABLATE = ('config', 'workdir', 'seeds', 'groups', 'table', 'reuse')


def main(argv: Sequence[str]) -> int:
  """Makes the missing runs of a study, and compares all runs that have ended.

  Returns the exit code.
  """
  return command_line.program(_main, argv, __doc__)


def _main(argv: Sequence[str]) -> int:
  flags, given = sweep.parsed(
    argv,
    required=('config', 'workdir'),
    **dict.fromkeys(_OF_ABLATE[1:], ''),
  )
  words = [
    f'--{key}={flags[key].value}' for key in _OF_ABLATE if flags[key].present
  ]
  words += [f'--config.{key}={x}' for key, x in given.overrides.items()]
  plan, _ = ablation_flags.parse(
    words, ignored=submit.unchecked(flags.on, is_dry=flags.dry_run)
  )
  if plan.whole.starts:
    raise exits.Misconfigured(
      f'--config={flags.config}: has supervised starts; train them with `sft`, '
      'and name them in the study as model.path'
    )
  runs = study_runs.flags_of_missing(plan)
  out = flags.out.rstrip('/') or str(plan.folder.absolute())
  exit_code = sweep.carry_out(flags, out, runs) if runs else 0
  if flags.dry_run or flags.status or flags.stop:
    return exit_code
  if buckets.is_address(out):
    for name in runs:
      _bring(f'{out}/{name}', plan.folder / name)
  compared = study_runs.make(plan, is_dry=False, trains=False)
  # The runs that the launcher has submitted have not finished yet.
  return exit_code or (compared if flags.on in ('local', 'tpu') else 0)


def _bring(address: str, folder: pathlib.Path) -> None:
  """Copies a run from a bucket, without its checkpoints.

  Nothing is copied before the run has finished.
  """
  try:
    if run_state.read(address).state != run_state.FINISHED:
      return
  except run_state.NoRun:
    return
  with bucket_files.downloaded(address) as path:
    left_out = shutil.ignore_patterns(run_folder.ADDRESS, 'checkpoints')
    shutil.copytree(path, folder, dirs_exist_ok=True, ignore=left_out)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
