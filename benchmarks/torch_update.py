"""The whole update, policy and value model, against plain torch.

    python -m benchmarks.torch_update

From the same weights on the same batch, float32: two forward and two backward
passes, token-level loss with entropy, clipped value loss, norms clipped, AdamW.
Ours is what a run does (`benchmarks/learners.py`), its metrics and diagnostics
included, two rows at a time, other ones on each core; torch is
`benchmarks/torch_trainer.py`, eager and through `torch.compile`, with the
threads, the rows at a time and the AdamW that are the fastest when it is eager.
Nothing is timed before the first update agrees. One size after the
other, so that it is seen where either is ahead.
"""

import argparse
from collections.abc import Mapping
from collections.abc import Sequence
import time

import numpy as np
import torch

from benchmarks import learners
from benchmarks import measure
from benchmarks import torch_trainer
from stppo_jax.models.hf import names

PARITY = 1e-5  # of losses
GRADIENTS = 3e-5  # of norms, and of gradients relative to the largest
MOVED = 1e-3  # difference of the updated weights / how far they moved
OURS, EAGER, COMPILED = 'ours', 'torch, eager', 'torch.compile'
GOAL = 1.2
HEADER = (
  'width x layers, [rows, length], vocabulary',
  'ours, ms',
  'torch, ms',
  'case',
  'torch / ours',
  'of the least',
  'threads, microbatch, AdamW',
)
_CORE_ROWS = 2  # they fit its cache
SIZES = tuple(
  learners.Sizes(*sizes, core_rows=_CORE_ROWS)
  for sizes in (
    (290, 64, 3, 64, 160),  # of the quickstart
    (290, 128, 4, 16, 256),
    (4096, 128, 4, 16, 256),
    (4096, 256, 6, 16, 256),
    (4096, 512, 8, 8, 256),
  )
)


def assert_parity(
  mine: learners.Trainer,
  metrics: Mapping[str, float],
  theirs: torch_trainer.Trainer,
  found: Mapping[str, float],
  before: tuple,
) -> None:
  """Of the first update: losses, norms, gradients and where weights are.

  Args:
    mine, theirs: after it.
    metrics, found: what their steps told.
    before: weights of policy and value model; see `learners.Trainer`.

  Raises:
    AssertionError: they differ.
  """
  entropy = mine.config.loss.entropy_coefficient * metrics['actor/entropy']
  told = {
    'policy_loss': metrics['actor/pg_loss'] - entropy,
    'policy_norm': metrics['actor/grad_norm'],
    'value_loss': metrics['critic/vf_loss'],
    'value_norm': metrics['critic/grad_norm'],
  }
  for name, number in told.items():
    tolerance = GRADIENTS if name.endswith('norm') else PARITY
    np.testing.assert_allclose(
      number, found[name], tolerance, tolerance, err_msg=name
    )
  for name, start in zip(('policy', 'value'), before, strict=True):
    ours = getattr(mine.state, name)
    named = lambda tree: _named(mine.shape, tree)
    # The first moments are the clipped gradients times 1 - b1.
    moments = theirs.moments(name)
    largest = max(np.abs(x).max() for x in moments.values())
    for key, moment in named(ours.optimizer.mu).items():
      np.testing.assert_allclose(
        moment, moments[key], 0, GRADIENTS * largest, err_msg=f'{name} {key}'
      )
    ended = dict(getattr(theirs, name).named_parameters())
    # Adam makes much of little: single weights differ, all of them do not.
    apart = moved = 0.0
    for (key, now), old in zip(
      named(ours.params).items(), named(start).values(), strict=True
    ):
      apart += np.sum(np.square(now - ended[key].detach().numpy()))
      moved += np.sum(np.square(now - old))
    assert apart**0.5 < MOVED * moved**0.5, (name, apart, moved)


def _named(shape, tree) -> dict[str, np.ndarray]:
  """Tensors of a parameter tree as Hugging Face calls and turns them.

  Without heads: their gradients are in the norms.
  """
  named = {}
  for entry in names.entries(shape):
    leaf = tree
    for key in entry.path:
      leaf = leaf[key]
    part = np.asarray(leaf)[entry.index]
    named[entry.hf_name] = part.T if entry.transposed else part
  return named


