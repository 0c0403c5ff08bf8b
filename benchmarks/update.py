"""Compares updates at turn level and at token level in the quickstart.

    python -m benchmarks.update

Both algorithms update policy and value model from the same state on the same
annotated batch, with diagnostics, as training does. The state is donated, so
each sample gets a copy of the state; making the copy is not timed.

A program that is compiled a second time may be some percent slower than the
first time, because its memory lies elsewhere and its threads meet at other
times. So each algorithm is compiled twice, in the order token, turn, turn,
token. The times of the two programs of an algorithm are added, and the sums are
compared. `second / first` compares programs of the same algorithms, and shows
how far `turn / token` can be trusted.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import batches
from benchmarks import learners
from benchmarks import measure
from stppo_jax import batch as batch_lib
from stppo_jax.configs import quickstart
from stppo_jax.learner import learner as learner_lib
from stppo_jax.rollout import pack
from stppo_jax.training import components
from stppo_jax.training import model_files

TOKEN, TURN = 'token_ppo', 'turn_ppo'
FIRST, SECOND = 'first', 'second'
CASES = ((TOKEN, FIRST), (TURN, FIRST), (TURN, SECOND), (TOKEN, SECOND))
GOAL = 1.01  # the most for: time at turn level / time at token level
PARITY = 1e-6
HEADER = (
  'algorithm',
  'compiled',
  'updates, ms',
  'compile and first updates, s',
)
_NUM_TURNS = 3  # the turns of a question of two hops
_WARM_STEPS = 1


class Subject(NamedTuple):
  """A learner, a batch, and a state that stays as it is.

  The learner updates copies of the state.
  """

  learner: learner_lib.Learner
  state: object
  batch: batch_lib.TokenBatch

  def fresh(self):
    """Returns a copy of the state for one call of `update`."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, self.state))

  def update(self, state, step: int = _WARM_STEPS) -> dict[str, float]:
    """Makes the updates of a step; returns their metrics.

    Args:
      state: the state, which is donated.
      step: the number of the step. Step 0 updates only the value model, so that
        every ratio is 1. Later steps update both models.
    """
    state, metrics = learners.update_epochs(
      self.learner, state, self.batch, step
    )
    jax.block_until_ready(state)
    return metrics


def _packed(config, vocab_size: int, length: int) -> batch_lib.TokenBatch:
  """Returns a batch as `pack` makes it, with random tokens."""
  batch, _, _ = batches.token_batch(
    rows=config.rollout.trajectories_per_step,
    length=length,
    num_turns=_NUM_TURNS,
  )
  rng = np.random.default_rng(0)
  ids_BL = batch.turn_ids_BL
  last_BL = (ids_BL == _NUM_TURNS) & (np.roll(ids_BL, -1, axis=1) == 0)
  successes_B1 = rng.integers(0, 2, (len(ids_BL), 1))
  return batch.replace(
    tokens_BL=rng.integers(0, vocab_size, ids_BL.shape).astype(np.int32),
    rewards_BL=np.where(last_BL, successes_B1, 0).astype(np.float32),
    loss_positions_BM=pack.loss_positions(batch.loss_mask_BL),
    old_logprobs_BL=None,
    advantages_BL=None,
  )


def subject(config, length: int) -> Subject:
  """Returns a config's learner with its initial state and a random batch."""
  questions = components.build_questions(config)
  tokenizer = model_files.build_tokenizer(config, questions)
  mesh = components.build_mesh(config)
  shape = model_files.build_model_config(config, tokenizer, mesh)
  learner = learner_lib.Learner(config, shape, mesh)
  state = learner.start()
  packed = _packed(config, tokenizer.vocab_size, length)
  batch, _ = learner.annotate(state, packed, reference=learner.reference())
  return Subject(learner, state, jax.block_until_ready(batch))


def assert_parity(metrics: Sequence[dict[str, float]]) -> None:
  """Checks that losses are equal, as they must be if all ratios are 1.

  Args:
    metrics: the metrics of each case in a step whose ratios are all 1.
  """
  one, *others = metrics
  for other in others:
    for name in ('actor/pg_loss', 'actor/entropy', 'critic/vf_loss'):
      np.testing.assert_allclose(
        other[name], one[name], PARITY, PARITY, err_msg=name
      )


def _with_algorithm(config, name: str):
  """Returns a config with another algorithm and a warm-up of the value model.

  In the first step, only the value model is trained.
  """
  config = config.copy_and_resolve_references()
  config.algorithm = quickstart.get_config(name).algorithm
  config.loss.value_warmup_steps = _WARM_STEPS
  return config


def run(config, *, length: int, repeats: int) -> str:
  """Returns the table, the quotients and whether they can be trusted.

  Args:
    config: the config of a run, in which the two algorithms take the place of
      the config's own.
    length: the number of tokens of a row.
    repeats: the number of samples of each case.

  Raises:
    AssertionError: if losses differ although ratios are 1; nothing is timed
      then.
  """
  cases, compiling, metrics = {}, {}, []
  for name in CASES:
    chosen = subject(_with_algorithm(config, name[0]), length)
    compiling[name], first = measure.once(
      measure.Case(functools.partial(chosen.update, step=0), chosen.fresh)
    )
    metrics.append(first)
    cases[name] = measure.Case(chosen.update, chosen.fresh)
  assert_parity(metrics)
  seconds = measure.interleave(cases, repeats=repeats)
  lines = [
    (*name, measure.milliseconds(seconds[name]), f'{compiling[name]:.1f}')
    for name in CASES
  ]

  sums = {
    label: sum(seconds[name] for name in CASES if label in name)
    for label in (TOKEN, TURN, FIRST, SECOND)
  }
  return '\n'.join(
    (
      measure.table(HEADER, lines),
      '',
      measure.comparison(sums, TURN, TOKEN, f'at most {GOAL}'),
      measure.comparison(sums, SECOND, FIRST),
      measure.verdict(seconds),
    )
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  flags = measure.start(
    measure.parser('update', length=160, repeats=15), arguments
  )
  config = quickstart.get_config(TOKEN)
  config.updates.num_epochs = 1  # makes the rounds of samples shorter
  rows = config.updates.minibatch_size
  updates = config.rollout.trajectories_per_step // rows
  print(
    f'{updates} updates of the quickstart, [{rows}, {flags.length}] each; ms: '
    f'median (least-greatest) of {flags.repeats}, quotients: median (middle '
    'half)\n'
  )
  print(run(config, length=flags.length, repeats=flags.repeats))


if __name__ == '__main__':
  main()
