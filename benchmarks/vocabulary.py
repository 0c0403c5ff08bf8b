"""Loss and gradient of a policy with a large vocabulary, against plain torch.

    python -m benchmarks.vocabulary

The same weights and tokens, float32: the token-level loss with entropy, and its
gradient with respect to all weights. Torch is `transformers`' Qwen2, eager, its
scores of all tokens held; ours are held for a chunk of the tokens that carry
loss. Nothing is timed before loss and gradients agree to 1e-5. Peak memory is
of a process each: weights, gradient and the most that is held in between. The
last table compiles ours for longer rows and runs none of it. Linux only.
"""

import argparse
from collections.abc import Callable
from collections.abc import Sequence
import math
import pathlib
import subprocess
import sys
import tempfile
from typing import Any
from typing import NamedTuple

import jax
import numpy as np
import torch
import transformers

from benchmarks import batches
from benchmarks import measure
from benchmarks import torch_reference
from configs import algorithms
from stppo_jax import batch as batch_lib
from stppo_jax.models import config as model_config
from stppo_jax.models import export_hf
from stppo_jax.models import functional
from stppo_jax.rl import algorithm as algorithm_lib
from stppo_jax.rl import losses
from stppo_jax.rollout import pack

PARITY = 1e-5  # of the loss, and of each gradient relative to its largest
OURS, TORCH = 'ours', 'torch'
TIME_GOAL, MEMORY_GOAL, SLOPE_GOAL = 1.0, 0.4, 1.15
HEADER = ('case', 'ms', 'peak memory, MiB')
_NUM_TURNS = 4
_STATUS = pathlib.Path('/proc/self/status')
_ROOT = pathlib.Path(__file__).resolve().parent.parent


class Sizes(NamedTuple):
  """Of the model and the batch."""

  vocabulary: int
  width: int
  rows: int
  length: int
  chunk: int


class Subject(NamedTuple):
  """A model, its weights and a batch; the reward is random."""

  model: functional.Model
  params: Any
  batch: batch_lib.TokenBatch


def _model(sizes: Sizes, **runtime: str) -> functional.Model:
  shape = model_config.ModelConfig(
    vocab_size=sizes.vocabulary,
    hidden_size=sizes.width,
    intermediate_size=2 * sizes.width,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=sizes.width // 4,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=True,
    **runtime,
  )
  return functional.Model(shape, 'vocabulary', chunk=sizes.chunk)


def subject(sizes: Sizes) -> Subject:
  """Random weights; the old policy is near them."""
  model = _model(sizes)
  params = jax.jit(model.init)(jax.random.key(0))
  batch, _, _ = batches.token_batch(
    rows=sizes.rows, length=sizes.length, num_turns=_NUM_TURNS
  )
  rng = np.random.default_rng(1)
  tokens_BL = rng.integers(0, sizes.vocabulary, batch.tokens_BL.shape)
  # About what random weights say: some ratios are clipped, others are not.
  old_BL = 0.2 * rng.normal(size=tokens_BL.shape) - math.log(sizes.vocabulary)
  batch = batch.replace(
    tokens_BL=tokens_BL.astype(np.int32),
    loss_positions_BM=pack.loss_positions(batch.loss_mask_BL),
    old_logprobs_BL=old_BL.astype(np.float32),
  )
  return Subject(model, params, batch)


def ours(model: functional.Model) -> Callable[..., tuple[Any, Any]]:
  """(params, batch) to loss and gradient."""
  algorithm = algorithm_lib.build_algorithm(algorithms.ALGORITHMS['token_ppo'])

  def loss(params, batch):
    logprobs_BL, entropy_BL = model.logprobs_and_entropy(
      params, batch.tokens_BL, batch.loss_positions_BM, temperature=1.0
    )
    return losses.policy_loss(
      algorithm,
      logprobs_BL,
      entropy_BL,
      batch,
      statistics=None,  # the batch is the whole minibatch
      count=None,
      entropy_coefficient=torch_reference.ENTROPY_COEFFICIENT,
      num_turns=_NUM_TURNS,
    ).loss

  return jax.value_and_grad(loss)


