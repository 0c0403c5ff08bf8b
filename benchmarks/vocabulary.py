"""Times the whole update with a large vocabulary against plain torch.

    python -m benchmarks.vocabulary

Policy and value model are built as in `benchmarks/torch_update.py`, and the
checks of that benchmark prove that both sides agree before anything is timed.
Torch's side is the eager Qwen2 of `transformers`, which keeps the logits of all
tokens in memory. Our side keeps the logits of a chunk of the loss positions.
The peak memory of each side is measured in a process of its own: weights,
moments, gradients and temporary memory. For the last table, our loss and
gradient are compiled for longer rows and not run. The benchmark needs Linux.
"""

import argparse
from collections.abc import Sequence
import ctypes
import dataclasses
import itertools
import math
import os
import pathlib
import subprocess
import sys

import jax
import torch

from benchmarks import batches
from benchmarks import learners
from benchmarks import measure
from benchmarks import torch_reference
from benchmarks import torch_trainer
from benchmarks import torch_update
from stppo_jax.configs import algorithms
from stppo_jax.models import functional
from stppo_jax.rl import algorithm as algorithm_lib

OURS, TORCH = torch_update.OURS, torch_update.EAGER
TIME_GOAL, MEMORY_GOAL, SLOPE_GOAL = 1.0, 0.4, 1.15
HEADER = ('case', 'ms', 'peak memory, MiB')
_SMALL_VOCABULARY = 1024
_STEPS = 2  # two, because torch allocates Adam's moments in the first step
_STATUS = pathlib.Path('/proc/self/status')
_ROOT = pathlib.Path(__file__).resolve().parent.parent


def peak(side: str, sizes: learners.Sizes) -> float:
  """Returns the peak memory of one side during updates, in MiB.

  Args:
    side: OURS or TORCH.
    sizes: the sizes of the models and of the batch.
  """
  trainer = learners.Trainer(sizes)
  if side == OURS:
    trainer.step()  # compiles; the compiler's memory does not count
    held = trainer.state
  else:
    held = trainer.weights()
    trainer = torch_trainer.Trainer(trainer, held)
  size = sum(x.nbytes for x in jax.tree.leaves(held))
  del held
  # Freed memory is given back to the system, and the greatest memory of the
  # process so far (VmHWM) is reset, so that only later memory counts.
  ctypes.CDLL(None).malloc_trim(0)
  _STATUS.with_name('clear_refs').write_text('5')
  before = _kilobytes('VmRSS')
  for _ in range(_STEPS):
    trainer.step()
  return (_kilobytes('VmHWM') - before) / 2**10 + size / 2**20


def _kilobytes(name: str) -> int:
  """Returns a number of /proc/self/status, in kB."""
  lines = dict(x.split(':') for x in _STATUS.read_text().splitlines())
  return int(lines[name].split()[0])


def peak_apart(side: str, sizes: learners.Sizes) -> float:
  """Returns the result of `peak` in a process of its own."""
  flags = [f'--{name}={value}' for name, value in sizes._asdict().items()]
  command = [sys.executable, '-m', 'benchmarks.vocabulary', f'--peak={side}']
  done = subprocess.run(
    [*command, *flags],
    cwd=_ROOT,
    env=os.environ | {'GLIBC_TUNABLES': ''},  # freed memory is given back
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  )
  return float(done.stdout.split()[-1])


def _loss(model: functional.Model):
  """Returns the function that computes a policy's loss.

  The function takes the parameters of the policy and a batch.
  """
  algorithm = algorithm_lib.build_algorithm(
    algorithms.ALGORITHMS[learners.ALGORITHM]
  )

  def loss(params, batch):
    logprobs_BL, entropy_BL = model.logprobs_and_entropy(
      params,
      batch.tokens_BL,
      loss_positions_BM=batch.loss_positions_BM,
      temperature=1.0,
    )
    return batches.policy_loss(
      algorithm,
      logprobs_BL,
      entropy_BL,
      batch,
      entropy_coefficient=torch_reference.ENTROPY_COEFFICIENT,
      num_turns=learners.NUM_TURNS,
    ).loss

  return loss


def temporary(sizes: learners.Sizes) -> int:
  """Returns the bytes of temporary memory of the compiled loss and gradient."""
  shape = dataclasses.replace(sizes.shape, remat='full', scan_unroll=1)
  model = functional.Model(shape, 'vocabulary', chunk=sizes.chunk)
  params = jax.eval_shape(model.init, jax.random.key(0))
  program = (
    jax.jit(jax.value_and_grad(_loss(model)))
    .lower(params, learners.random_batch(sizes))
    .compile()
  )
  return program.memory_analysis().temp_size_in_bytes


