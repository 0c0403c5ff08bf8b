"""Measures what each choice of the authors' run changes on a saved batch.

    python -m stppo_jax lab collect --config=configs/quickstart.py:st_ppo \
        --config.rollout.group_size=4 --updates=16 --out=runs/far.npz
    python -m benchmarks.reference_choices --batch=runs/far.npz

configs/reference.py lists the choices. One more choice is the mean of the means
of microbatches, with which no run of this code trains. The first line of the
table has our choices, and each further line replaces one of them by the
authors' choice (two choices that need each other count as one). The last line
has all choices of the authors. The lines compare the gradients of the loss with
respect to the log-probabilities. `cosine` is the cosine of the angle between
the line's gradient and the gradient with our choices, and `norm` is the norm of
the line's gradient divided by the norm of the gradient with our choices. The
parts of the batch that stand for microbatches have 16 trajectories each, in the
order of the batch.
"""

import argparse
from collections.abc import Mapping, Sequence
import copy
import functools
import sys
from typing import Any

import jax
from ml_collections import config_dict
import numpy as np

from benchmarks import measure
from stppo_jax import exits
from stppo_jax.configs import algorithms as algorithms_lib
from stppo_jax.configs import reference
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.tools.lab import estimates
from stppo_jax.tools.lab import lab
from stppo_jax.tools.lab import saved_batch

HEADER = ('choice', 'cosine', 'norm', 'critic is trained at')
_ROWS = 16
_ALGORITHM = 'st_ppo'
_MEANS = 'mean of the means of microbatches'


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the table, or what is wrong with the file."""
  parser = argparse.ArgumentParser(prog='benchmarks.reference_choices')
  parser.add_argument('--batch', required=True, help='a file of lab collect')
  batch = parser.parse_args(arguments).batch
  try:
    with jax.enable_x64(True), exits.naming(f'--batch={batch}'):
      print(measure.table(HEADER, rows(saved_batch.load(batch))))
  except exits.Misconfigured as error:
    print(error, file=sys.stderr)
    return exits.USAGE
  return 0


def rows(arrays: saved_batch.Arrays) -> list[tuple[str, ...]]:
  """Returns the lines of the table."""
  changes: dict[str, dict[str, Any]] = {
    f'{key.removeprefix("algorithm.")} = {value}': {key: value}
    for key, value in (reference.ALWAYS | reference.WITH_VALUES).items()
    # The whole batch is one minibatch, so shuffling has no effect here.
    if key != 'updates.shuffle'
  }
  changes = {'ours': {}, _MEANS: {_MEANS: True}, **_together(changes)}
  changes['all'] = reference.ALWAYS | reference.WITH_VALUES | {_MEANS: True}
  found = {name: _gradient(change, arrays) for name, change in changes.items()}
  ours, trained = found['ours']
  lines = []
  for name, (gradient, count) in found.items():
    norm = np.linalg.norm(gradient)
    cosine = np.vdot(gradient, ours) / norm / np.linalg.norm(ours)
    ratio = norm / np.linalg.norm(ours)
    shown = f'{count / trained:.2f} times the tokens'
    lines.append((name, f'{cosine:.4f}', f'{ratio:.3f}', shown))
  return lines


def _together(changes: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the changes; two changes that need each other become one change."""
  observations = 'advantage.observation_tokens = included'
  critic = 'advantage.critic_tokens = response'
  both = changes[observations] | changes[critic]
  changes = {**changes, f'{observations}, {critic}': both}
  del changes[observations], changes[critic]
  return changes


def _gradient(
  change: Mapping[str, Any], arrays: saved_batch.Arrays
) -> tuple[np.ndarray, int]:
  """Returns the gradient, and the number of tokens that train the critic.

  Args:
    change: the config keys that differ from our choices, with their values.
    arrays: the saved batch.
  """
  options: Any = config_dict.ConfigDict(
    copy.deepcopy(algorithms_lib.ALGORITHMS[_ALGORITHM])
  )
  for key, value in change.items():
    if key.startswith('algorithm.'):
      options.update_from_flattened_dict(
        {key.removeprefix('algorithm.'): value}
      )
  algorithm = algorithm_lib.build_algorithm(options)
  estimator = estimates.build_estimator(options.advantage)
  needs = lab.required_arrays(algorithm, entropy_coefficient=0.0)
  needs |= estimates.required_arrays(estimator)
  found = saved_batch.select(
    arrays, dict.fromkeys(needs, 'the table'), dtype=np.float64
  )
  estimated = estimates.estimate(estimator, found).arrays
  found = {**found, 'advantages_BL': estimated['advantages_BL']}
  return (
    _of_parts(algorithm, found, change.get(_MEANS, False)),
    int(estimated['value_mask_BL'].sum()),
  )


def _of_parts(
  algorithm: algorithm_lib.Algorithm,
  arrays: saved_batch.Arrays,
  mean_of_means: bool,
) -> np.ndarray:
  """Returns the gradient of the batch, formed from microbatches if needed.

  Args:
    algorithm: the algorithm.
    arrays: the arrays of the batch that the algorithm needs.
    mean_of_means: whether every microbatch with policy tokens has the same
      weight. If False, the weight of a microbatch is its share of the policy
      tokens. Then microbatches are used only if the algorithm depends on them.
  """
  gradient = functools.partial(
    lab.loss_and_gradient, algorithm, entropy_coefficient=0.0
  )
  if not (mean_of_means or algorithm.depends_on_microbatches):
    return gradient(arrays).arrays['dloss_dlogprobs_BL']
  num_rows = len(arrays['loss_mask_BL'])
  parts = [
    {name: x[start : start + _ROWS] for name, x in arrays.items()}
    for start in range(0, num_rows, _ROWS)
  ]
  counts = np.array([part['loss_mask_BL'].sum() for part in parts])
  shares = counts / counts.sum()
  if mean_of_means:
    shares = (counts > 0) / (counts > 0).sum()
  return np.concatenate(
    [
      share * gradient(part).arrays['dloss_dlogprobs_BL']
      for share, part in zip(shares, parts, strict=True)
    ]
  )


if __name__ == '__main__':
  sys.exit(main())