def theirs(chosen: Subject) -> tuple[torch.nn.Module, Callable[[], Any]]:
  """The torch model of these weights; () to loss, which sets gradients."""
  with tempfile.TemporaryDirectory() as directory:
    export_hf.export(directory, chosen.model.config, chosen.params)
    model = transformers.Qwen2ForCausalLM.from_pretrained(
      directory, dtype=torch.float32
    )
  batch = chosen.batch
  tokens_BL = torch.tensor(batch.tokens_BL, dtype=torch.int64)
  old_BL, advantages_BL, mask_BL, ids_BL = (
    torch.tensor(x[:, 1:])
    for x in (
      batch.old_logprobs_BL,
      batch.advantages_BL,
      batch.loss_mask_BL,
      batch.turn_ids_BL.astype(np.int64),
    )
  )

  def run():
    model.zero_grad()
    scores_BLV = model(tokens_BL, use_cache=False).logits[:, :-1]
    log_all_BLV = torch.log_softmax(scores_BLV, dim=-1)
    logprobs_BL = log_all_BLV.gather(-1, tokens_BL[:, 1:, None])[..., 0]
    loss = torch_reference.policy_loss(
      logprobs_BL,
      old_BL,
      advantages_BL,
      -(log_all_BLV.exp() * log_all_BLV).sum(-1),
      mask_BL,
      ids_BL,
      num_turns=_NUM_TURNS,
      turn_means=None,
      corrected=False,
    )
    loss.backward()
    return float(loss.detach())

  return model, run


def assert_parity(found: tuple[Any, Any], model, loss: float) -> None:
  """Of the loss and of some gradients of every kind."""
  ours_loss, gradient = found
  np.testing.assert_allclose(ours_loss, loss, PARITY, PARITY)
  layer = model.model.layers[0]
  for mine, parameter in (
    (gradient['embedding'], model.model.embed_tokens.weight),
    (
      gradient['layers']['q_proj']['kernel'][0].T,
      layer.self_attn.q_proj.weight,
    ),
    (
      gradient['layers']['down_proj']['kernel'][0].T,
      layer.mlp.down_proj.weight,
    ),
  ):
    largest = float(parameter.grad.abs().max())
    np.testing.assert_allclose(mine, parameter.grad, 0, PARITY * largest)


def peak(side: str, sizes: Sizes) -> float:
  """MiB: weights, gradient and all that one side holds in between, at most."""
  chosen = subject(sizes)
  weights = sum(x.nbytes for x in jax.tree.leaves(chosen.params))
  if side == OURS:
    mine = measure.compiled(ours(chosen.model), chosen.params, chosen.batch)
    call = mine.case(chosen.params, chosen.batch).run
  else:
    _, call = theirs(chosen)
  # Of the process now; the greatest is from now on.
  _STATUS.with_name('clear_refs').write_text('5')
  before = _kilobytes('VmRSS')
  call()
  return (_kilobytes('VmHWM') - before) / 2**10 + weights / 2**20


def _kilobytes(name: str) -> int:
  """A line of what Linux knows of this process."""
  lines = dict(x.split(':') for x in _STATUS.read_text().splitlines())
  return int(lines[name].split()[0])


def _peak_apart(side: str, sizes: Sizes) -> float:
  """The same in a process of its own."""
  flags = [f'--{name}={value}' for name, value in sizes._asdict().items()]
  command = [sys.executable, '-m', 'benchmarks.vocabulary', f'--peak={side}']
  done = subprocess.run(
    [*command, *flags], cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True
  )
  return float(done.stdout.split()[-1])


def temporary(sizes: Sizes) -> int:
  """Bytes that the compiled loss and gradient needs beside what it is given."""
  batch, _, _ = batches.token_batch(
    rows=sizes.rows, length=sizes.length, num_turns=_NUM_TURNS
  )
  batch = batch.replace(
    loss_positions_BM=pack.loss_positions(batch.loss_mask_BL)
  )
  model = _model(sizes, remat='full')
  params = jax.eval_shape(model.init, jax.random.key(0))
  program = jax.jit(ours(model)).lower(params, batch).compile()
  return program.memory_analysis().temp_size_in_bytes


