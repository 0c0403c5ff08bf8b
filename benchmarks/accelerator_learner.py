"""The pieces of `accelerator` that measure its limits, annotate and update."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import batches
from benchmarks import learners
from benchmarks import measure
from benchmarks import waste
from stppo_jax import batch as batch_lib
from stppo_jax.configs import base
from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import attention
from stppo_jax.models import config as model_config
from stppo_jax.models import flops
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.rollout import pack

_MEDIAN = 1300  # the median number of tokens of a dialogue, see `waste`
_NUM_TURNS = 4  # the number of turns of a dialogue in `update`
# If the mean difference of log-probabilities is below this number, the
# difference counts as rounding. Runs in bfloat16 have the same limit.
MISMATCH = 0.05


class Line(NamedTuple):
  """The result of measuring one program.

  Attributes:
    program: the name of the program in the table.
    seconds: the seconds that the program took.
    tokens: the number of tokens that the program was needed for, without
      padding; 0 if the table shows no tokens per second.
    operations: the operations that the formulas need, for a program that is
      compared with the rate of a matrix product; otherwise 0.
    bytes: the bytes of memory that have to be read or written, for a program
      that is compared with the rate of a copy; otherwise 0.
  """

  program: str
  seconds: float
  tokens: float = 0.0
  operations: float = 0.0
  bytes: float = 0.0


class Options(NamedTuple):
  """The sizes of all pieces, which are flags of `accelerator`.

  Attributes:
    rows: the number of dialogues of an update.
    microbatch: the number of rows of a forward pass.
    length: the number of tokens of a row; the lengths of dialogues are in
      proportion to this number.
    dialogues: the number of dialogues of a step.
    slots: the number of dialogues that a step decodes at the same time.
    prompt: the number of tokens before each turn that is timed.
    decode_chunk: the number of tokens that a call decodes in each slot.
    product: the width of the matrices that are multiplied for `limits`.
  """

  rows: int = 32
  microbatch: int = 8
  length: int = 4096
  dialogues: int = 512
  slots: int = 128
  prompt: int = 1024
  decode_chunk: int = 16
  product: int = 8192


class Model(NamedTuple):
  """The shape of a model, and what its layers recompute in updates.

  Attributes:
    fields: the values of the first fields of `ModelConfig`.
    remat: the value of the config key `updates.remat`.
  """

  fields: tuple[int, ...]
  remat: str


# The models of Qwen2.5, and a small model. An update of 1.5B with `dots` needs
# more memory than an H200 has.
MODELS = {
  'tiny': Model((512, 64, 176, 3, 2, 2, 32), 'none'),
  '0.5B': Model((151_936, 896, 4864, 24, 14, 2, 64), 'dots'),
  '1.5B': Model((151_936, 1536, 8960, 28, 12, 2, 128), 'full'),
  '3B': Model((151_936, 2048, 11_008, 36, 16, 2, 128), 'full'),
}
# How the dialogues of an update are laid out in rows: dialogues share rows;
# dialogues share rows and cuDNN is not used; each dialogue has a row of its
# own, as long as the longest dialogue may be.
LAYOUTS = {
  'packed': 'packed rows',
  'tiles': 'packed rows, attention in tiles',
  'padded': 'padded rows',
}


def shape_of(size: str, attend: str = 'auto') -> model_config.ModelConfig:
  """Returns the shape of a model of this size, a key of `MODELS`."""
  fields, remat = MODELS[size]
  dtype = 'bfloat16'
  return model_config.ModelConfig(
    *fields,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=True,
    dtype=dtype,
    remat=remat,
    attention=attention.choose(
      attend,
      dtype=dtype,
      head_dim=fields[-1],
      platform=jax.devices()[0].platform,
    ),
  )


def seconds_of(run: Callable[[], object], repeats: int) -> float:
  """Returns the median seconds of `repeats` calls, after a call to warm up."""
  case = measure.Case(lambda: jax.block_until_ready(run()))
  seconds = [measure.once(case)[0] for _ in range(1 + repeats)]
  return float(np.median(seconds[1:]))


def limits(options: Options) -> list[Line]:
  """Measures the rates of a matrix product and of a copy.

  Random numbers are used, because a product of zeros takes less power.
  """
  width, calls = options.product, 10
  keys = jax.random.split(jax.random.key(0), 2)
  a, b = (jax.random.normal(k, (width, width), jnp.bfloat16) for k in keys)
  x = jnp.ones((width * width * 16,), jnp.bfloat16)
  product = jax.jit(lambda a, b: a @ b)
  copy = jax.jit(lambda x: x + 1)  # reads and writes each element once
  multiplied = seconds_of(lambda: [product(a, b) for _ in range(calls)], 5)
  copied = seconds_of(lambda: [copy(x) for _ in range(calls)], 5)
  return [
    Line('product', multiplied / calls, operations=2.0 * width**3),
    Line('copy', copied / calls, bytes=2.0 * x.nbytes),
  ]


def build_learner(
  size: str, options: Options, *, rows: int, minibatch: int, attend: str
) -> learner_lib.Learner:
  """Returns the learner of policy and value model with random weights."""
  config = base.get_config('st_ppo')
  shape = shape_of(size, attend)
  config.updates.update(
    minibatch_size=minibatch,
    microbatch_size=options.microbatch,
    remat=shape.remat,
  )
  config.model.dtype = shape.dtype
  config.rollout.trajectories_per_step = rows
  config.env.max_length = options.length
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  return learner_lib.Learner(config, shape, mesh)


def dialogue_batch(vocab_size: int, options: Options) -> batch_lib.TokenBatch:
  """Returns a batch of dialogues with random tokens and log-normal lengths."""
  rng = np.random.default_rng(0)
  shape = (options.rows, options.length)
  lengths_B = waste.lengths(_MEDIAN, seed=0, count=options.rows)
  lengths_B = lengths_B * options.length // waste.LONGEST
  ids_BL = batches.dialogue_ids(rng, lengths_B, options.length, _NUM_TURNS)
  drawn = lambda: rng.normal(size=shape).astype(np.float32)
  return batch_lib.TokenBatch(
    tokens_BL=rng.integers(0, vocab_size, shape, np.int32),
    lengths_B=lengths_B.astype(np.int32),
    turn_ids_BL=ids_BL,
    loss_mask_BL=ids_BL > 0,
    loss_positions_BM=pack.loss_positions(ids_BL > 0),
    sampler_logprobs_BL=0.2 * drawn() - np.float32(math.log(vocab_size)),
    rewards_BL=np.where(ids_BL > 0, drawn(), 0),
    group_ids_B=np.arange(options.rows, dtype=np.int32),
  )


def passes(
  shape: model_config.ModelConfig, lengths_B: np.ndarray, losses: int
) -> tuple[float, float]:
  """Returns the operations that annotate and update need, in this order.

  Args:
    shape: the shape of both models.
    lengths_B: the number of tokens of each dialogue.
    losses: the number of policy tokens of all dialogues.
  """
  policy, value = flops.forward_operations(shape, lengths_B.tolist(), losses)
  return 2 * policy + value, 3 * (policy + value)


def update(options: Options, *, size: str, layout: str) -> list[Line]:
  """Times an annotation and an update of policy and value model.

  Raises:
    AssertionError: if log-probabilities of packed and of padded rows differ by
      `MISMATCH` or more on average.
  """
  learner = build_learner(
    size,
    options,
    rows=options.rows,
    minibatch=options.rows,
    attend='xla' if layout == 'tiles' else 'auto',
  )
  batch = dialogue_batch(learner.policy.config.vocab_size, options)
  losses = int(batch.loss_mask_BL.sum())
  counts = passes(learner.policy.config, batch.lengths_B, losses)
  tokens = int(batch.lengths_B.sum())
  box: list[Any] = [learner.start()]  # the state, which an update donates
  reference = learner.reference()
  name = LAYOUTS[layout]
  annotate = lambda: learner.annotate(box[0], batch, reference=reference)[0]
  if layout == 'padded':  # lengths include the padding, which has no loss
    packed = np.asarray(annotate().old_logprobs_BL)
    batch = batch.replace(
      lengths_B=np.full_like(batch.lengths_B, options.length)
    )
    differences = np.abs(np.asarray(annotate().old_logprobs_BL) - packed)
    mean = float(differences[batch.loss_mask_BL].mean())
    if not mean < MISMATCH:
      raise AssertionError(f'packed and padded rows differ by {mean:.4f}')
    name += f', {mean:.4f} from packed'
  annotate_seconds = seconds_of(annotate, 3)
  annotated = annotate()

  def one_update():
    box[0], metrics = learners.update_epochs(learner, box[0], annotated, 0)
    jax.block_until_ready(box[0])
    return metrics

  seconds = annotate_seconds, seconds_of(one_update, 3)
  return [
    Line(f'{program}, {name}', second, tokens, count)
    for program, second, count in zip(('annotate', 'update'), seconds, counts)
  ]
