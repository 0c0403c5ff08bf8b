"""Lists or verifies the checkpoints of a run, or exports its policy.

The functions that need jax import it themselves, so a wrong flag is refused
without waiting for this import.
"""

from collections.abc import Callable
import pathlib
import time
from typing import Any

from stppo_jax import exits
from stppo_jax import streams
from stppo_jax.records.checkpoints import saved_steps
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import run_folder

_COMMANDS = ('train', 'sft', 'prefer')
_TITLES = ('step', 'saved', 'size', 'score', '')


class ExportFailed(RuntimeError):
  """The error of an export that ended because a file operation failed."""

  exit_code = exits.TRY_AGAIN


def show(workdir: pathlib.Path, place: str) -> int:
  """Prints the table of the checkpoints of a run; returns the exit code.

  Args:
    workdir: the folder of the run.
    place: the name of this folder in messages: its path, or its address in a
      bucket.

  Raises:
    Misconfigured: `workdir` is not the folder of a run.
  """
  _check(workdir, place)
  found = saved_steps.find(workdir)
  rows = [_TITLES, *map(_row, found)]
  print(
    '\n'.join(streams.aligned(rows)) if found else f'{place}: no checkpoints'
  )
  return 0


def _check(workdir: pathlib.Path, place: str) -> None:
  """Raises `Misconfigured` if a folder is not the folder of a run."""
  if not workdir.is_dir():
    raise exits.Misconfigured(f'{place}: no such folder')
  if run_folder.command_of(workdir) not in _COMMANDS:
    raise exits.Misconfigured(f'{place}: not the folder of a run')


def _row(saved: saved_steps.SavedStep) -> tuple[str, ...]:
  when = time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(saved.time))
  return (
    str(saved.step),
    when,
    saved_steps.describe_size(saved.size),
    '' if saved.score is None else f'{saved.score:.4f}',
    ', '.join(saved.notes),
  )


def verify(workdir: pathlib.Path, place: str) -> int:
  """Reads all checkpoints of a run and prints which of them are intact.

  Returns the exit code, which is 3 if a checkpoint is damaged and otherwise 0.
  For the arguments see `show`.
  """
  _check(workdir, place)
  import jax

  # The run may still be training on the accelerators, so only CPU is used here.
  jax.config.update('jax_platforms', 'cpu')
  from stppo_jax.records.checkpoints import verification
  from stppo_jax.workdir import run_record

  run_record.check_checkpoints(workdir)
  found = saved_steps.find(workdir)
  run, exit_code = run_folder.read(workdir), 0
  # Checkpoints that were set aside are left out: they are known to be damaged.
  checked = [saved for saved in found if saved.path.name.isdecimal()]
  for saved in checked:
    problems = verification.problems(saved.path, saved.step, run)
    if problems and not saved.path.exists():
      continue  # the run has removed this checkpoint in the meantime
    for problem in problems:
      print(f'WRONG  step {saved.step}: {problem}', flush=True)
      exit_code = exits.DAMAGED
    if not problems:
      size = saved_steps.describe_size(saved.size)
      print(f'ok     step {saved.step}: {size}', flush=True)
  if not checked:
    print(f'{place}: no checkpoints')
  return exit_code


def export(
  config,
  workdir: str | pathlib.Path,
  out: str | pathlib.Path,
  *,
  step: int | None,
  dtype: str,
  adapters: bool = False,
  also: Callable[[Any], None] = lambda policy: None,
) -> int:
  """Writes the policy of a checkpoint and prints the checkpoint's step.

  Only the policy's weights are read from the checkpoint. They are sharded over
  the largest number of devices that divides the model width, whatever the mesh
  of the run was. `config.model` says where the policy's shape and tokenizer
  come from. If adapters were trained, `config.model` also says where the frozen
  weights under the adapters come from. Nothing in `workdir` is changed, so the
  run may still be training.

  Args:
    config: the config of the run.
    workdir: the run's folder.
    out: the directory to write. The docstring of the module
      `workdir.run_folder` says which directories are refused.
    step: the step of the checkpoint; None for the newest valid checkpoint.
    dtype: the dtype of the weights in the files.
    adapters: whether to write the adapters alone, in the format of PEFT.
    also: a function that takes the policy, a `checkpoint_state.Policy`, and
      adds files to the directory.

  Returns:
    The exit code.

  Raises:
    Misconfigured: there is no such checkpoint, or the format of PEFT cannot
      hold the adapters.
    ExportFailed: the files cannot be written, for example to a full disk.
    Exceptions with an `exit_code`, see `loop.train`.
  """
  from stppo_jax.training import checkpoint_state
  from stppo_jax.training import model_files

  out = pathlib.Path(out)
  # `out` is checked first, because reading a large policy takes minutes.
  if problem := atomic_files.refusal(out.resolve().parent):
    raise exits.Misconfigured(f'--out={out}: {problem}')
  policy = checkpoint_state.read_policy(config, workdir, step=step)
  learner = policy.learner
  try:
    if adapters:
      with exits.naming('--adapters', (ValueError,)):
        model_files.export_adapters(
          policy.config,
          out,
          learner.models.policy,
          policy.trained,
          policy.tokenizer,
          dtype=dtype,
        )
    else:
      model_files.export(
        policy.config,
        out,
        learner.policy,
        policy.params,
        policy.tokenizer,
        dtype=dtype,
      )
    also(policy)
  except OSError as error:
    raise ExportFailed(f'{out}: {error}') from error
  what = 'the adapters of the policy' if adapters else 'the policy'
  print(f'{out}: {what} after step {policy.step}, {dtype}')
  return 0