def slope(sizes: learners.Sizes, lengths: Sequence[int]) -> str:
  """Returns the table of how temporary memory grows with the length.

  The logits of a chunk take the same memory at any length, which hides the
  growth of all other memory. So a second column has a small vocabulary. A slope
  is the growth of log memory between neighbouring lengths, divided by the
  growth of log length. The greatest slope is compared with the goal.

  Args:
    sizes: the sizes of the models and of the batch, except for the length.
    lengths: the numbers of tokens of a row.
  """
  vocabularies = (sizes.vocabulary, min(sizes.vocabulary, _SMALL_VOCABULARY))
  header, columns, steepest = ['length'], [], []
  for size in dict.fromkeys(vocabularies):
    found = [
      temporary(sizes._replace(vocabulary=size, length=n)) for n in lengths
    ]
    grown = [
      math.log(many / few) / math.log(longer / shorter)
      for (shorter, few), (longer, many) in itertools.pairwise(
        zip(lengths, found, strict=True)
      )
    ]
    header += [f'temporary memory, MiB, vocabulary {size}', 'slope']
    columns.append([f'{n / 2**20:.1f}' for n in found])
    columns.append(['', *(f'{x:.3f}' for x in grown)])
    steepest += grown
  lines = list(zip(map(str, lengths), *columns, strict=True))
  return '\n'.join(
    (
      measure.table(header, lines),
      '',
      f'greatest slope {max(steepest):.3f}; goal: at most {SLOPE_GOAL}',
    )
  )


def run(sizes: learners.Sizes, *, repeats: int) -> str:
  """Returns times, peaks, quotients and whether the times can be trusted.

  Raises:
    AssertionError: if the updates of both sides differ; nothing is timed then.
  """
  pair = torch_update.Pair(sizes, compiled=False)
  seconds = measure.interleave(pair.cases(), repeats=repeats)
  compiling, tried = pair.seconds[OURS], str(pair.fastest)
  del pair  # frees its memory
  peaks = {side: peak_apart(side, sizes) for side in (OURS, TORCH)}
  lines = [
    (side, measure.milliseconds(seconds[side]), f'{peaks[side]:.0f}')
    for side in (OURS, TORCH)
  ]
  return '\n'.join(
    (
      measure.table(HEADER, lines),
      '',
      measure.comparison(seconds, TORCH, OURS, f'at least {TIME_GOAL:g}'),
      f'memory, ours / torch: {peaks[OURS] / peaks[TORCH]:.3f}; '
      f'goal: at most {MEMORY_GOAL}',
      f'first step, which compiles, s: {compiling:.1f}; torch threads, '
      f'microbatch and AdamW: {tried}',
      measure.verdict(seconds),
    )
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser(
    'vocabulary',
    vocabulary=151936,
    width=256,
    layers=2,
    rows=4,
    length=512,
    chunk=128,
    core_rows=0,
    repeats=7,
  )
  parser.add_argument(
    '--lengths',
    type=measure.positive,
    nargs='*',
    default=[512, 1024, 2048, 4096, 8192],
    help='of the table of temporary memory: none, or at least two',
  )
  parser.add_argument('--peak', choices=(OURS, TORCH), help=argparse.SUPPRESS)
  given = parser.parse_args(arguments).lengths
  if len(given) == 1:
    parser.error(f'--lengths={given[0]}: must be none, or at least two')
  flags = measure.start(parser, arguments, torch=torch.__version__)
  torch.set_num_threads(flags.cores)
  sizes = learners.Sizes(
    *(getattr(flags, name) for name in learners.Sizes._fields)
  )
  if flags.peak:
    print(peak(flags.peak, sizes))
    return
  print(
    'updates of policy and value model, float32; width x layers, [rows, '
    f'length], vocabulary: {sizes}; chunks of {sizes.chunk}; ms: '
    f'median (least-greatest) of {flags.repeats}, quotient: median (middle '
    'half)\n'
  )
  print(run(sizes, repeats=flags.repeats))
  if flags.lengths:
    # This table is for one row; the backward pass recomputes the layers.
    print('\n' + slope(sizes._replace(rows=1), flags.lengths))


if __name__ == '__main__':
  main()
