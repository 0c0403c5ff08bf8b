"""The supervised start: a policy imitates noisy demonstrations."""

from collections.abc import Sequence
import pathlib
import shutil
import time

import jax

from stppo_jax import batch as batch_lib
from stppo_jax import exits
from stppo_jax.data import demonstrations
from stppo_jax.learner import offline_learner
from stppo_jax.learner import offline_losses
from stppo_jax.learner import state as state_lib
from stppo_jax.learner import weights as weights_lib
from stppo_jax.models import functional
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.rollout import collect
from stppo_jax.rollout import pack
from stppo_jax.rollout import steps
from stppo_jax.sampling import scripted
from stppo_jax.training import checkpoint_state
from stppo_jax.training import run as run_lib
from stppo_jax.training.building import assembly
from stppo_jax.training.building import engines
from stppo_jax.training.building import model_files
from stppo_jax.training.checks import host_check
from stppo_jax.training.checks import skipped_updates
from stppo_jax.training.evaluating import evaluation
from stppo_jax.workdir import run_record

Array = jax.Array
_PRINT_EVERY = 50  # steps


def run(config, workdir: str | pathlib.Path, *, restart: bool = False) -> int:
  """Trains, or resumes, on demonstrations; exports to `workdir/policy`.

  Prints, at the end, the main score on evaluation questions, sampled and
  greedy.

  Args:
    config: the config of the run; its section `sft` above all.
    workdir: the run's folder.
    restart: whether to begin anew and move aside what the folder holds.

  Returns:
    The exit code: 0 done, 130 interrupted and saved, 75 preempted and saved.
  """
  with run_lib.start(workdir) as run:
    with run.abandonable():
      components = assembly.build_components(config)
      run.record_config(config, restart=restart, command='sft')
      services = run.enter(
        assembly.build_services(config, components.questions)
      )
      learner = _Learner(config, services)
      run.open(
        config, num_steps=config.sft.num_steps, tokenizer=learner.tokenizer
      )
      state = run.resume(learner.start(), checkpoint_state.PolicyCheckpoints())
    skips = skipped_updates.SkippedUpdates(config.updates.max_skipped)
    for step in range(run.first_step, run.num_steps):
      timer = run.timer('step', step=step + 1)
      with run.abandonable():
        batch = learner.batch(step)
      state, metrics = learner.update(state, batch, step)
      metrics = jax.device_get(metrics)
      run.finish_step(step + 1, state, metrics | timer.end())
      skips.check([metrics])
    policy, params = learner.policy, state.policy.params
    run.finish(policy, params)
    engine = engines.build(
      config, services, learner.tokenizer, policy, components.placement
    )
    engine.publish(params, run.num_steps)
    evaluator = evaluation.Evaluator(
      config,
      services,
      engines.build_collector(config, services, learner.tokenizer, engine),
    )
    for greedy in (False, True):
      with run.abandonable():
        scores, _ = evaluator.run(greedy=greedy)
      kind = 'greedy' if greedy else 'sampled'
      for name, score in sorted(scores.items()):
        run.show(f'{kind} {name} {score:.3f}')
  return run.exit_code


def make_start(config, run: run_lib.Run, services: assembly.Services) -> None:
  """Makes the supervised start if the config has one and it does not exist yet.

  It is written under another name first, so that an interruption leaves no
  incomplete start.
  """
  hosts, start = run.hosts, run_record.start_folder(config, run.workdir)
  if start is None or config.init_from:
    return
  # What the first host sees counts, because it writes the start.
  exists, *_ = hosts.exchange('start', start.is_dir())
  if exists:
    return
  partial = start.with_suffix('.partial')
  if hosts.is_first and partial.is_dir():
    shutil.rmtree(partial)
  imitate(config, run, services, partial)
  if hosts.is_first:
    partial.rename(start)
  hosts.exchange('start', True)  # it is there


