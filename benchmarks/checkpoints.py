"""Measures the time that checkpoints cost: fingerprints, and waits for saves.

    python -m benchmarks.checkpoints --megabytes 400

A save computes a fingerprint of every array of the state. The first line
compares the time of all fingerprints of the quickstart with the time of the
updates of a step. The whole step takes longer, and a run saves once in several
steps, so the printed quotient is greater than the share of a run's time that
fingerprints take. The goal for the quotient is at most 0.02.

The last line compares two kinds of saves by the time that the loop waits. A
save of the first kind is written by threads while the loop goes on, and for a
save of the second kind the loop waits. The state has `--megabytes` in 40 arrays
of random numbers. Saves of both kinds alternate; after each save, an update
donates the state. The goal for the quotient of the medians is at most 0.1.
"""

from collections.abc import Sequence
import itertools
import pathlib
import tempfile

import jax
import numpy as np

from benchmarks import measure
from benchmarks import update
from stppo_jax.configs import quickstart
from stppo_jax.records.checkpoints import checkpoint
from stppo_jax.records.checkpoints import fingerprint

_GOAL = 0.1
_FINGERPRINT_GOAL = 0.02
_ARRAYS, _WIDTH = 40, 1024


def report_fingerprints(config, *, length: int, repeats: int) -> str:
  """Returns the line about the fingerprints of a run's state.

  Args:
    config: the config of the run.
    length: the number of tokens of a row.
    repeats: the number of samples of each case.
  """
  subject = update.subject(config, length)
  leaves = jax.tree.leaves(subject.fresh())
  seconds = measure.interleave(
    {
      'fingerprints': measure.Case(lambda: fingerprint.fingerprints(leaves)),
      'updates': measure.Case(subject.update, subject.fresh),
    },
    repeats=repeats,
  )
  quotient = measure.quotient(seconds['fingerprints'], seconds['updates'])
  return (
    f'the fingerprints of {sum(leaf.nbytes for leaf in leaves) / 2**20:.1f} '
    f'MiB take {measure.milliseconds(seconds["fingerprints"])} ms, the updates '
    f'of a step {measure.milliseconds(seconds["updates"])} ms: {quotient} '
    f'(goal {_FINGERPRINT_GOAL}); {measure.verdict(seconds)}'
  )


def _state(megabytes: int) -> dict[str, jax.Array]:
  rows = megabytes * 2**20 // (4 * _ARRAYS * _WIDTH)
  keys = jax.random.split(jax.random.key(0), _ARRAYS)
  return {
    f'w{n}': jax.random.normal(key, (rows, _WIDTH))
    for n, key in enumerate(keys)
  }


def report(folder: pathlib.Path, *, megabytes: int, repeats: int) -> str:
  """Returns the line about saves of a state of `megabytes`."""
  update = jax.jit(
    lambda state: jax.tree.map(lambda x: 0.999 * x, state), donate_argnums=0
  )
  state = update(_state(megabytes))
  saver = checkpoint.Checkpointer(folder, keep=1)
  steps = itertools.count(1)

  def next_state() -> jax.Array:
    nonlocal state
    state = update(state)
    saver.wait()
    return jax.block_until_ready(state)

  seconds = measure.interleave(
    {
      name: measure.Case(
        lambda state, waits=name == 'whole': saver.save(
          next(steps), state, {}, waits=waits
        ),
        next_state,
      )
      for name in ('whole', 'beside')
    },
    repeats=repeats,
  )
  saver.close()
  whole, beside = (float(np.median(x)) for x in seconds.values())
  return (
    f'{megabytes} MiB: a save takes {whole:.2f} s, and blocks the loop for '
    f'{beside:.3f} s if threads write it: {beside / whole:.3f} (goal {_GOAL})'
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser(
    'checkpoints', megabytes=400, length=160, repeats=measure.MIN_REPEATS
  )
  flags = measure.start(parser, arguments)
  config = quickstart.get_config()
  print(
    report_fingerprints(config, length=flags.length, repeats=flags.repeats),
    end='\n\n',
  )
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    print(report(folder, megabytes=flags.megabytes, repeats=flags.repeats))


if __name__ == '__main__':
  main()
