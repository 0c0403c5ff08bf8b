"""Times the whole update, policy and value model, against plain torch.

    python -m benchmarks.torch_update

Both sides start from the same weights and use the same batch, in float32. Both
make two forward and two backward passes with a token-level loss with entropy
and a clipped value loss, clip the norms of the gradients, and apply AdamW.
Our side is the update of a run (`benchmarks/learners.py`), its metrics and
diagnostics included, with two rows in a microbatch and a microbatch on each
core. The other side is `benchmarks/torch_trainer.py`, eager and compiled by
`torch.compile`, with the threads, the microbatch and the AdamW that are the
fastest in eager mode. Nothing is timed before the first updates agree. Several
sizes are timed, because neither side is the faster one at all sizes.

Rows are full, or have the lengths of dialogues: log-normal with a median of
1,300 tokens of at most 4,096, all in proportion to the length of a row. Our
side packs dialogues into rows, as every run does. Torch pads dialogues, or
packs them in the same way.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from benchmarks import learners
from benchmarks import measure
from benchmarks import torch_trainer
from stppo_jax.models.hf import families

PARITY = 1e-5  # the tolerance of losses
# The tolerance of gradient norms, and of gradients relative to the largest.
GRADIENTS = 3e-5
# The largest distance between the new weights of both sides, divided by the
# distance that the weights moved in the update.
MOVED = 1e-3
OURS, EAGER, COMPILED = 'ours', 'torch, eager', 'torch.compile'
PADDED, PACKED = 'torch, padded', 'torch, packed'
GOALS = {EAGER: 1.2, PADDED: 2.0, PACKED: 1.3}
HEADER = (
  'width x layers, [rows, length], vocabulary',
  'case',
  'ours, ms',
  'torch, ms',
  'torch / ours',
  'of the least',
  'threads, microbatch, AdamW',
)
_CORE_ROWS = 2  # the rows of a microbatch that fit into a core's cache
SIZES = tuple(
  learners.Sizes(*sizes, core_rows=_CORE_ROWS)
  for sizes in (
    (290, 64, 3, 64, 160),  # the sizes of the quickstart
    (290, 128, 4, 16, 256),
    (4096, 128, 4, 16, 256),
    (4096, 256, 6, 16, 256),
    (4096, 512, 8, 8, 256),
  )
) + tuple(
  learners.Sizes(*sizes, core_rows=_CORE_ROWS, dialogues=True)
  for sizes in (
    (290, 64, 3, 64, 160),
    (290, 128, 4, 32, 512),
    (4096, 256, 6, 32, 512),
  )
)


def assert_parity(
  ours: learners.Trainer,
  metrics: Mapping[str, float],
  theirs: torch_trainer.Trainer,
  their_metrics: Mapping[str, float],
  before: tuple,
) -> None:
  """Checks that both first updates are equal but for rounding.

  Losses, gradient norms, gradients and new weights are compared.

  Args:
    ours: our trainer after its first update.
    metrics: the metrics of that update.
    theirs: torch's trainer after its first update.
    their_metrics: the metrics of that update.
    before: the weights before both updates, see `learners.Trainer.weights`.

  Raises:
    AssertionError: if the updates differ.
  """
  entropy = ours.config.loss.entropy_coefficient * metrics['actor/entropy']
  expected = {
    'policy_loss': metrics['actor/pg_loss'] - entropy,
    'policy_norm': metrics['actor/grad_norm'],
    'value_loss': metrics['critic/vf_loss'],
    'value_norm': metrics['critic/grad_norm'],
  }
  for name, number in expected.items():
    tolerance = GRADIENTS if name.endswith('norm') else PARITY
    np.testing.assert_allclose(
      number, their_metrics[name], tolerance, tolerance, err_msg=name
    )
  for name, start in zip(('policy', 'value'), before, strict=True):
    model = getattr(ours.state, name)
    named = lambda tree: _named(ours.shape, tree)
    # After one update, Adam's first moments are the clipped gradients times
    # 1 - b1.
    moments = theirs.moments(name)
    largest = max(np.abs(x).max() for x in moments.values())
    for key, moment in named(model.optimizer.mu).items():
      np.testing.assert_allclose(
        moment, moments[key], 0, GRADIENTS * largest, err_msg=f'{name} {key}'
      )
    ended = dict(getattr(theirs, name).named_parameters())
    # Adam magnifies the smallest gradients, so single weights may differ. The
    # distance between the new weights of both sides must be small compared with
    # the distance that they moved.
    apart = moved = 0.0
    for (key, now), old in zip(
      named(model.params).items(), named(start).values(), strict=True
    ):
      apart += np.sum(np.square(now - ended[key].detach().numpy()))
      moved += np.sum(np.square(now - old))
    assert apart**0.5 < MOVED * moved**0.5, (name, apart, moved)


def _named(shape, tree) -> dict[str, np.ndarray]:
  """Returns tensors of a parameter tree by their names in Hugging Face files.

  The value head is left out, because these files have no value head. Its
  gradient is part of the norm, which is compared too.
  """
  named = {}
  for entry in families.entries(shape):
    leaf = tree
    for key in entry.path:
      leaf = leaf[key]
    tensor = np.asarray(leaf)[entry.index]
    named[entry.hf_name] = tensor.T if entry.transposed else tensor
  return named


class Pair:
  """Our trainer and torch's trainers, after a first update that was equal.

  Attributes:
    ours: our trainer.
    before: the weights before the first update.
    metrics: our metrics of the first update.
    theirs: torch's eager trainer, which pads dialogues.
    fastest: the settings of each trainer of torch, by its name. The compiled
      trainer has the fastest settings of the eager trainer.
    seconds: the seconds of the first step of each trainer that compiles, by its
      name.
  """

  def __init__(self, sizes: learners.Sizes, *, compiled: bool):
    self.ours = learners.Trainer(sizes)
    self.before = self.ours.weights()
    self.seconds = {}
    self.seconds[OURS], self.metrics = measure.once(
      measure.single(self.ours.step)
    )
    self.theirs = torch_trainer.Trainer(self.ours, self.before)
    self._trainers = {OURS: self.ours, EAGER: self.theirs}
    if sizes.dialogues:
      packed = torch_trainer.Trainer(self.ours, self.before, packed=True)
      self._trainers = {OURS: self.ours, PADDED: self.theirs, PACKED: packed}
    self.fastest = {}
    for name, trainer in list(self._trainers.items())[1:]:
      self._check(trainer)
      self.fastest[name] = torch_trainer.use_fastest(trainer)
    if compiled and not sizes.dialogues:
      fastest = self.fastest[COMPILED] = self.fastest[EAGER]
      self._trainers[COMPILED] = torch_trainer.Trainer(
        self.ours,
        self.before,
        compiled=True,
        form=fastest.form,
        microbatch=fastest.microbatch,
      )
      self.seconds[COMPILED] = self._check(self._trainers[COMPILED])

  def cases(self) -> dict[str, measure.Case]:
    """Returns a case for each trainer, in which a sample is one step."""

    def case(name, trainer):
      def step():
        if name in self.fastest:
          torch.set_num_threads(self.fastest[name].threads)
        return trainer.step()

      return measure.single(step)

    return {name: case(name, x) for name, x in self._trainers.items()}

  def _check(self, trainer) -> float:
    """Makes a trainer's first step and checks it; returns its seconds."""
    seconds, metrics = measure.once(measure.single(trainer.step))
    assert_parity(self.ours, self.metrics, trainer, metrics, self.before)
    return seconds


