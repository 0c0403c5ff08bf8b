"""Export of a run's policy to a directory that other programs load."""

import os
import pathlib
from typing import Any
from typing import NamedTuple

import jax

from stppo_jax import exits
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import weights
from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import checkpoint_state
from stppo_jax.training.building import assembly
from stppo_jax.training.building import model_files
from stppo_jax.workdir import run_record


class ExportFailed(RuntimeError):
  """The error of a failed export; the directory is as it was before."""

  exit_code = exits.TRY_AGAIN


class Policy(NamedTuple):
  """A policy that was read from a checkpoint.

  Attributes:
    config: the config of its run, with its start, if it made one, as the model.
    tokenizer: the tokenizer of the run.
    learner: the learner of the run.
    step: the number of steps that were done.
    params: weights of `learner.policy`, adapters merged.
  """

  config: Any
  tokenizer: tokenizer_lib.Tokenizer
  learner: learner_lib.Learner
  step: int
  params: functional.Params


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
  policy = read(config, workdir, step=step)
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


def read(
  config,
  workdir: str | pathlib.Path,
  *,
  step: int | None,
  mesh: jax.sharding.Mesh | None = None,
) -> Policy:
  """Reads the policy of a checkpoint; all hosts of the mesh call it.

  Args:
    config, workdir, step: see `export`.
    mesh: gets the weights; None: one of as many devices as divide them.

  Raises:
    Exceptions of `export`, except `ExportFailed`.
  """
  with exits.as_misconfigured():
    config = run_record.with_start(config, pathlib.Path(workdir))
    path = config.model.path or config.model.tokenizer_path
    questions = None if path else assembly.build_questions(config)
    tokenizer = assembly.build_tokenizer(config, questions)
    if mesh is None:
      mesh = mesh_for_width(model_files.shape(config, tokenizer).hidden_size)
    shape = assembly.build_model_config(config, tokenizer, mesh)
    learner = learner_lib.Learner(config, shape, mesh)
  checkpointer = checkpoint.Checkpointer(workdir, read_only=True)
  steps = checkpointer.steps()
  if not steps or step not in (None, *steps):
    wanted = 'checkpoint' if step is None else f'checkpoint of step {step}'
    there = ', '.join(map(str, steps)) or 'none'
    raise exits.Misconfigured(f'{workdir}: no {wanted}; there are: {there}')
  frozen = {}
  if config.model.lora.rank:
    with exits.as_misconfigured():
      frozen = weights.load_frozen(
        config, config.model.path, learner.policy, mesh
      )
  restored = checkpoint_state.policy_params(
    checkpointer, learner, frozen, step=step
  )
  checkpointer.close()
  if restored is None:
    raise exits.Misconfigured(f'{workdir}: no checkpoint of step {step}')
  return Policy(config, tokenizer, learner, *restored)


def mesh_for_width(hidden_size: int) -> jax.sharding.Mesh:
  """Returns a mesh of the most devices that divide the model width."""
  devices = jax.devices()
  most = max(n for n in range(1, len(devices) + 1) if hidden_size % n == 0)
  return mesh_lib.make_mesh(data=1, fsdp=-1, tensor=1, devices=devices[:most])


def _check_writable(out: pathlib.Path) -> None:
  """Raises ValueError if a folder cannot be made or replaced."""
  parent = out.resolve().parent
  while not parent.exists():
    parent = parent.parent
  if not os.access(parent, os.W_OK):
    raise ValueError(f'--out={out}: {parent} is not writable')
