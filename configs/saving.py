"""The sections about saving and resuming a run."""

from collections.abc import Iterator
from typing import Any


def checkpoint() -> dict[str, Any]:
  """Returns the section `checkpoint`."""
  return {
    'every': 50,  # steps between checkpoints; the last step is always saved
    # The number of newest checkpoints that are kept. The checkpoint with the
    # best evaluation is kept too, if checkpoints are saved at evaluated steps.
    'keep': 2,
    # Checkpoints of steps that are multiples of this number are never removed;
    # 0 = no such checkpoints. `every` decides which steps are saved at all.
    'keep_every': 0,
    # Seconds that a save waits for a bucket that is out of reach. Then the run
    # ends, and the same command resumes the run from the previous checkpoint.
    'retry': 600.0,
  }


def resume() -> dict[str, Any]:
  """Returns the section `resume`."""
  return {
    # Keys or sections whose values may differ from the values with which the
    # run was started, such as ('policy_optimizer.learning_rate', 'seed'). Keys
    # that do not change the results of a step may always differ. Keys that set
    # the shapes of saved arrays, such as model.num_layers, may never differ.
    'allow_change': (),
  }


def preemption() -> dict[str, Any]:
  """Returns the section `preemption`."""
  return {
    # Seconds from the signal that ends a run until the process is killed, such
    # as terminationGracePeriodSeconds of Kubernetes. No save is begun if the
    # last save took longer than the time that is left. An update that is still
    # in progress shortly before the process is killed is lost. 0 = the run
    # always waits for the update in progress, and then always saves.
    'grace': 0.0,
  }


def keeps_shapes(names, replay) -> Iterator[str]:
  """Checks that the shape of collections in checkpoints may not change."""
  keys = (
    'env.max_length',
    'rollout.length_bucket',
    'rollout.trajectories_per_step',
  )
  inside = lambda key: any(f'{key}.'.startswith(f'{name}.') for name in names)
  named = [key for key in keys if inside(key)]
  if replay and named:
    yield (
      f'resume.allow_change={names}: must not name {named[0]} or its section '
      f'when updates.value_replay={replay}: the key sets the shape of the '
      'collections in checkpoints'
    )
