"""Runs that are small enough for tests and share compiled programs."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any, IO

from ml_collections import config_dict
import numpy as np

from stppo_jax import __main__
from stppo_jax import batch as batch_lib
from stppo_jax.commands.flags import configuration
from stppo_jax.learner import learner as learner_lib
from stppo_jax.models import config as model_config
from stppo_jax.rollout import pack
from stppo_jax.training import components
from stppo_jax.training import model_files
from tests.training import faults

STEPS = 3  # of the runs of `train`
REPO = pathlib.Path(__file__).resolve().parents[2]
_ONE_HOST = 'tests.training.one_host'
OF_THE_CLOCK = ('timing_s/', 'perf/', 'goodput/', 'retrieval/latency')
_TINY: dict[str, Any] = {
  'num_steps': 4,
  'model.path': '',
  'model.hidden_size': 16,
  'model.intermediate_size': 24,
  'model.num_layers': 1,
  'model.num_heads': 2,
  'model.num_kv_heads': 1,
  'model.head_dim': 8,
  'model.scan_unroll': 1,
  'data.synthetic_wiki.entities_per_type': 8,
  'env.max_turns': 2,
  'env.max_turn_tokens': 8,
  'env.max_observation_tokens': 32,
  'env.max_length': 128,
  'rollout.trajectories_per_step': 16,
  'rollout.length_bucket': 128,
  'updates.minibatch_size': 8,
  'updates.core_rows': 0,
  # As in the quickstart, so that runs of other configs have its programs.
  'updates.head_chunk': 8192,
  'updates.num_epochs': 1,
  'sft.num_steps': 4,
  'sft.batch_size': 8,
  'evaluate.every': 2,
  'evaluate.num_questions': 8,
  'checkpoint.every': 1,
  # A program of its own, which few tests need.
  'writer.token_details': 0,
}

# Adapters, and a mixture of experts.
LORA = {
  'model__lora__rank': 2,
  'model__lora__targets': '(q|o|up)_proj',
  'policy_optimizer__learning_rate': 0.01,
  'policy_optimizer__warmup_updates': 0,
}
EXPERTS = {
  'model__qkv_bias': False,
  'model__qk_norm': True,
  'model__num_experts': 4,
  'model__num_experts_per_tok': 2,
  'model__moe_intermediate_size': 8,
}


def flags(algorithm: str = 'st_ppo', **changes) -> list[str]:
  """Returns the flags of a command, all but the workdir.

  Args:
    algorithm: an entry of the table of algorithms.
    **changes: config keys, their dots written as `__`; None leaves one out.
  """
  changes = {key.replace('__', '.'): x for key, x in changes.items()}
  return [f'--config={REPO}/configs/quickstart.py:{algorithm}'] + [
    f'--config.{key}={value}'
    for key, value in (_TINY | changes).items()
    if value is not None
  ]


def config(algorithm: str = 'st_ppo', **changes) -> config_dict.ConfigDict:
  """Returns the configuration that these flags make."""
  return configuration.parse(flags(algorithm, **changes))


def shape(settings) -> model_config.ModelConfig:
  """Returns the shape of a configuration's models."""
  questions = components.build_questions(settings)
  tokenizer = model_files.build_tokenizer(settings, questions)
  mesh = components.build_mesh(settings)
  return model_files.build_model_config(settings, tokenizer, mesh)


def learner(settings) -> learner_lib.Learner:
  """Returns the learner of a configuration."""
  mesh = components.build_mesh(settings)
  return learner_lib.Learner(settings, shape(settings), mesh)