class Pair:
  """Both sides after an equal first update.

  Attributes:
    mine: ours.
    theirs: torch, eager.
    fastest: of torch, eager.
    seconds: of first steps, which compile.
  """

  def __init__(self, sizes: learners.Sizes, *, compiled: bool):
    self.mine = learners.Trainer(sizes)
    self._before = self.mine.weights()
    self.seconds = {}
    self.seconds[OURS], self._metrics = _timed(self.mine.step)
    self.theirs = self._torch('fused', compiled=False)
    self._check(self.theirs)
    self.fastest = torch_trainer.use_fastest(self.theirs)
    self._compiled = None
    if compiled:
      self._compiled = self._torch(
        self.fastest.form,
        compiled=True,
        microbatch=self.fastest.microbatch,
      )
      self.seconds[COMPILED] = self._check(self._compiled)

  def cases(self) -> dict[str, measure.Case]:
    """A step a sample: it takes long enough."""
    trainers = {OURS: self.mine, EAGER: self.theirs}
    if self._compiled is not None:
      trainers[COMPILED] = self._compiled
    return {
      name: measure.Case(lambda _, step=trainer.step: step(), lambda: None)
      for name, trainer in trainers.items()
    }

  def _torch(self, form, *, compiled, microbatch=0):
    mine = self.mine
    return torch_trainer.Trainer(
      mine.config,
      mine.shape,
      self._before,
      mine.batch,
      compiled=compiled,
      form=form,
      microbatch=microbatch,
    )

  def _check(self, trainer) -> float:
    """Seconds of its first step, which must be like ours."""
    seconds, found = _timed(trainer.step)
    assert_parity(self.mine, self._metrics, trainer, found, self._before)
    return seconds


def _timed(call):
  begin = time.perf_counter()
  result = call()
  return time.perf_counter() - begin, result


def run(
  sizes: Sequence[learners.Sizes], *, repeats: int, compiled: bool
) -> str:
  """The table; below it first steps and whether it can be trusted.

  Raises:
    AssertionError: ours and torch disagree; nothing is timed then.
  """
  lines, first, timed = [], [], {}
  threads = torch.get_num_threads()
  for size in sizes:
    torch.set_num_threads(threads)  # the size before may have had one
    pair = Pair(size, compiled=compiled)
    seconds = measure.interleave(pair.cases(), repeats=repeats)
    timed |= {(str(size), name): x for name, x in seconds.items()}
    first.append(
      f'{size}: '
      + ', '.join(f'{name} {x:.1f}' for name, x in pair.seconds.items())
    )
    for name in list(seconds)[1:]:
      quotient = measure.quotient(seconds[name], seconds[OURS])
      lines.append(
        (
          str(size),
          measure.milliseconds(seconds[OURS]),
          measure.milliseconds(seconds[name]),
          name,
          str(quotient),
          f'{quotient.least:.2f}',
          str(pair.fastest),
        )
      )
  return '\n'.join(
    (
      measure.table(HEADER, lines),
      '',
      f'goal: torch / ours at least {GOAL}',
      'first steps, which compile, s:',
      *first,
      measure.verdict(timed),
    )
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and where."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.torch_update')
  parser.add_argument('--repeats', type=int, default=7)
  parser.add_argument(
    '--sizes',
    type=_sizes,
    nargs='+',
    default=SIZES,
    metavar='V,D,N,B,L',
    help='vocabulary, width, layers, rows and length',
  )
  parser.add_argument(
    '--no_compile', action='store_true', help='without torch.compile'
  )
  measure.add_cores(parser)
  flags = parser.parse_args(arguments)
  torch.set_num_threads(measure.use_cores(flags.cores))
  print(
    'updates of policy and value model, float32; ms: median (least-greatest) '
    f'of {flags.repeats}, quotient: median (middle half)\n'
  )
  print(measure.environment(torch=torch.__version__), end='\n\n')
  print(run(flags.sizes, repeats=flags.repeats, compiled=not flags.no_compile))


def _sizes(text: str) -> learners.Sizes:
  return learners.Sizes(*map(int, text.split(',')), core_rows=_CORE_ROWS)


if __name__ == '__main__':
  main()
