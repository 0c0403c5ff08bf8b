"""The supervised start: imitate noisy demonstrations in synthetic worlds."""

import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax.data import demonstrations
from stppo_jax.data import synthetic_wiki
from stppo_jax.models import export_hf
from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.rollout import collect
from stppo_jax.rollout import pack
from stppo_jax.sampling import scripted
from stppo_jax.training import assembly
from stppo_jax.training import evaluation
from stppo_jax.training import optimizer as optimizer_lib
from stppo_jax.training import state as state_lib

Array = jax.Array
_PRINT_EVERY = 100  # steps


def run(config, workdir: str) -> int:
  """Trains a policy on demonstrations and exports it to `workdir`.

  Prints the loss as it goes and, at the end, the exact match on unseen
  entities, sampled and greedy.

  Returns:
    The exit code.
  """
  mesh_lib.use_cpu_devices(config.mesh.cpu_devices)
  with assembly.build_surroundings(config) as surroundings:
    tokenizer = assembly.build_tokenizer(config, surroundings.questions)
    shape = assembly.build_model_config(config, tokenizer)
    policy = functional.Model(shape, 'vocabulary')
    mesh = assembly.build_mesh(config)
    options = config.sft.optimizer.to_dict()
    adam = optimizer_lib.build_optimizer(
        **{name: options.pop(name) for name in ('b1', 'b2', 'eps')}
    )
    make = lambda: (
        params := policy.init(jax.random.key(config.seed)),
        adam.init(params),
    )
    placed = sharding.param_shardings(jax.eval_shape(make), mesh)
    params, adam_state = jax.jit(make, out_shardings=placed)()
    update = jax.jit(
        functools.partial(_update, policy, adam), donate_argnums=(0, 1)
    )
    rows = sharding.batch_sharding(mesh)
    start = time.time()
    for step in range(config.sft.num_steps):
      batch = _demonstrations(config, surroundings, tokenizer, step)
      params, adam_state, loss = update(
          params, adam_state, jax.device_put(batch, rows), step, options
      )
      if step % _PRINT_EVERY == 0 or step == config.sft.num_steps - 1:
        seconds = time.time() - start
        print(f'sft step {step} loss {loss:.4f} {seconds:.0f}s', flush=True)
    export_hf.export(workdir, shape, params)
    tokenizer.save(pathlib.Path(workdir))
    evaluator = evaluation.Evaluator(config, surroundings, tokenizer, policy)
    for greedy in (False, True):
      scores, _ = evaluator.run(params, greedy=greedy)
      kind = 'greedy' if greedy else 'sampled'
      for name, score in sorted(scores.items()):
        print(f'{kind} {name} {score:.3f}', flush=True)
  return 0


def _update(
    policy: functional.Model,
    adam,
    params,
    adam_state,
    batch: batch_lib.TokenBatch,
    count: Array,
    numbers,
):
  """One step on the mean negative log-likelihood of the policy tokens."""

  def negative_log_likelihood(params):
    logprobs_BL, _ = policy.logprobs_and_entropy(
        params, batch.tokens_BL, temperature=1.0
    )
    chosen_BL = jnp.where(batch.loss_mask_BL, logprobs_BL, 0.0)
    return -jnp.sum(chosen_BL) / jnp.sum(batch.loss_mask_BL)

  loss, gradient = jax.value_and_grad(negative_log_likelihood)(params)
  params, adam_state, _ = optimizer_lib.apply_update(
      adam, params, adam_state, gradient, count, numbers
  )
  return params, adam_state, loss


def _demonstrations(
    config, surroundings: assembly.Surroundings, tokenizer, step: int
) -> batch_lib.TokenBatch:
  """A batch of dialogues, played in the real environment."""
  clean = step < config.sft.clean_one_hop_steps
  hops = (1,) if clean else tuple(config.data.synthetic_wiki.hops)
  world, chains = surroundings.questions.demonstration_chains(
      step, config.sft.batch_size, hops=hops
  )
  rng = np.random.default_rng((config.seed, step))
  scripts = []
  for chain in chains:
    texts = demonstrations.demonstrate(
        world,
        chain,
        rng,
        error_rate=0.0 if clean else config.sft.error_rate,
        think_words=config.data.synthetic_wiki.think_words,
    )
    scripts.append([tokenizer.encode_prompt(text) for text in texts])
  collector = collect.Collector(
      engine=scripted.ScriptedEngine(scripts, config.env.max_length),
      environment=surroundings.environment,
      tokenizer=tokenizer,
      loop=surroundings.loop,
      max_turn_tokens=config.env.max_turn_tokens,
      max_observation_tokens=config.env.max_observation_tokens,
  )
  trajectories = collector.collect(
      [chain.question for chain in chains], keys=None
  )
  return pack.pack(trajectories, length_bucket=config.rollout.length_bucket)
