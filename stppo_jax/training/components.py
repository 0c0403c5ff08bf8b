"""The parts of a run that a wrong config has none of.

They are built before anything is written and before anybody is waited for: what
can be wrong with a config, its files and the devices is found out here.
"""

import dataclasses
import math

import jax

from stppo_jax.data import questions as questions_lib
from stppo_jax.learner import learner as learner_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import assembly
from stppo_jax.training import model_files


@dataclasses.dataclass(frozen=True)
class Components:
  """Of a run; no weight is read yet."""

  questions: questions_lib.Questions
  tokenizer: tokenizer_lib.Tokenizer
  learner: learner_lib.Learner


def build(config) -> Components:
  """The parts of a config that fits its files and the devices.

  Raises:
    Misconfigured: it does not; a line for each reason.
  """
  with assembly.misconfigured():
    questions = assembly.build_questions(config)
    tokenizer = assembly.build_tokenizer(config, questions)
    model_files.check(config, tokenizer)
    if jax.process_count() != 1:
      raise ValueError(
        f'{jax.process_count()} processes: runs of several are not supported'
      )
    mesh = assembly.build_mesh(config)
    check_rows(config, mesh)
    shape = assembly.build_model_config(config, tokenizer)
    learner = learner_lib.Learner(config, shape, mesh)
    check_questions(config, questions)
  return Components(questions, tokenizer, learner)


def check_rows(config, mesh: jax.sharding.Mesh) -> None:
  """Whether the devices divide every number of rows, and may have lanes.

  Raises:
    ValueError: they do not; a line for each.
  """
  rollout, updates = config.rollout, config.updates
  trained = {
    'rollout.trajectories_per_step': rollout.trajectories_per_step,
    'updates.minibatch_size': updates.minibatch_size,
    'updates.microbatch_size': updates.microbatch_size,
    'sft.batch_size': config.sft.batch_size,
  }
  played = {'evaluate.batch_size': config.evaluate.batch_size}
  slots = 'slots' if rollout.slots else 'trajectories_per_step'
  played[f'rollout.{slots}'] = rollout[slots]
  checks = [(trained, mesh, 'the axes data and fsdp')]
  lines = {}
  if rollout.engine == 'local':
    engine = assembly.build_mesh(config, local=True)
    host = 'this host, on which the engine decodes'
    checks.append((played, engine, host))
    if rollout.lanes > 1 and engine.size > 1:
      lines['rollout.lanes'] = (
        f'rollout.lanes={rollout.lanes}: must be 1 on the {engine.size} '
        f'devices of {host}'
      )
  for sizes, cut, where in checks:
    shards = math.prod(cut.shape[axis] for axis in mesh_lib.BATCH_AXES)
    for key, size in sizes.items():
      if size % shards:
        lines[key] = (
          f'{key}={size}: must be a multiple of the {shards} devices of {where}'
        )
  if lines:
    raise ValueError('\n'.join(lines.values()))


def check_questions(config, questions: questions_lib.Questions) -> None:
  """Whether there are questions for the first step and every evaluation.

  Raises:
    ValueError: there are not.
  """
  rollout = config.rollout
  questions.train(
    0,
    rollout.trajectories_per_step // rollout.group_size,
    resample_round=rollout.resample_rounds,
  )
  questions.evaluation(config.evaluate.num_questions)