def slope(sizes: Sizes, lengths: Sequence[int]) -> str:
  """How temporary memory grows with the length; a line each, then the slope."""
  found = [temporary(sizes._replace(length=length)) for length in lengths]
  grown = math.log(found[-1] / found[0]) / math.log(lengths[-1] / lengths[0])
  lines = [
    (str(n), f'{size / 2**20:.0f}')
    for n, size in zip(lengths, found, strict=True)
  ]
  return '\n'.join(
    (
      measure.table(('length', 'temporary memory, MiB'), lines),
      '',
      f'slope {grown:.3f}; goal: at most {SLOPE_GOAL}',
    )
  )


def run(sizes: Sizes, *, repeats: int) -> str:
  """Times and peaks, their quotients and whether they can be trusted.

  Raises:
    AssertionError: ours and torch disagree; nothing is timed then.
  """
  chosen = subject(sizes)
  mine = measure.compiled(ours(chosen.model), chosen.params, chosen.batch)
  model, other = theirs(chosen)
  found = mine.program(chosen.params, chosen.batch)
  assert_parity(found, model, other())
  del found
  # One call a sample: either takes long.
  once = lambda call: measure.Case(lambda _: call(), lambda: None)
  call = mine.case(chosen.params, chosen.batch).run
  seconds = measure.interleave(
    {OURS: once(call), TORCH: once(other)}, repeats=repeats
  )
  peaks = {side: _peak_apart(side, sizes) for side in (OURS, TORCH)}
  lines = [
    (side, measure.milliseconds(seconds[side]), f'{peaks[side]:.0f}')
    for side in (OURS, TORCH)
  ]
  faster = measure.quotient(seconds[TORCH], seconds[OURS])
  return '\n'.join(
    (
      measure.table(HEADER, lines),
      '',
      f'torch / ours: {faster}, of the least {faster.least:.2f}; '
      f'goal: at least {TIME_GOAL:g}',
      f'memory, ours / torch: {peaks[OURS] / peaks[TORCH]:.3f}; '
      f'goal: at most {MEMORY_GOAL}',
      f'compile, s: {mine.seconds:.1f}',
      measure.verdict(seconds),
    )
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and where."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.vocabulary')
  parser.add_argument('--vocabulary', type=int, default=151936)
  parser.add_argument('--width', type=int, default=256)
  parser.add_argument('--rows', type=int, default=4)
  parser.add_argument('--length', type=int, default=512)
  parser.add_argument(
    '--chunk', type=int, default=32, help='tokens of a row scored at once'
  )
  parser.add_argument('--repeats', type=int, default=7)
  parser.add_argument(
    '--lengths', type=int, nargs='*', default=[512, 2048, 8192]
  )
  parser.add_argument('--peak', choices=(OURS, TORCH), help=argparse.SUPPRESS)
  measure.add_cores(parser)
  flags = parser.parse_args(arguments)
  torch.set_num_threads(measure.use_cores(flags.cores))
  sizes = Sizes(*(getattr(flags, name) for name in Sizes._fields))
  if flags.peak:
    print(peak(flags.peak, sizes))
    return
  print(
    f'loss and gradient, float32 [{sizes.rows}, {sizes.length}], vocabulary '
    f'{sizes.vocabulary}, width {sizes.width}, chunks of {sizes.chunk}; ms: '
    f'median (least-greatest) of {flags.repeats}, quotient: median (middle '
    'half)\n'
  )
  threads = str(torch.get_num_threads())
  print(
    measure.environment(torch=torch.__version__, torch_threads=threads),
    end='\n\n',
  )
  print(run(sizes, repeats=flags.repeats))
  if flags.lengths:
    # One row, layers computed again in the backward pass.
    print('\n' + slope(sizes._replace(rows=1), flags.lengths))


if __name__ == '__main__':
  main()
