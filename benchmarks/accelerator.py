"""Compares training and decoding on one accelerator with its limits.

    python -m benchmarks.accelerator --sizes 1.5B --remat full

The models have the shapes of Qwen2.5, random weights and bfloat16 activations;
tokens are random too. The limits are measured first: the rate of a large matrix
product and the rate of a large copy. Before decoding is timed, the engine's
log-probabilities of the tokens that it sampled are compared with the trainer's.

TFLOP/s and MFU count only the operations that the formulas need: causal
attention counts half of the square, logits count at loss positions only, and
recomputation does not count. MFU is the share of the rate of the measured
matrix product. Decoding a token in every row must read all weights once, and
the keys and values of each row. Their bytes per second are shown as a share of
the rate of the copy.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import gc
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import collectors
from benchmarks import learners
from benchmarks import measure
from stppo_jax.configs import base
from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.models import operations
from stppo_jax.parallel import sharding
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import stops
from stppo_jax.training import components

# The first fields of `ModelConfig`: those of Qwen2.5, and small ones.
SHAPES = {
  'tiny': (512, 64, 176, 3, 2, 2, 32),
  '0.5B': (151_936, 896, 4864, 24, 14, 2, 64),
  '1.5B': (151_936, 1536, 8960, 28, 12, 2, 128),
  '3B': (151_936, 2048, 11_008, 36, 16, 2, 128),
}
# A mean difference between engine and trainer up to this one counts as
# rounding. It is the limit of a run in bfloat16.
MISMATCH = 0.05
_LEARNER = (
  *('model', 'program', 'ms', 'tokens/s'),
  *('TFLOP/s', 'MFU', 'peak GiB'),
)
_DECODE = (
  *('model', 'rows', 'decoded tokens/s', 'of the copy', 'prompt tokens/s'),
  *('first call, s', 'mismatch, mean / 99 %'),
)
_REPEATS = 5


class Limits(NamedTuple):
  """The measured limits of a device.

  Attributes:
    flops: operations per second of a matrix product in bfloat16.
    bandwidth: bytes per second of a copy, read and written.
  """

  flops: float
  bandwidth: float


def shape_of(size: str, remat: str) -> model_config.ModelConfig:
  """Returns the shape of a key of `SHAPES`."""
  dtype = 'bfloat16'
  return model_config.ModelConfig(
    *SHAPES[size],
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=True,
    dtype=dtype,
    remat=remat,
    attention=attention.choose(
      'auto',
      dtype=dtype,
      head_dim=SHAPES[size][-1],
      platform=jax.devices()[0].platform,
    ),
  )


def seconds_of(run: Callable[[], object], repeats: int = _REPEATS) -> float:
  """Returns the median of the seconds of a call, after one to warm up."""
  case = measure.Case(lambda: jax.block_until_ready(run()))
  seconds = [measure.once(case)[0] for _ in range(1 + repeats)]
  return float(np.median(seconds[1:]))


def measure_limits(width: int) -> Limits:
  """Measures a product of [width, width] matrices and a copy of 2 GB.

  Random numbers are used, because a product of zeros takes less power.
  """
  keys = jax.random.split(jax.random.key(0), 2)
  a, b = (jax.random.normal(k, (width, width), jnp.bfloat16) for k in keys)
  x = jnp.ones((width * width * 16,), jnp.bfloat16)
  calls = 10
  product = jax.jit(lambda a, b: a @ b)
  copy = jax.jit(lambda x: x + 1)  # reads and writes each element once
  flops = seconds_of(lambda: [product(a, b) for _ in range(calls)]) / calls
  moved = seconds_of(lambda: [copy(x) for _ in range(calls)]) / calls
  return Limits(2 * width**3 / flops, 2 * x.nbytes / moved)


def learner_table(
  size: str,
  limits: Limits,
  *,
  rows: int,
  microbatch: int,
  length: int,
  remat: str,
) -> list[tuple[str, ...]]:
  """Times an annotation and an update of policy and value model."""
  config = base.get_config('st_ppo')
  config.updates.update(
    minibatch_size=rows, microbatch_size=microbatch, remat=remat
  )
  config.model.dtype = 'bfloat16'
  config.rollout.trajectories_per_step = rows
  shape = shape_of(size, remat)
  mesh = components.build_mesh(config)
  learner = learner_lib.Learner(config, shape, mesh)
  sizes = learners.Sizes(
    shape.vocab_size, shape.hidden_size, shape.num_layers, rows, length
  )
  batch = learners.random_batch(sizes)
  losses = int(np.sum(batch.loss_mask_BL))
  placed = jax.device_put(batch, sharding.batch_sharding(mesh))
  policy, value = operations.forward_operations(shape, [length] * rows, losses)

  box = [learner.start()]  # the update consumes it
  reference = learner.reference()
  annotate_seconds = seconds_of(
    lambda: learner.annotate(box[0], batch, reference=reference)[0]
  )

  def update():
    box[0], metrics = learners.update_epochs(learner, box[0], placed, 0)
    jax.block_until_ready(box[0])
    return metrics

  update_seconds = seconds_of(update)
  peak = (jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use', 0)
  results = (
    ('annotate', annotate_seconds, 2 * policy + value),
    ('update', update_seconds, 3 * (policy + value)),
  )
  return [
    (
      size,
      name,
      f'{1e3 * seconds:.0f}',
      f'{rows * length / seconds:,.0f}',
      f'{flops / seconds / 1e12:.0f}',
      f'{100 * flops / seconds / limits.flops:.1f} %',
      f'{peak / 2**30:.1f}',
    )
    for name, seconds, flops in results
  ]


def build_engine(
  model: functional.Model, *, rows: int, max_length: int, decode_chunk: int
) -> engine_lib.Engine:
  """Returns an engine; a random turn hardly ever spells its stop string."""
  # The first entries are single bytes, so that the stop string can be spelt.
  pieces = [bytes([n]) for n in range(256)]
  pieces += [f' {n}'.encode() for n in range(256, model.config.vocab_size)]
  return collectors.engine(
    model,
    stops.build(pieces, stop_strings=('</search>',), eos_ids=()),
    slots=rows,
    max_length=max_length,
    page_size=0,
    pages=0,
    prefill_chunk=256,
    decode_chunk=decode_chunk,
    early_exit=0.25,
    lookahead=1,
    lanes=1,
    batch_rows=0,
    deterministic=True,
  )


def collect(
  engine: engine_lib.Engine,
  prompts_AL: np.ndarray,
  num_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Samples a turn of `num_tokens` tokens after each prompt.

  Returns:
    The tokens of the turns and their log-probabilities, [A, num_tokens].
  """
  rows = len(prompts_AL)
  engine.begin(
    list(prompts_AL),
    jax.random.split(jax.random.key(0), rows),
    group_size=1,
    max_turn_tokens=num_tokens,
    greedy=False,
  )
  turns = {}
  while len(turns) < rows:
    for row, turn in engine.poll().items():
      turns[row] = turn
      engine.close(row)
  ordered = [turns[row] for row in range(rows)]
  return (
    np.stack([turn.token_ids for turn in ordered]),
    np.stack([turn.logprobs for turn in ordered]),
  )


