"""Converts between the state of a learner and its checkpoint.

The frozen weights under adapters are not saved: they are large, never change,
and are read from the model's files at every start. Only their fingerprints are
saved. A run is not resumed if the fingerprints differ, because adapters only
work together with the frozen weights that they were trained with.
"""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax

from stppo_jax import exits
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import model_roles
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import value_training
from stppo_jax.learner import weights
from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.records.checkpoints import fingerprint
from stppo_jax.rollout import prefetch
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import components
from stppo_jax.training import model_files
from stppo_jax.workdir import run_record

_BASE = 'base_fingerprints'
Restored = tuple[int, state_lib.TrainState, dict[str, Any]]


class OtherBase(RuntimeError):
  """The adapters were trained with other frozen weights."""

  exit_code = exits.USAGE


class TrainCheckpoints:
  """Converts between a training state and its checkpoint.

  The checkpoint also has the KL coefficient, the warm-up of the value model,
  the policies that the next steps are collected with, and the collections that
  the value model repeats.

  Args:
    learner: the learner, which has the KL coefficient and the warm-up.
    collector: the collector, which has the policies for the next steps.
    replay: the collections that the value model repeats.
  """

  def __init__(
    self,
    learner: learner_lib.Learner,
    collector: prefetch.Policies,
    replay: value_training.Replay,
  ):
    self._learner, self._collector = learner, collector
    self._replay = replay

  def content(
    self, step: int, state: state_lib.TrainState
  ) -> tuple[state_lib.TrainState, dict[str, Any]]:
    """Returns the content of a checkpoint after `step` steps.

    Returns:
      The arrays, and a JSON record. The arrays are the state without the frozen
      weights, the older policies that collect the next steps, and the
      collections that the value model repeats.
    """
    # With `rollout.steps_ahead`, the next steps are collected with policies
    # that are older than the policy in `state`. A resumed run must collect
    # these steps with the same policies.
    published = tuple(
      params.trained.policy
      for params in self._collector.published(step, state.params)
    )
    record = {
      'kl_coefficient': self._learner.kl_coefficient,
      'value_warmup': self._learner.warmup.record,
    }
    record |= _base_record(state.frozen)
    arrays = dataclasses.replace(
      state,
      published=published,
      replayed=self._replay.collections,
      frozen={},
    )
    return arrays, record

  def restore(
    self, checkpointer: checkpoint.Checkpointer, start: state_lib.TrainState
  ) -> Restored | None:
    """Restores the newest valid checkpoint; returns None if there is none.

    Learner, collector and replay also get their saved values back.
    """
    restored = newest(checkpointer, self._learner, start)
    if restored is None:
      return None
    step, state, host = restored
    self._collector.restore(
      step,
      [
        model_roles.Params(model_roles.Trained(trained, None), start.frozen)
        for trained in state.published
      ],
    )
    self._replay.collections = state.replayed
    self._learner.kl_coefficient = host['kl_coefficient']
    # Checkpoints of version 0.2 have no `value_warmup`; the warm-up of these
    # runs never ends early.
    self._learner.warmup = dataclasses.replace(
      self._learner.warmup, **host.get('value_warmup', {})
    )
    return step, dataclasses.replace(state, published=(), replayed=()), host


class PolicyCheckpoints:
  """Converts between a policy that learns without rollouts and its checkpoint.

  The checkpoint has the trained weights and the state of the optimiser.
  """

  def content(
    self, step: int, state: state_lib.TrainState
  ) -> tuple[state_lib.ModelState, dict[str, Any]]:
    """Returns the policy with its optimiser state, and a JSON record."""
    del step
    return state.policy, _base_record(state.frozen)

  def restore(
    self, checkpointer: checkpoint.Checkpointer, start: state_lib.TrainState
  ) -> Restored | None:
    """Restores the newest valid checkpoint; returns None if there is none."""
    restored = checkpointer.restore_latest(start.policy)
    if restored is None:
      return None
    step, policy, host = restored
    _check_base(step, host, start.frozen)
    return step, dataclasses.replace(start, policy=policy), host


# An object that converts between a state and the contents of a checkpoint.
Checkpoints = TrainCheckpoints | PolicyCheckpoints


def abstract_state(
  learner: learner_lib.Learner, state: state_lib.TrainState
) -> state_lib.TrainState:
  """Returns `state` with the tree structure of a run's checkpoints."""
  config = learner.config
  return dataclasses.replace(
    state,
    published=(state.policy.params,) * config.rollout.steps_ahead,
    replayed=value_training.abstract_collections(config, learner.mesh),
    frozen={},
  )


def newest(
  checkpointer: checkpoint.Checkpointer,
  learner: learner_lib.Learner,
  start: state_lib.TrainState,
) -> Restored | None:
  """Reads the newest valid checkpoint of a run; returns None if none exists.

  Args:
    checkpointer: the checkpoints of a run.
    learner: the learner of the run.
    start: the state before the first step. The restored state gets the frozen
      weights of `start`, because checkpoints do not contain frozen weights.

  Returns:
    (number of steps done, state, JSON record).

  Raises:
    OtherBase: the checkpoint was trained with other frozen weights.
    Exceptions of `Checkpointer.restore_latest`.
  """
  restored = checkpointer.restore_latest(abstract_state(learner, start))
  if restored is None:
    return None
  done, state, host = restored
  _check_base(done, host, start.frozen)
  return done, state.with_frozen(start.frozen), host


