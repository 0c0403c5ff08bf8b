"""The start of a run without a model: WORKDIR/start, made once, then used."""

import pathlib
import shutil

from stppo_jax.training import assembly
from stppo_jax.training import sft


def make(config, workdir: pathlib.Path, surroundings) -> None:
  """Makes the start, where the config wants one and none is there."""
  start, partial = workdir / 'start', workdir / 'start.partial'
  if _wanted(config) and not start.is_dir():
    if partial.is_dir():
      shutil.rmtree(partial)  # of a start that was cut short
    sft.imitate(config, surroundings, partial)
    partial.rename(start)  # there whole, or not at all


def chosen(config, workdir: pathlib.Path):
  """The config with the start as its model, where it wants one.

  Raises:
    Misconfigured: there is none.
  """
  if not _wanted(config):
    return config
  start = workdir / 'start'
  if not start.is_dir():
    raise assembly.Misconfigured(f'{start}: missing, the run has not begun')
  config = config.copy_and_resolve_references()
  config.model.path = str(start)
  return config


def _wanted(config) -> bool:
  return config.sft.before_training and not config.model.path
