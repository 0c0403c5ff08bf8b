"""Export of a run's policy to a directory that other programs load."""

import os
import pathlib

from stppo_jax import exits
from stppo_jax.training import checkpoint_state
from stppo_jax.training import model_files


class ExportFailed(RuntimeError):
  """The error of a failed export; the directory is as it was before."""

  exit_code = exits.TRY_AGAIN


def export(
  config,
  workdir: str | pathlib.Path,
  out: str | pathlib.Path,
  *,
  step: int | None,
  dtype: str,
) -> int:
  """Writes the policy of a checkpoint and prints its step.

  Of the checkpoint only the policy's weights are read, sharded over as many
  devices as divide them, whatever the mesh of the run was. Of the model's
  directory the shape and the tokenizer are read and, under adapters, the
  weights. Nothing in `workdir` is changed, so that the run may be going on.

  Args:
    config: the config of the run.
    workdir: the run's folder.
    out: the directory to write; see `workdir.run_folder` for those that
      commands refuse.
    step: the checkpoint that is wanted; None: the newest valid one.
    dtype: the dtype of the weights in the files.

  Returns:
    The exit code.

  Raises:
    Misconfigured: there is no such checkpoint.
    ExportFailed: the files cannot be written, for example to a full disk.
    Exceptions with an `exit_code`, see `loop.train`.
  """
  out = pathlib.Path(out)
  with exits.as_misconfigured():
    _check_writable(out)
  policy = checkpoint_state.read_policy(config, workdir, step=step)
  try:
    model_files.export(
      policy.config,
      out,
      policy.learner.policy,
      policy.params,
      policy.tokenizer,
      dtype=dtype,
    )
  except OSError as error:
    raise ExportFailed(f'{out}: {error}') from error
  print(f'{out}: the policy after step {policy.step}, {dtype}')
  return 0


def _check_writable(out: pathlib.Path) -> None:
  """Raises ValueError if a folder cannot be made or replaced."""
  parent = out.resolve().parent
  while not parent.exists():
    parent = parent.parent
  if not os.access(parent, os.W_OK):
    raise ValueError(f'--out={out}: {parent} is not writable')