def newest_models(
  checkpointer: checkpoint.Checkpointer, start: state_lib.TrainState
) -> Restored | None:
  """Reads only the models and their optimisers from the newest valid step.

  So the config may differ from that of the run in what else is saved, such as
  the size of the collections that the value model repeats.

  Args:
    checkpointer: the checkpoints of a run, read-only.
    start: see `newest`.

  For the result and the errors see `newest`.
  """
  models = {'policy': start.policy}
  if start.value is not None:
    models['value'] = start.value
  damaged = None
  for step in reversed(checkpointer.steps()):
    host, found = {}, {}
    try:
      for name, model in models.items():
        restored = checkpointer.restore_latest(model, subtree=name, step=step)
        assert restored is not None  # the step exists
        _, found[name], host = restored
    except checkpoint.CorruptCheckpoints as error:
      damaged = damaged or error
    else:
      _check_base(step, host, start.frozen)
      return step, dataclasses.replace(start, **found), host
  if damaged:
    raise damaged
  return None


def policy_params(
  checkpointer: checkpoint.Checkpointer,
  learner: learner_lib.Learner,
  *,
  step: int | None,
) -> tuple[int, functional.Params, functional.Params] | None:
  """Reads only the weights of the policy from a checkpoint.

  Args:
    checkpointer: the checkpoints of a run, read-only.
    learner: the learner of the run.
    step: the step to read; None stands for the newest valid step.

  Returns:
    (number of steps done, weights of `learner.policy` with adapters merged, the
    trained weights alone), or None if no checkpoint was saved.

  Raises:
    Misconfigured: the frozen weights under adapters cannot be read.
    OtherBase: the checkpoint was trained with other frozen weights.
    Exceptions of `Checkpointer.restore_latest`.
  """
  config, frozen = learner.config, {}
  # The checkpoint of a run with adapters lacks the frozen weights under them,
  # which are read from the model's files.
  if config.model.lora.rank:
    with exits.as_misconfigured():
      frozen = weights.load_frozen(config, config.model.path, learner.policy)
  restored = checkpointer.restore_latest(
    learner.abstract_policy_params(), subtree='policy.params', step=step
  )
  if restored is None:
    return None
  done, params, host = restored
  _check_base(done, host, frozen)
  trained = model_roles.Trained(params, None)
  merged = learner.merged_params(model_roles.Params(trained, frozen))
  return done, merged, params


class Policy(NamedTuple):
  """A policy that was read from a checkpoint.

  Attributes:
    config: the config of the policy's run. If the run made the weights that it
      started from, `model.path` is the directory of these weights.
    tokenizer: the tokenizer of the run.
    learner: the learner of the run.
    step: the number of steps that the policy was trained for.
    params: the weights of `learner.policy`, with adapters merged.
    trained: the weights that were trained: either adapters and heads, or all
      weights.
  """

  config: Any
  tokenizer: tokenizer_lib.Tokenizer
  learner: learner_lib.Learner
  step: int
  params: functional.Params
  trained: functional.Params


def read_policy(
  config,
  workdir: str | pathlib.Path,
  *,
  step: int | None,
  mesh: jax.sharding.Mesh | None = None,
) -> Policy:
  """Reads the policy of a checkpoint; all hosts of the mesh call this.

  Args:
    config, workdir, step: see `tools.checkpoints.export`.
    mesh: the devices that hold the weights; None stands for the mesh of
      `mesh_for_width`.

  Raises:
    Misconfigured: the run has no checkpoint of this step, or none at all.
    Exceptions with an `exit_code`, see `loop.train`.
  """
  with exits.as_misconfigured():
    config = run_record.with_start(config, pathlib.Path(workdir))
    # The questions are loaded only if there is no tokenizer directory: the
    # tokenizer is then made from the questions.
    path = config.model.path or config.model.tokenizer_path
    questions = None if path else components.build_questions(config)
    tokenizer = model_files.build_tokenizer(config, questions)
    if mesh is None:
      mesh = mesh_for_width(model_files.shape(config, tokenizer).hidden_size)
    shape = model_files.build_model_config(config, tokenizer, mesh)
    learner = learner_lib.Learner(config, shape, mesh)
  checkpointer = checkpoint.Checkpointer(workdir, read_only=True)
  steps = checkpointer.steps()
  if not steps or step not in (None, *steps):
    wanted = 'checkpoint' if step is None else f'checkpoint of step {step}'
    there = ', '.join(map(str, steps)) or 'none'
    raise exits.Misconfigured(f'{workdir}: no {wanted}; saved steps: {there}')
  restored = policy_params(checkpointer, learner, step=step)
  checkpointer.close()
  # The result is not None: the checkpoint exists, and `policy_params` raises if
  # the checkpoint is damaged.
  assert restored is not None
  return Policy(config, tokenizer, learner, *restored)


def mesh_for_width(hidden_size: int) -> jax.sharding.Mesh:
  """Returns the largest mesh whose number of devices divides `hidden_size`."""
  devices = jax.devices()
  most = max(n for n in range(1, len(devices) + 1) if hidden_size % n == 0)
  return mesh_lib.make_mesh(data=1, fsdp=-1, tensor=1, devices=devices[:most])


def _base_record(frozen: functional.Params) -> dict[str, Any]:
  """Returns the fingerprints of frozen weights as a record; {} without any."""
  return {_BASE: _fingerprints(frozen)} if frozen else {}


def _check_base(
  step: int, host: dict[str, Any], frozen: functional.Params
) -> None:
  """Raises `OtherBase` if a step was not trained with these frozen weights."""
  if frozen and host[_BASE] != _fingerprints(frozen):
    raise OtherBase(
      f'step {step} was trained with other weights under the adapters: '
      'restore the files of model.path, or use another workdir'
    )


def _fingerprints(params: functional.Params) -> list[int]:
  return fingerprint.fingerprints(jax.tree.leaves(params))
