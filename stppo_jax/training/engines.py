"""Builds the engine of a process, and the collectors that sample with it.

Collections and evaluations share one engine, because each engine holds a copy
of the weights, and a cache for the keys and values of its slots.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.envs import reward_function
from stppo_jax.learner import learner as learner_lib
from stppo_jax.learner import model_roles
from stppo_jax.models import cache as cache_lib
from stppo_jax.models import cached_pass
from stppo_jax.models import flops
from stppo_jax.models import functional
from stppo_jax.models import modules
from stppo_jax.parallel import memory as memory_lib
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish as publish_lib
from stppo_jax.parallel import sharding
from stppo_jax.rollout import collect
from stppo_jax.rollout import steps
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slice_driver
from stppo_jax.sampling import slot_driver
from stppo_jax.sampling import stops
from stppo_jax.sampling import tokenizer as tokenizer_lib
from stppo_jax.sampling.remote import client as client_lib
from stppo_jax.sampling.remote import engine as remote_engine
from stppo_jax.training import components
from stppo_jax.training import model_files

Engine = engine_lib.Engine | remote_engine.RemoteEngine
WEIGHTS, CACHE = 'weights of the engine', 'keys and values of the engine'
OLDER = 'weights of turns that go on'


def build(
  config,
  services: steps.Services,
  tokenizer: tokenizer_lib.Tokenizer,
  policy: functional.Model,
  placement: publish_lib.Placement | None,
  agreed: slice_driver.Agreed | None = None,
) -> Engine:
  """Returns the engine of a run, before any weights are published to it.

  Args:
    config: the config of the run.
    services: the environment, whose stop strings end a turn, and the event
      loop.
    tokenizer: the policy's tokenizer.
    policy: the policy without a value head.
    placement: see `components.build_placement`; None builds a client of a
      remote engine.
    agreed: exchanges values between hosts, see `claim.Folder`; needed if the
      placement spans the slice.

  Raises:
    EngineUnreachable, EngineUnsuited: with rollout.engine=remote only.
  """
  eos_ids = model_files.end_token_ids(config, tokenizer)
  automaton = stops.build(
    tokenizer.token_bytes(),
    stop_strings=services.environment.stop_strings,
    eos_ids=eos_ids,
  )
  if placement is None:  # rollout.engine=remote: a server samples the turns
    served = config.rollout.remote
    client = client_lib.EngineClient(
      served.url, timeout=served.timeout, retries=served.retries
    )
    return remote_engine.RemoteEngine(
      client,
      loop=services.loop,
      model=served.model,
      shape=policy.config,
      automaton=automaton,
      stop_strings=services.environment.stop_strings,
      eos_ids=eos_ids,
      max_length=config.env.max_length,
      sampling=_sampling(config),
      concurrency=served.concurrency,
    )
  driver = slot_driver.SlotDriver
  if placement.spans_slice:
    assert agreed is not None
    driver = functools.partial(slice_driver.SliceDriver, agreed=agreed)
  return engine_lib.Engine(
    policy,
    placement=placement,
    automaton=automaton,
    options=options(config, placement.hosts),
    make_driver=driver,
  )


def publish(
  engine: Engine,
  learner: learner_lib.Learner,
  params: model_roles.Params,
  version: int,
) -> None:
  """Gives a policy's weights to an engine, which samples with them from now on.

  Args:
    engine: the engine.
    learner: the learner of the policy.
    params: the weights.
    version: the number of steps that the policy was trained for.
  """
  if isinstance(engine, engine_lib.Engine):
    # With adapters, the engine copies the frozen base once, and later only the
    # adapters.
    trained = decoded_weights(params.trained.policy)
    engine.publish(trained, version, base=params.frozen or None)
  else:
    # A server reads the files of a whole model, so adapters are merged.
    engine.publish(learner.merged_params(params), version)


def decoded_weights(trained: functional.Params) -> functional.Params:
  """Returns the trained weights without the value head.

  Decoding does not use the value head.
  """
  return {name: x for name, x in trained.items() if name != 'scalar_head'}


def exported(
  params: model_roles.Params, with_base: bool, *, dtype: Any
) -> tuple[functional.Params, functional.Params]:
  """Returns copies of a policy's weights for hosts that only collect.

  Args:
    params: the weights.
    with_base: whether to copy the frozen weights too.
    dtype: the dtype of the computation, which the copies have.

  Returns:
    A copy of the trained weights without the value head, and a copy of the
    frozen weights, which is {} if `with_base` is False. The copies have the
    sharding of the originals.
  """
  trained = _copied(decoded_weights(params.trained.policy), dtype)
  return trained, _copied(params.frozen, dtype) if with_base else {}


# Even if the cast changes nothing, the weights are copied: the next update
# donates the learner's weights, perhaps before other hosts have fetched them.
@functools.partial(jax.jit, static_argnums=1)
def _copied(weights: functional.Params, dtype: Any) -> functional.Params:
  return jax.tree.map(jnp.copy, modules.cast(weights, dtype))


def transferred(
  engine: engine_lib.Engine, params: model_roles.Params
) -> functional.Params:
  """Copies a policy's weights to an engine's devices and returns the copy."""
  trained = decoded_weights(params.trained.policy)
  return engine.transferred(trained, base=params.frozen or None)


def build_collector(
  config,
  services: steps.Services,
  tokenizer: tokenizer_lib.Tokenizer,
  engine: collect.Engine,
  *,
  group_size: int = 1,
) -> collect.Collector:
  """Returns a collector that samples groups of trajectories with an engine."""
  env, overlong = config.env, None
  if env.rewards.overlong:
    overlong = collect.Overlong(
      weight=env.rewards.overlong,
      max_length=env.max_length,
      interval=env.overlong_fraction * env.max_length,
    )
  return collect.Collector(
    engine=engine,
    environment=services.environment,
    tokenizer=tokenizer,
    loop=services.loop,
    max_turn_tokens=env.max_turn_tokens,
    max_observation_tokens=env.max_observation_tokens,
    group_size=group_size,
    overlong=overlong,
    reward_function=reward_function.find(env.reward_function),
  )


def _sampling(config) -> sampler.Sampling:
  rollout = config.rollout
  return sampler.Sampling(
    temperature=rollout.temperature,
    top_k=rollout.top_k,
    top_p=rollout.top_p,
    min_p=rollout.min_p,
  )


def release(engine: Engine, config) -> None:
  """Frees the arrays that a local engine does not need during updates."""
  if isinstance(engine, engine_lib.Engine) and not config.rollout.steps_ahead:
    engine.release()


def kept(config) -> frozenset[str]:
  """Returns the names of the arrays that an engine keeps during updates.

  The names are keys of the first result of `sizes`. If steps are collected
  during updates, the engine keeps all arrays. Otherwise the engine drops its
  cache and its weights, but keeps a frozen base under adapters.
  """
  if config.rollout.steps_ahead:
    return frozenset({WEIGHTS, CACHE, OLDER})
  return frozenset({WEIGHTS} if config.model.lora.rank else ())


def options(config, hosts: int) -> engine_options.EngineOptions:
  """Returns the options of the local engine of each host."""
  rollout = config.rollout
  return engine_options.EngineOptions(
    slots=components.num_slots(config, hosts),
    max_length=config.env.max_length,
    sampling=_sampling(config),
    page_size=rollout.page_size,
    pages=rollout.pages,
    prefill_chunk=rollout.prefill_chunk,
    decode_chunk=rollout.decode_chunk,
    early_exit=rollout.early_exit,
    lookahead=rollout.lookahead,
    deterministic=rollout.deterministic,
    lanes=rollout.lanes,
    batch_rows=rollout.batch_rows,
    return_expert_ids=config.updates.routing_replay == 'sampler',
    turn_swaps=rollout.turn_swaps,
  )


def sizes(
  config, policy: functional.Model, placement: publish_lib.Placement
) -> tuple[dict[str, int], int]:
  """Returns the bytes that a local engine needs on each device.

  If a kernel reads the pages of the KV cache in place, decoding copies nothing.
  Otherwise each call of decode first copies the pages of its rows.

  Returns:
    The bytes of the engine's arrays by name, and the bytes of keys and values
    that a call of decode copies. The arrays are the weights in the dtype of the
    computation, and the KV cache. With `rollout.turn_swaps`, there may also be
    older weights, for turns that began with these weights and have not ended.
  """
  # Only shapes are evaluated: nothing is allocated or compiled.
  weights = jax.eval_shape(
    functools.partial(modules.cast, dtype=policy.config.dtype),
    policy.abstract_params,
  )
  chosen = options(config, placement.hosts)
  pages = chosen.lanes * chosen.pages_per_lane
  cache = jax.eval_shape(
    lambda: cache_lib.empty(
      policy.config,
      mesh_lib.num_hosts(placement.mesh) * pages,
      chosen.tokens_per_page,
    )
  )
  layouts = {
    WEIGHTS: (weights, sharding.param_shardings(weights, placement.mesh)),
    CACHE: (cache, cache_lib.shardings(policy.config, placement.mesh)),
  }
  held = {
    name: memory_lib.bytes_per_device(sharding.with_layout(*tree_and_layout))
    for name, tree_and_layout in layouts.items()
  }
  # On devices that only collect, the older weights are not counted here: the
  # caller counts the weights of all next steps, and these include the older
  # weights. With adapters, all weights share the base, so older weights need
  # hardly more memory.
  swaps = chosen.turn_swaps != 'never' and not placement.collecting
  if swaps and not config.model.lora.rank:
    held[OLDER] = min(config.rollout.steps_ahead, 2) * held[WEIGHTS]
  if cached_pass.reads_live(policy.config, chosen.tokens_per_page):
    return held, 0
  rows = chosen.largest_call(
    cache_lib.row_shards_of_host(policy.config, placement.mesh)
  )
  return held, held[CACHE] * rows * chosen.pages_per_row // pages


def slot_memory(
  config, policy: functional.Model, placement: publish_lib.Placement
) -> int:
  """Returns the bytes on a device that grow with the number of slots.

  These are the KV cache, the pages that decode copies, and an estimate of the
  temporary arrays of the program `extend`. With few slots the estimate equals
  the bytes that the compiler for TPU plans; with many slots it is up to twice
  as large.
  """
  held, copied = sizes(config, policy, placement)
  shape, tensor = policy.config, placement.tensor
  chosen = options(config, placement.hosts)
  shards = cache_lib.row_shards_of_host(shape, placement.mesh)
  # The largest call appends a chunk to each of its rows, and each shard has an
  # equal share of these rows.
  tokens = chosen.largest_call(shards) // shards * chosen.prefill_chunk
  mlp = max(flops.mlp_width(layer) for layer, _ in shape.stacks.values())
  size = jnp.dtype(shape.dtype).itemsize
  # Each token needs hidden states, the activations of the MLP, and attention
  # scores for all keys that are read together. The scores are also held in
  # float32, which is the 4 bytes below.
  per_token = (4 * shape.hidden_size + 3 * mlp // tensor) * size
  keys = max(chosen.tokens_per_page, chosen.prefill_chunk)
  per_token += shape.num_heads // tensor * keys * (size + 4)
  return held[CACHE] + copied + tokens * per_token
