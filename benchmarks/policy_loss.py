"""Times the policy loss and its gradient against plain torch.

    python -m benchmarks.policy_loss

Both sides compute the same formula: from log-probabilities [B, L] to the loss
and its gradient with respect to them, in float32 on all cores of the process.
Ours is jitted. Torch is eager, in all forms of `torch_reference.py`, of which
the fastest counts. Nothing is timed before loss and gradient agree to 1e-6.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import torch

from benchmarks import batches
from benchmarks import measure
from benchmarks import torch_reference
from stppo_jax.configs import algorithms
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import segments

PARITY = 1e-6  # relative to the loss, and to the gradient's largest entry
HEADER = (
  'algorithm',
  'torch form',
  'ours, ms',
  'torch, ms',
  'torch / ours',
  'of the least',
  'goal',
)


class Setting(NamedTuple):
  """The torch functions of an algorithm, and the goal of the quotient."""

  turn_means: Mapping[str, torch_reference.TurnMeans | None]
  corrected: bool
  goal: float


ALGORITHMS = {
  'token_ppo': Setting({'plain': None}, False, 3.0),
  'turn_ppo': Setting(torch_reference.TURN_MEANS, False, 1.2),
  'st_ppo': Setting(torch_reference.TURN_MEANS, True, 1.2),
}


def compile_ours(name, batch, logprobs_BL, entropy_BL, num_turns):
  """Returns the compiled program and its arguments, on the device."""

  def loss(logprobs_BL, entropy_BL, algorithm, batch):
    return batches.policy_loss(
      algorithm,
      logprobs_BL,
      entropy_BL,
      batch,
      entropy_coefficient=torch_reference.ENTROPY_COEFFICIENT,
      num_turns=num_turns,
    ).loss

  algorithm = algorithm_lib.build_algorithm(algorithms.ALGORITHMS[name])
  arrays = jax.device_put((logprobs_BL, entropy_BL))
  arguments = (*arrays, algorithm, jax.device_put(batch))
  return measure.compiled(jax.value_and_grad(loss), *arguments), arguments


def _torch(setting, turn_means, batch, logprobs_BL, entropy_BL, num_turns):
  """Returns a function that returns the loss and its gradient."""
  leaf_BL = torch.tensor(logprobs_BL, requires_grad=True)
  arguments = [
    torch.tensor(x)
    for x in (
      batch.old_logprobs_BL,
      batch.advantages_BL,
      entropy_BL,
      batch.loss_mask_BL,
      batch.turn_ids_BL.astype(np.int64),
    )
  ]

  def run():
    loss = torch_reference.policy_loss(
      leaf_BL,
      *arguments,
      num_turns=num_turns,
      turn_means=turn_means,
      corrected=setting.corrected,
    )
    (gradient_BL,) = torch.autograd.grad(loss, leaf_BL)
    return loss.detach(), gradient_BL

  return run


def _assert_parity(ours, theirs, name):
  (loss, gradient_BL), (their_loss, their_gradient_BL) = ours, theirs
  np.testing.assert_allclose(loss, their_loss, rtol=PARITY, err_msg=name)
  largest = float(their_gradient_BL.abs().max())
  np.testing.assert_allclose(
    gradient_BL, their_gradient_BL, 0, PARITY * largest, err_msg=name
  )


def run(rows: int, length: int, num_turns: int, *, repeats: int) -> str:
  """Returns the table, compile times and whether the times can be trusted.

  Raises:
    AssertionError: if ours and torch disagree; nothing is timed then.
  """
  batch, logprobs_BL, entropy_BL = batches.token_batch(
    rows=rows, length=length, num_turns=num_turns
  )
  lines, compiling, timed = [], [], {}
  for name, setting in ALGORITHMS.items():
    data = (batch, logprobs_BL, entropy_BL, num_turns)
    ours, arguments = compile_ours(name, *data)
    compiling.append(f'{name} {ours.seconds:.2f}')
    cases = {'ours': ours.case(*arguments)}
    for form, turn_means in setting.turn_means.items():
      theirs = _torch(setting, turn_means, *data)
      _assert_parity(ours.program(*arguments), theirs(), f'{name} {form}')
      cases[form] = measure.Case(theirs)
    seconds = measure.interleave(cases, repeats=repeats)
    timed |= {(name, form): x for form, x in seconds.items()}
    for form in setting.turn_means:
      cells = measure.against(seconds, form, 'ours')
      lines.append((name, form, *cells, f'{setting.goal:g}'))
  return '\n'.join(
    (
      measure.table(HEADER, lines),
      '',
      'compile, s: ' + ', '.join(compiling),
      measure.verdict(timed),
    )
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser(
    'policy_loss', rows=64, length=4096, turns=16, repeats=9
  )
  parser.add_argument('--implementation', choices=segments.IMPLEMENTATIONS)
  flags = measure.start(parser, arguments, torch=torch.__version__)
  torch.set_num_threads(flags.cores)
  if flags.implementation:
    implementation = segments.IMPLEMENTATIONS[flags.implementation]
    segments.choose = lambda num_segments: implementation
  print(
    f'loss and gradient, float32 [{flags.rows}, {flags.length}], '
    f'{flags.turns} turns; ms: median (least-greatest) of {flags.repeats}, '
    'quotient: median (middle half)\n'
  )
  sizes = flags.rows, flags.length, flags.turns
  print(run(*sizes, repeats=flags.repeats))


if __name__ == '__main__':
  main()
