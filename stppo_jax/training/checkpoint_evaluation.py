"""Greedy scores of a run as far as it has come."""

import contextlib
import pathlib

from stppo_jax.records import checkpoint
from stppo_jax.training import assembly
from stppo_jax.training import checkpoint_state
from stppo_jax.training import components as components_lib
from stppo_jax.training import evaluation
from stppo_jax.training import run_record


def evaluate(config, workdir: str | pathlib.Path) -> int:
  """Prints the greedy scores of the newest checkpoint, or of the start.

  Changes nothing in `workdir`, so that the run may be alive.

  Returns:
    The exit code.

  Raises:
    Exceptions with an `exit_code`, see `loop.train`.
  """
  workdir = pathlib.Path(workdir)
  if not workdir.is_dir():
    raise assembly.Misconfigured(f'--workdir={workdir}: no such folder')
  config = run_record.with_start(config, workdir)
  parts = components_lib.build(config)
  learner = parts.learner
  with assembly.build_services(config, parts.questions) as services:
    with assembly.misconfigured():
      state = learner.start()
    with contextlib.closing(
      checkpoint.Checkpointer(workdir, read_only=True)
    ) as checkpoints:
      found = checkpoint_state.newest(checkpoints, learner, state)
    done, state = found[:2] if found else (0, state)
    evaluator = evaluation.Evaluator(
      config, services, parts.tokenizer, learner.policy
    )
    scores, _ = evaluator.run(learner.merged_params(state))
    for name, score in sorted(scores.items()):
      print(f'step {done} val/em/{name} {score:.4f}')
  return 0