def packed() -> batch_lib.TokenBatch:
  """Returns the rows of a step, of two turns each.

  They have the arrays and the shapes of these runs, so that what computes with
  them shares the programs of the runs.
  """
  rng = np.random.default_rng(0)
  turn_ids_BL = np.zeros((16, 128), np.int32)
  turn_ids_BL[:, 10:18], turn_ids_BL[:, 40:48] = 1, 2
  mask_BL = turn_ids_BL > 0
  rewards_BL = np.zeros(turn_ids_BL.shape, np.float32)
  rewards_BL[:, 47] = rng.normal(size=len(rewards_BL))
  return batch_lib.TokenBatch(
    tokens_BL=rng.integers(0, 290, turn_ids_BL.shape).astype(np.int32),
    lengths_B=np.full(len(turn_ids_BL), 48, np.int32),
    turn_ids_BL=turn_ids_BL,
    loss_mask_BL=mask_BL,
    sampler_logprobs_BL=np.zeros(turn_ids_BL.shape, np.float32),
    rewards_BL=rewards_BL,
    group_ids_B=np.arange(len(turn_ids_BL), dtype=np.int32),
    state_ids_BL=turn_ids_BL,
    loss_positions_BM=pack.loss_positions(mask_BL),
  )


def train(workdir: pathlib.Path | str, act=None, **changes) -> int:
  """Runs the command `train` in this process and returns its exit code.

  Args:
    workdir: the run's folder.
    act: is called at the moments of the run, see `faults.at`.
    **changes: see `flags`.
  """
  changes = {'num_steps': STEPS, **changes}
  command = ['train', *flags(**changes), f'--workdir={workdir}']
  if act is None:
    return __main__.main(command)
  with faults.at(config(**changes), act):
    return __main__.main(command)


def start(
  *arguments: str,
  module: str = 'stppo_jax',
  log: IO | None = None,
  **environment: str,
) -> subprocess.Popen:
  """Starts a module as a process of its own; prints to a file, if any."""
  return subprocess.Popen(
    [sys.executable, '-u', '-m', module, *arguments],
    stdout=log or subprocess.PIPE,
    stderr=log or subprocess.PIPE,
    text=True,
    cwd=REPO,
    env=os.environ
    | {
      'JAX_PLATFORMS': 'cpu',
      # As in tests/conftest.py: other programs would round differently.
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    }
    | environment,
  )


def kill_at(event: str, name: str, *flags: str) -> None:
  """Trains in a process that kills itself, see `one_host`."""
  process = start('kill', event, name, 'train', *flags, module=_ONE_HOST)
  _, errors = process.communicate()
  assert process.returncode == -signal.SIGKILL, errors


def wait(holds, seconds: float = 600) -> None:
  """Waits until something holds.

  Raises:
    AssertionError: it does not happen.
  """
  until = time.monotonic() + seconds
  while not holds():
    if time.monotonic() > until:
      raise AssertionError('it does not happen')
    time.sleep(0.002)


def free_address() -> str:
  """Returns an address of this machine at which nobody listens."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{probe.getsockname()[1]}'


def metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the lines of metrics.jsonl; none if there is no such file."""
  path = workdir / 'metrics.jsonl'
  text = path.read_text('utf-8') if path.exists() else ''
  return [json.loads(line) for line in text.splitlines()]


def repeated(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the lines without times, which are equal in equal runs."""
  return [
    {k: v for k, v in line.items() if not k.startswith(OF_THE_CLOCK)}
    for line in metrics(workdir)
  ]


def leaves(workdir: pathlib.Path, step: int) -> dict[str, Any]:
  """Returns the fingerprints of all arrays of a checkpoint."""
  path = workdir / 'checkpoints' / str(step) / 'manifest' / 'metadata'
  return json.loads(path.read_text('utf-8'))['leaves']


def weights(workdir: pathlib.Path) -> bytes:
  """Returns the file of the exported policy's weights."""
  return (workdir / 'policy' / 'model.safetensors').read_bytes()


def assert_same_files(
  workdir: pathlib.Path, expected: pathlib.Path, *, num_steps: int = STEPS
) -> None:
  """Asserts equal metrics, dialogues, checkpoints and exports of two runs."""
  assert repeated(workdir) == repeated(expected)
  assert metrics(workdir)[-1]['step'] == num_steps
  assert leaves(workdir, num_steps) == leaves(expected, num_steps)
  assert weights(workdir) == weights(expected)
  for step in range(1, num_steps + 1):
    name = f'trajectories-{step:06d}.jsonl'
    assert (workdir / name).read_bytes() == (expected / name).read_bytes()


def trajectories(workdir: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """Returns the dialogues of a step."""
  path = workdir / f'trajectories-{step:06d}.jsonl'
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]
