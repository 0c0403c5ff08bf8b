"""The supervised start: a policy imitates noisy demonstrations.

A supervised start is a run of its own: either a run of the command `sft`, or a
run inside a run of `train`, in the folder WORKDIR/start.
"""

from collections.abc import Callable, Sequence
import logging
import pathlib

import jax

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax.data import demonstrations
from stppo_jax.data import kinds
from stppo_jax.learner import model_roles
from stppo_jax.learner import offline_learner
from stppo_jax.learner import offline_losses
from stppo_jax.models import functional
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.rollout import collect
from stppo_jax.rollout import evaluation
from stppo_jax.rollout import pack
from stppo_jax.rollout import steps
from stppo_jax.sampling import scripted
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import checkpoint_state
from stppo_jax.training import checks
from stppo_jax.training import claim
from stppo_jax.training import components
from stppo_jax.training import engines
from stppo_jax.training import model_files
from stppo_jax.training import run as run_lib
from stppo_jax.workdir import agreement

_log = logging.getLogger(__name__)


def run(config, workdir: str | pathlib.Path, *, restart: bool = False) -> int:
  """Trains a policy on demonstrations, or resumes; exports the policy.

  The policy is exported to `workdir/policy`. At the end, the main scores on
  evaluation questions are logged, for sampled and for greedy decoding.

  Args:
    config: the config of the run; most options are in its section `sft`.
    workdir: the run's folder.
    restart: whether to begin anew and move the files of the folder aside.

  Returns:
    The exit code: 0 if the run is done, 130 if it was interrupted and saved, 75
    if it was preempted and saved.
  """
  with claim.claimed(config, workdir, restart=restart, command='sft') as folder:
    with folder.interruptible():
      found = components.build(config, imitates=True)
      if found.tokenizer.prompts.begun_by_tokenizer:
        folder.check_prompts()
      services = folder.enter(
        components.build_services(config, found.questions)
      )
    folder.record()

    def evaluate(policy: functional.Model, params: functional.Params) -> None:
      engine = engines.build(
        found.config, services, found.tokenizer, policy, found.placement
      )
      engine.publish(params, config.sft.num_steps)
      evaluator = evaluation.Evaluator(
        config,
        services,
        engines.build_collector(config, services, found.tokenizer, engine),
      )
      # If a run of `train` starts from this policy, the sampled score can be
      # compared with the scores of its first steps, and the greedy score with
      # its evaluations.
      for greedy in (False, True):
        with folder.interruptible():
          scores, _ = evaluator.run(greedy=greedy)
        kind = 'greedy' if greedy else 'sampled'
        for name, score in sorted(scores.items()):
          _log.info('%s %s %.3f', kind, name, score)

    imitate(config, folder, found.tokenizer, services, at_end=evaluate)
  return folder.exit_code


def imitate(
  config,
  folder: claim.Folder,
  tokenizer: tokenizer_lib.Tokenizer,
  services: steps.Services,
  *,
  at_end: Callable[[functional.Model, functional.Params], None] | None = None,
  shown_every: int = 1,
) -> None:
  """Trains a policy on demonstrations, or resumes; exports the policy.

  The result of a step is a function of (config, step, state).

  Args:
    config: the config of the run.
    folder: the run's folder, in which the run has been recorded.
    tokenizer: the tokenizer of the policy.
    services: the questions, and the environment, which answers the demonstrated
      turns.
    at_end: called with the trained policy and its weights; may be None.
    shown_every: the number of steps between two lines of progress.

  Raises:
    Misconfigured: the config does not fit its files, or has no demonstrations.
  """
  options, hosts = config.sft, folder.hosts
  with exits.as_misconfigured():
    mesh = components.build_mesh(config)
    shape = model_files.build_model_config(config, tokenizer, mesh)
    chunk = config.updates.head_chunk
    policy = functional.Model(shape, 'vocabulary', mesh, chunk=chunk)
    learner = offline_learner.OfflineLearner(
      config,
      model_roles.Models(policy, None),
      offline_losses.SFT,
      options.optimizer,
      temperature=1.0,
      row_length=components.row_length(config),
    )
    teacher = kinds.demonstrations_of(
      config, services.questions, services.environment
    )
    start = learner.start()
  with run_lib.Run.open(
    config,
    folder,
    start,
    checkpoint_state.PolicyCheckpoints(),
    tokenizer,
    num_steps=options.num_steps,
    shown_every=shown_every,
  ) as training:
    skips = checks.SkippedUpdates(config.updates.max_skipped)
    state = training.state
    for step in training.steps():
      with training.phase('step'):
        with folder.interruptible():
          dialogues = teacher.batch(step, options.batch_size)
          batch = _packed(config, services, tokenizer, dialogues, hosts)
          # If the hosts' arrays differed in shape, the hosts would wait for
          # each other in the update for ever.
          agreement.check_program(hosts, 'supervised update', step, batch)
        # The learning rate is constant in the first half of the run, and falls
        # linearly to 0 in the second half.
        left = 1 - step / options.num_steps
        rate = learner.numbers.learning_rate * min(1.0, 2 * left)
        with training.consuming_state():
          state, metrics = learner.update(
            state, batch, numbers=learner.numbers._replace(learning_rate=rate)
          )
          metrics = jax.device_get(metrics)
      training.finish_step(step + 1, state, metrics | training.seconds)
      skips.check(step + 1, [metrics])
    params = training.state.policy.params
    training.finish(policy, params)
    if at_end is not None:
      at_end(policy, params)


def _packed(
  config,
  services: steps.Services,
  tokenizer,
  dialogues: Sequence[demonstrations.Demonstration],
  hosts: hosts_lib.Hosts,
) -> batch_lib.TokenBatch:
  """Returns this host's part of the demonstrations of a step as a batch.

  The environment of the run answers the demonstrated turns.

  A turn with more than env.max_turn_tokens tokens would be cut off, and the
  policy must not imitate such a turn. So dialogues with such a turn are left
  out, and other dialogues of the step are repeated to fill the batch.

  Raises:
    Misconfigured: every dialogue has such a turn.
  """
  tags = services.environment.tags
  encoded = [
    (question, [tokenizer.encode_text(text, tags=tags) for text in turns])
    for question, turns in dialogues
  ]
  room = config.env.max_turn_tokens
  fitting = [d for d in encoded if max(len(ids) for ids in d[1]) <= room]
  if not fitting:
    raise exits.Misconfigured(
      f'env.max_turn_tokens={room}: every demonstration has a longer turn'
    )
  # Dialogues are repeated before the hosts divide the batch among them, so that
  # all hosts choose the same dialogues.
  chosen = [fitting[n % len(fitting)] for n in range(len(encoded))]
  chosen = chosen[hosts.share(len(chosen))]
  collector = collect.Collector(
    engine=scripted.ScriptedEngine(
      [script for _, script in chosen], config.env.max_length
    ),
    environment=services.environment,
    tokenizer=tokenizer,
    loop=services.loop,
    max_turn_tokens=config.env.max_turn_tokens,
    max_observation_tokens=config.env.max_observation_tokens,
  )
  # The environment sends real queries, so its retriever may fail here too.
  trajectories = steps.collect_until_valid(
    lambda: collector.collect([question for question, _ in chosen], keys=None),
    services,
    min_valid_fraction=config.rollout.min_valid_fraction,
    what='demonstrations',
  )
  return pack.pack(
    trajectories, length_bucket=components.length_unit(config), hosts=hosts
  )
