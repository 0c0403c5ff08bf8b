"""What of a state goes into a checkpoint, and how it comes back.

The base under adapters does not: it is large, never changes, and a start makes
it again. Its fingerprint does, so that nobody goes on with another base.
"""

import dataclasses
from typing import Any

import jax

from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import state as state_lib
from stppo_jax.models import functional
from stppo_jax.records import checkpoint

_BASE = 'base_fingerprints'


class OtherBase(RuntimeError):
  """The frozen weights are not those that the adapters were trained beside."""

  exit_code = 2


def save(
  checkpointer: checkpoint.Checkpointer,
  step: int,
  state: state_lib.TrainState,
  host: dict[str, Any],
) -> None:
  """See `Checkpointer.save`."""
  host = host | base_record(state.frozen)
  checkpointer.save(step, dataclasses.replace(state, frozen=None), host)


def newest(
  checkpointer: checkpoint.Checkpointer,
  learner: learner_lib.Learner,
  start: state_lib.TrainState,
) -> tuple[int, state_lib.TrainState, dict[str, Any]] | None:
  """(steps done, state, host) of the newest valid step; None: none was saved.

  Args:
    checkpointer: of the run.
    learner: of the run.
    start: its start, whose frozen part becomes that of the state.

  Raises:
    OtherBase: that part is not the one of the run.
    Exceptions of `Checkpointer.restore_latest`.
  """
  found = checkpointer.restore_latest(learner.abstract_state(start))
  if found is None:
    return None
  step, state, host = found
  check_base(step, host, start.frozen)
  return step, dataclasses.replace(state, frozen=start.frozen), host


def policy(
  checkpointer: checkpoint.Checkpointer,
  learner: learner_lib.Learner,
  frozen: functional.Params | None,
  *,
  step: int | None,
) -> tuple[int, functional.Params] | None:
  """(steps done, weights for `learner.policy`); no other leaf is read.

  Args:
    checkpointer: of the run, read-only.
    learner: of the run.
    frozen: the base under adapters, if there are any.
    step: the one that is wanted; None: the newest valid one.

  Raises:
    OtherBase: that base is not the one of the run.
    Exceptions of `Checkpointer.restore_latest`.
  """
  found = checkpointer.restore_latest(
    learner.abstract_policy_params(), part='policy.params', step=step
  )
  if found is None:
    return None
  done, params, host = found
  check_base(done, host, frozen)
  trained = state_lib.ModelState(params, optimizer=None, updates=None)
  state = state_lib.TrainState(policy=trained, value=None, frozen=frozen)
  return done, learner.merged_params(state)


def base_record(frozen: functional.Params | None) -> dict[str, Any]:
  """What tells the base under adapters from others; {} without one."""
  return {} if frozen is None else {_BASE: _fingerprints(frozen)}


def check_base(
  step: int, host: dict[str, Any], frozen: functional.Params | None
) -> None:
  """Raises `OtherBase` where `frozen` is not what the step was saved with."""
  if frozen is not None and host[_BASE] != _fingerprints(frozen):
    raise OtherBase(
      f'the weights under the adapters are not those that step {step} was '
      'trained with: restore the files of model.path, or use another workdir'
    )


def _fingerprints(params) -> list[int]:
  return checkpoint.fingerprints(jax.tree.leaves(params))
