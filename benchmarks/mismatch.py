"""Measures how much engine and trainer differ by rounding, in both dtypes.

    python -m benchmarks.mismatch
    python -m benchmarks.mismatch --config.model.path=DIR

Each line of the table is a collection like that of the first step of a run. It
gives the mean, the 99th percentile and the maximum, over the sampled tokens, of
|log-probability in the engine - log-probability in the trainer|. The limits of
`training/checks.py` come from this table.

The models are the trained model of the quickstart, and a model with random
weights. If the command has flags of a config, the only model is the quickstart
with these flags.
"""

from collections.abc import Mapping, Sequence
import pathlib
import sys

import jax

from benchmarks import measure
from stppo_jax.commands.flags import configuration
from stppo_jax.rl import diagnostics
from stppo_jax.tools.lab import collection

_CONFIG = pathlib.Path(__file__).parents[1] / 'configs' / 'quickstart.py'
_DTYPES = ('float32', 'bfloat16')
HEADER = ('model', 'dtype', 'mean', '99%', 'largest')


def _random(num_layers: int) -> tuple[str, ...]:
  """Returns config flags for a model with random weights and for long turns."""
  keys = {
    'model.path': '',
    'model.hidden_size': 64,
    'model.intermediate_size': 192,
    'model.num_layers': num_layers,
    'model.num_heads': 4,
    'model.num_kv_heads': 2,
    'model.scan_unroll': 1,
    'env.max_turn_tokens': 100,
    'env.max_length': 512,
    'rollout.length_bucket': 512,
    'rollout.trajectories_per_step': 16,
    'updates.minibatch_size': 16,
  }
  return tuple(f'--config.{key}={value}' for key, value in keys.items())


CASES: Mapping[str, Sequence[str]] = {
  'quickstart': (),
  'random, 3 layers': _random(3),
}


def differences(flags: Sequence[str]) -> tuple[float, ...]:
  """Returns mean, 99th percentile and maximum of the differences for a config.

  Args:
    flags: the flags of the config, which is otherwise the quickstart.
  """
  # An algorithm without a value model, which a collection does not need.
  flags = (f'--config={_CONFIG}:reinforce', *flags)
  config = configuration.parse(flags)
  arrays = collection.collect(config, workdir=None, num_updates=0)
  metrics = jax.jit(diagnostics.mismatch)(
    arrays['old_logprobs_BL'],
    arrays['sampler_logprobs_BL'],
    arrays['loss_mask_BL'],
  )
  name = 'mismatch/logprob_abs_diff'
  return tuple(float(metrics[name + end]) for end in ('_mean', '_p99', ''))


def run(cases: Mapping[str, Sequence[str]]) -> str:
  """Returns the table of differences.

  Args:
    cases: the config flags of each model, by the name of the model.
  """
  lines = [
    (name, dtype, *(f'{x:.1e}' for x in found))
    for name, flags in cases.items()
    for dtype in _DTYPES
    for found in [differences((*flags, f'--config.model.dtype={dtype}'))]
  ]
  return measure.table(HEADER, lines)


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table, and on which machine it was made."""
  flags = sys.argv[1:] if arguments is None else arguments
  print(measure.environment(), end='\n\n')
  print(run({' '.join(flags): flags} if flags else CASES))


if __name__ == '__main__':
  main()