def imitate(
  config,
  run: run_lib.Run,
  services: assembly.Services,
  directory: str | pathlib.Path,
) -> None:
  """Trains on demonstrations and writes a Hugging Face directory."""
  hosts, learner = run.hosts, _Learner(config, services, run.hosts)
  state, num_steps = learner.start(), config.sft.num_steps
  began = time.monotonic()
  skips = skipped_updates.SkippedUpdates(config.updates.max_skipped)
  reports = []
  for step in range(num_steps):
    with run.abandonable():
      batch = learner.batch(step)
    state, metrics = learner.update(state, batch, step)
    reports.append(metrics)
    if step % _PRINT_EVERY == 0 or step == num_steps - 1:
      seconds, loss = time.monotonic() - began, metrics['sft/loss']
      if hosts.is_first:
        print(f'sft step {step} loss {loss:.4f} {seconds:.0f}s', flush=True)
      skips.check(reports)
      reports.clear()
  model_files.export(
    config,
    directory,
    learner.policy,
    state.policy.params,
    learner.tokenizer,
    dtype=weights_lib.TRAINED,
    writes=hosts.is_first,
  )


class _Learner:
  """Makes the state of a policy and updates it on demonstrations.

  A step is a function of (config, step, state).

  Args:
    config: the config of a run.
    services: questions and environment, which answers the demonstrated turns.
    hosts: the hosts of the run, each of which has a part of a batch.

  Attributes:
    policy: the model.
    tokenizer: its tokenizer.
  """

  def __init__(
    self,
    config,
    services: assembly.Services,
    hosts: hosts_lib.Hosts = hosts_lib.ALONE,
  ):
    self._config, self._services, self._hosts = config, services, hosts
    with exits.as_misconfigured():
      self.tokenizer = assembly.build_tokenizer(config, services.questions)
      self._mesh = assembly.build_mesh(config)
      shape = assembly.build_model_config(config, self.tokenizer, self._mesh)
      self.policy = functional.Model(
        shape, 'vocabulary', self._mesh, chunk=config.updates.head_chunk
      )
    self._learner = offline_learner.OfflineLearner(
      config,
      self.policy,
      offline_losses.SFT,
      config.sft.optimizer,
      temperature=1.0,
    )
    self._teacher = assembly.build_demonstrations(
      config, services.questions, services.environment
    )

  def start(self) -> state_lib.TrainState:
    """Returns the state before the first step."""
    with exits.as_misconfigured():
      return self._learner.start()

  def batch(self, step: int) -> batch_lib.TokenBatch:
    """Returns the demonstrations of a step."""
    dialogues = self._teacher.batch(step, self._config.sft.batch_size)
    packed = _pack_dialogues(
      self._config, self._services, self.tokenizer, dialogues, self._hosts
    )
    host_check.check_program(self._hosts, 'supervised update', step, packed)
    return packed

  def update(
    self, state: state_lib.TrainState, batch: batch_lib.TokenBatch, step: int
  ) -> tuple[state_lib.TrainState, dict[str, Array]]:
    """Takes one optimiser step; consumes the state. Returns metrics too."""
    left = 1 - step / self._config.sft.num_steps
    numbers = self._learner.numbers
    rate = numbers.learning_rate * min(1.0, 2 * left)
    return self._learner.update(
      state, batch, numbers=numbers._replace(learning_rate=rate)
    )


def _pack_dialogues(
  config,
  services: assembly.Services,
  tokenizer,
  dialogues: Sequence[demonstrations.Demonstration],
  hosts: hosts_lib.Hosts,
) -> batch_lib.TokenBatch:
  """Returns this host's part of the demonstrations of a step as a batch.

  The real environment answers them.

  A turn longer than env.max_turn_tokens, which would be cut, must not be
  imitated: a dialogue with such a turn is replaced by another dialogue of the
  batch.

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
      f'env.max_turn_tokens={room}: no demonstrated turn fits'
    )
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
  trajectories = steps.collect_until_valid(
    lambda: collector.collect([question for question, _ in chosen], keys=None),
    services,
    min_valid_fraction=config.rollout.min_valid_fraction,
    what='demonstrations',
    show=print,
  )
  return pack.pack(
    trajectories, length_bucket=assembly.length_unit(config), hosts=hosts
  )
