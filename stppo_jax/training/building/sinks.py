"""Builds the writer of a run: its files, TensorBoard and trackers."""

import pathlib

from stppo_jax import settings
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.records import trackers
from stppo_jax.records import writer as writer_lib
from stppo_jax.workdir import run_folder


def build_writer(
  config,
  workdir: pathlib.Path,
  hosts: hosts_lib.Hosts,
  num_steps: int,
  *,
  trajectories: int,
) -> writer_lib.Writer | writer_lib.OtherHostWriter:
  """Returns the writer of a host; only the first host writes metrics.

  Args:
    config: the config of the run.
    workdir: the run's folder, which has its id.
    hosts: the hosts of the run.
    num_steps: the length of the run.
    trajectories: the number of dialogues that are written of each step.
  """
  if not hosts.is_first:
    return writer_lib.OtherHostWriter(
      workdir,
      host=hosts.index,
      trajectories=trajectories,
      keep_files=config.writer.keep_files,
    )
  values = settings.flatten(config)
  recorded = run_folder.read(workdir)
  identity = trackers.Identity(
    title=f'{config.title}, seed {config.seed}',
    run_id='' if recorded is None else recorded.run_id,
    folder=workdir,
    config=values,
  )
  return writer_lib.Writer(
    workdir,
    num_steps=num_steps,
    tensorboard=config.writer.tensorboard,
    trajectories=trajectories,
    keep_files=config.writer.keep_files,
    keep_lines=config.writer.keep_lines,
    hparams=values,
    trackers=[
      trackers.Tracker(name, identity) for name in config.writer.trackers
    ],
  )