def run(
  sizes: Sequence[learners.Sizes], *, repeats: int, compiled: bool
) -> str:
  """Returns the table, first steps and whether the times can be trusted.

  Raises:
    AssertionError: if the updates of both sides differ; nothing is timed then.
  """
  lines, first, timed = [], [], {}
  threads = torch.get_num_threads()
  for size in sizes:
    # The size before may have set another number of threads.
    torch.set_num_threads(threads)
    pair = Pair(size, compiled=compiled)
    seconds = measure.interleave(pair.cases(), repeats=repeats)
    timed |= {(str(size), name): x for name, x in seconds.items()}
    first.append(
      f'{size}: '
      + ', '.join(f'{name} {x:.1f}' for name, x in pair.seconds.items())
    )
    lines += [
      (
        str(size),
        name,
        *measure.against(seconds, name, OURS),
        str(pair.fastest[name]),
      )
      for name in list(seconds)[1:]
    ]
  return '\n'.join(
    (
      measure.table(HEADER, lines),
      '',
      'goals, torch / ours: '
      + ', '.join(f'{name} at least {goal}' for name, goal in GOALS.items()),
      'first steps, which compile, s:',
      *first,
      measure.verdict(timed),
    )
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser('torch_update', repeats=7)
  parser.add_argument(
    '--sizes',
    type=_sizes,
    nargs='+',
    default=SIZES,
    metavar='SIZES',
    help='vocabulary,width,layers,rows,length of each size; a sixth number '
    'that is not 0 gives rows the lengths of dialogues',
  )
  parser.add_argument(
    '--no_compile', action='store_true', help='without torch.compile'
  )
  flags = measure.start(parser, arguments, torch=torch.__version__)
  torch.set_num_threads(flags.cores)
  print(
    'updates of policy and value model, float32; ms: median (least-greatest) '
    f'of {flags.repeats}, quotient: median (middle half)\n'
  )
  print(run(flags.sizes, repeats=flags.repeats, compiled=not flags.no_compile))


def _sizes(text: str) -> learners.Sizes:
  *sizes, dialogues = map(int, (text + ',0').split(',')[:6])
  return learners.Sizes(*sizes, core_rows=_CORE_ROWS, dialogues=bool(dialogues))


if __name__ == '__main__':
  main()