def mismatch(
  model: functional.Model,
  params: functional.Params,
  prompts_AL: np.ndarray,
  turns: tuple[np.ndarray, np.ndarray],
) -> tuple[float, float]:
  """Returns how much the log-probabilities of engine and trainer differ.

  Args:
    model, params: the policy.
    prompts_AL: the prompts.
    turns: what `collect` returned for them.

  Returns:
    The mean and the 99th percentile of the absolute differences.

  Raises:
    AssertionError: if the mean is greater than `MISMATCH`.
  """
  token_ids, sampled = turns
  trained_AL, _ = jax.jit(
    functools.partial(model.logprobs_and_entropy, temperature=1.0)
  )(params, np.concatenate([prompts_AL, token_ids], axis=1))
  trained = np.asarray(trained_AL)[:, prompts_AL.shape[1] :]
  differences = np.abs(trained - sampled)
  mean = float(differences.mean())
  if not mean < MISMATCH:
    raise AssertionError(
      f'engine and trainer differ by {mean:.4f} on average, limit {MISMATCH}'
    )
  return mean, float(np.quantile(differences, 0.99))


def decode_row(
  size: str, limits: Limits, *, rows: int, prompt: int, decode_chunk: int
) -> tuple[str, ...]:
  """Times turns after a prompt of `prompt` tokens.

  The time of short turns is subtracted from that of long turns, so that the
  prompts do not count.
  """
  shape = shape_of(size, 'none')
  model = functional.Model(shape, 'vocabulary', chunk=4096)
  params = jax.jit(model.init)(jax.random.key(0))
  long, short = 10 * decode_chunk, 2 * decode_chunk
  engine = build_engine(
    model,
    rows=rows,
    max_length=prompt + long,
    decode_chunk=decode_chunk,
  )
  engine.publish(params, 0)
  prompts_AL = np.random.default_rng(0).integers(
    0, shape.vocab_size, (rows, prompt), np.int32
  )
  run = functools.partial(collect, engine, prompts_AL)
  first, _ = measure.once(measure.Case(lambda: run(short)))
  few = slice(0, 8)  # more rows would not fit beside the trainer's activations
  token_ids, sampled = run(short)
  difference = mismatch(
    model, params, prompts_AL[few], (token_ids[few], sampled[few])
  )
  seconds = [seconds_of(functools.partial(run, n), 3) for n in (short, long)]
  tokens = rows * (long - short)
  rate = tokens / (seconds[1] - seconds[0])
  weights = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  middle = prompt + (long + short) / 2
  kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * middle
  moved = 2 * (weights + rows * kv)  # two bytes each
  share = rate / rows * moved / limits.bandwidth
  return (
    size,
    str(rows),
    f'{rate:,.0f}',
    f'{100 * share:.0f} %',
    f'{rows * prompt / seconds[0]:,.0f}',
    f'{first:.0f}',
    ' / '.join(f'{x:.4f}' for x in difference),
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which device."""
  parser = measure.parser(
    'accelerator',
    rows=16,  # of an update
    microbatch=8,
    length=4096,
    prompt=1024,
    decode_chunk=16,
    product=8192,  # its width
  )
  parser.add_argument(
    '--only', nargs='+', choices=('learner', 'decode'), help='some tables'
  )
  parser.add_argument('--sizes', nargs='+', choices=SHAPES, default=['0.5B'])
  parser.add_argument('--remat', nargs='+', default=['dots'])
  parser.add_argument('--slots', nargs='+', type=int, default=[128, 256])
  flags = measure.start(parser, arguments)
  limits = measure_limits(flags.product)
  print(
    f'a product of {flags.product} x {flags.product} matrices: '
    f'{limits.flops / 1e12:.0f} TFLOP/s; a copy: '
    f'{limits.bandwidth / 1e12:.2f} TB/s\n',
    flush=True,
  )
  tables = flags.only or ['learner', 'decode']
  if 'learner' in tables:
    for size, remat in itertools.product(flags.sizes, flags.remat):
      rows = learner_table(
        size,
        limits,
        rows=flags.rows,
        microbatch=flags.microbatch,
        length=flags.length,
        remat=remat,
      )
      print(f'recomputation: {remat}')
      print(measure.table(_LEARNER, rows) + '\n', flush=True)
      gc.collect()
  if 'decode' in tables:
    for size, slots in itertools.product(flags.sizes, flags.slots):
      row = decode_row(
        size,
        limits,
        rows=slots,
        prompt=flags.prompt,
        decode_chunk=flags.decode_chunk,
      )
      print(measure.table(_DECODE, [row]), flush=True)
      gc.collect()


if __name__ == '__main__':
  main()
