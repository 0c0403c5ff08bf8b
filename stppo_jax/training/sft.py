"""The supervised start: a policy imitates noisy demonstrations."""

from collections.abc import Sequence
import functools
import pathlib
import shutil
import time

import jax
import jax.numpy as jnp

from stppo_jax import batch as batch_lib
from stppo_jax.data import demonstrations
from stppo_jax.learner import optimizer as optimizer_lib
from stppo_jax.learner import weights as weights_lib
from stppo_jax.models import functional
from stppo_jax.parallel import distributed
from stppo_jax.parallel import sharding
from stppo_jax.rollout import collect
from stppo_jax.rollout import pack
from stppo_jax.sampling import scripted
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.training import assembly
from stppo_jax.training import evaluation
from stppo_jax.training import model_files
from stppo_jax.training import run as run_lib
from stppo_jax.training import run_record
from stppo_jax.training import skipped_updates

Array = jax.Array
_PRINT_EVERY = 50  # steps


def run(config, workdir: str | pathlib.Path) -> int:
  """Trains a policy on demonstrations and exports it to `workdir`.

  Prints the loss as it goes and, at the end, the main score on evaluation
  questions, sampled and greedy.

  Returns:
    The exit code: 0 done, 130 or 75 ended by a signal.
  """
  with run_lib.start(workdir, goal='its end') as run:
    # No checkpoint is saved on the way: a signal ends the command at once.
    with run.abandonable():
      questions = assembly.build_components(config).questions
      services = run.enter(assembly.build_services(config, questions))
      run.claim()
      run_record.record_run(config.to_dict(), run.workdir, 'sft')
      policy, params, tokenizer = imitate(config, services, workdir)
      evaluator = evaluation.Evaluator(config, services, tokenizer, policy)
      for greedy in (False, True):
        scores, _ = evaluator.run(params, greedy=greedy)
        kind = 'greedy' if greedy else 'sampled'
        for name, score in sorted(scores.items()):
          print(f'{kind} {name} {score:.3f}', flush=True)
  return run.exit_code


def make_start(
  config, workdir: pathlib.Path, services: assembly.Services
) -> None:
  """Makes the supervised start if the config has one and it does not exist yet.

  It is written under another name first, so that an interruption leaves no
  incomplete start.
  """
  start = run_record.start_folder(config, workdir)
  if start is None or start.is_dir():
    return
  partial = start.with_suffix('.partial')
  if partial.is_dir():
    shutil.rmtree(partial)
  imitate(config, services, partial)
  partial.rename(start)


def imitate(
  config,
  services: assembly.Services,
  directory: str | pathlib.Path,
) -> tuple[functional.Model, functional.Params, tokenizer_lib.Tokenizer]:
  """Trains on demonstrations and writes a Hugging Face directory.

  Returns:
    The policy, its weights and its tokenizer.
  """
  with assembly.config_errors():
    tokenizer = assembly.build_tokenizer(config, services.questions)
    shape = assembly.build_model_config(config, tokenizer)
    mesh = assembly.build_mesh(config)
    policy = functional.Model(
      shape, 'vocabulary', mesh, chunk=config.updates.head_chunk
    )
    params = weights_lib.load_or_init(config, config.model.path, policy, mesh)
  adam, numbers = optimizer_lib.from_config(config.sft.optimizer)
  placed = sharding.param_shardings(jax.eval_shape(adam.init, params), mesh)
  adam_state = jax.jit(adam.init, out_shardings=placed)(params)
  update = jax.jit(
    functools.partial(_update, policy, adam), donate_argnums=(0, 1)
  )
  rows = sharding.batch_sharding(mesh)
  teacher = assembly.build_demonstrations(config, services.questions)
  start = time.monotonic()
  skips = skipped_updates.SkippedUpdates(config.updates.max_skipped)
  reports = []
  for step in range(config.sft.num_steps):
    dialogues = teacher.batch(step, config.sft.batch_size)
    batch = distributed.from_local_rows(
      _pack_dialogues(config, services, tokenizer, dialogues), rows
    )
    left = 1 - step / config.sft.num_steps
    rate = numbers.learning_rate * min(1.0, 2 * left)
    params, adam_state, loss, report = update(
      params, adam_state, batch, step, numbers._replace(learning_rate=rate)
    )
    reports.append(report)
    if step % _PRINT_EVERY == 0 or step == config.sft.num_steps - 1:
      seconds = time.monotonic() - start
      print(f'sft step {step} loss {loss:.4f} {seconds:.0f}s', flush=True)
      skips.check(reports)
      reports.clear()
  dtype = weights_lib.TRAINED
  model_files.export(config, directory, policy, params, tokenizer, dtype=dtype)
  return policy, params, tokenizer


def _update(
  policy: functional.Model,
  adam,
  params,
  adam_state,
  batch: batch_lib.TokenBatch,
  count: Array,
  numbers,
):
  """Takes a step on the mean negative log-likelihood of policy tokens.

  Like an update of `train`, it changes nothing if the gradient or the results
  are not finite.
  """

  def negative_log_likelihood(params):
    logprobs_BL, _ = policy.logprobs_and_entropy(
      params,
      batch.tokens_BL,
      lengths_B=batch.lengths_B,
      loss_positions_BM=batch.loss_positions_BM,
      temperature=1.0,
    )
    chosen_BL = jnp.where(batch.loss_mask_BL, logprobs_BL, 0.0)
    return -jnp.sum(chosen_BL) / jnp.sum(batch.loss_mask_BL)

  loss, gradient = jax.value_and_grad(negative_log_likelihood)(params)
  new_params, new_adam, report = optimizer_lib.apply_gradient(
    adam, params, adam_state, gradient, count, numbers
  )
  finite = optimizer_lib.all_finite((report['grad_norm'], new_params, new_adam))
  params, adam_state = jax.tree.map(
    lambda new, old: jnp.where(finite, new, old),
    (new_params, new_adam),
    (params, adam_state),
  )
  metrics = {f'actor/{name}': x for name, x in report.items()}
  metrics['update/skipped'] = 1.0 - finite.astype(jnp.float32)
  return params, adam_state, loss, metrics


def _pack_dialogues(
  config,
  services: assembly.Services,
  tokenizer,
  dialogues: Sequence[demonstrations.Demonstration],
) -> batch_lib.TokenBatch:
  """Returns demonstrations as a batch, answered by the real environment.

  A turn longer than env.max_turn_tokens, which would be cut, must not be
  imitated: a dialogue with such a turn is replaced by another dialogue of the
  batch.

  Raises:
    Misconfigured: every dialogue has such a turn.
  """
  encoded = [
    (question, [tokenizer.encode_text(text) for text in turns])
    for question, turns in dialogues
  ]
  room = config.env.max_turn_tokens
  fitting = [d for d in encoded if max(len(ids) for ids in d[1]) <= room]
  if not fitting:
    raise assembly.Misconfigured(
      f'env.max_turn_tokens={room}: no demonstrated turn fits'
    )
  chosen = [fitting[n % len(fitting)] for n in range(len(encoded))]
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
  trajectories = collector.collect(
    [question for question, _ in chosen], keys=None
  )
  return pack.pack(trajectories, length_bucket=config.rollout.length_bucket)
