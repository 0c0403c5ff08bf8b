"""How long a loop waits for a save that threads write, against a whole save.

    python -m benchmarks.checkpoints --megabytes 400

The state has as many bytes as that, in 40 arrays of random numbers. Saves of
both kinds alternate; after each, an update donates the state. The last line has
the medians and their quotient, which is to be at most 0.1.
"""

import argparse
from collections.abc import Sequence
import pathlib
import statistics
import tempfile
import time

import jax

from benchmarks import measure
from stppo_jax.records.checkpoints import checkpoint

_GOAL = 0.1
_ARRAYS, _WIDTH = 40, 1024


def _state(megabytes: int) -> dict[str, jax.Array]:
  rows = megabytes * 2**20 // (4 * _ARRAYS * _WIDTH)
  keys = jax.random.split(jax.random.key(0), _ARRAYS)
  return {
    f'w{n}': jax.random.normal(key, (rows, _WIDTH))
    for n, key in enumerate(keys)
  }


def report(folder: pathlib.Path, *, megabytes: int, repeats: int) -> str:
  """Returns the line about saves of a state of that size."""
  update = jax.jit(
    lambda state: jax.tree.map(lambda x: 0.999 * x, state), donate_argnums=0
  )
  state = update(_state(megabytes))
  saver = checkpoint.Checkpointer(folder, keep=1)
  seconds = {True: [], False: []}
  for step in range(1, 2 * repeats + 3):
    waits = step % 2 == 0
    jax.block_until_ready(state)
    begin = time.perf_counter()
    saver.save(step, state, {}, waits=waits)
    if step > 2:  # the first ones compile
      seconds[waits].append(time.perf_counter() - begin)
    state = update(state)
    saver.wait()
  saver.close()
  whole, beside = (statistics.median(seconds[waits]) for waits in (True, False))
  return (
    f'{megabytes} MiB: a save takes {whole:.2f} s, and blocks the loop for '
    f'{beside:.3f} s if threads write it: {beside / whole:.3f} (goal {_GOAL})'
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.checkpoints')
  parser.add_argument('--megabytes', type=int, default=400)
  parser.add_argument('--repeats', type=int, default=measure.MIN_REPEATS)
  measure.add_cores(parser)
  flags = parser.parse_args(arguments)
  measure.use_cores(flags.cores)
  print(measure.environment(), end='\n\n')
  with tempfile.TemporaryDirectory() as folder:
    print(
      report(
        pathlib.Path(folder), megabytes=flags.megabytes, repeats=flags.repeats
      )
    )


if __name__ == '__main__':
  main()
