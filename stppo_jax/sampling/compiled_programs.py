"""The compiled programs of the local engine, and the weights they read.

All lanes share them, and so do engines of the same model, sizes and sampling: a
program is traced and compiled once in a process, whoever calls it first.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slot_programs
from stppo_jax.sampling import slot_state as slot_state_lib
from stppo_jax.sampling import stops


class CompiledPrograms:
  """The programs that a `SlotDriver` calls.

  Args:
    model: the policy; the mesh in it is replaced by `mesh`.
    mesh: local devices; slots are sharded over its batch axes.
    automaton: the stop automaton over the tokenizer's ids.
    options: the engine's options.

  Attributes:
    block_size: tokens in one block of a slot's cache.
    shards: number of devices that the slots are sharded over.
    params: the published weights; None before the first `publish`.
    table_ZV: the automaton's transitions, with a column for each id.
    empty, extend, copy, repeat, decode: compiled functions of `slot_state` and
      `slot_programs`.
    expert_ids: likewise; None unless options.return_expert_ids.
  """

  def __init__(
    self,
    model: functional.Model,
    *,
    mesh: jax.sharding.Mesh,
    automaton: stops.StopAutomaton,
    options: engine_options.EngineOptions,
  ):
    self.block_size = -(-options.max_length // options.cache_blocks)
    self.shards = math.prod(mesh.shape[axis] for axis in mesh_lib.BATCH_AXES)
    self._by_slot = sharding.batch_sharding(mesh)
    self.params = None
    self.table_ZV = jax.device_put(
      automaton.table(model.config.vocab_size), sharding.replicated(mesh)
    )
    functions = _jit(
      dataclasses.replace(model, mesh=mesh),
      mesh,
      blocks=(self.block_size,) * options.cache_blocks,
      stopped=automaton.stopped,
      sampling=options.sampling,
      num_tokens=options.decode_chunk,
    )
    self._copy_params = functions.copy_params
    self.empty = functions.empty
    self.extend = functions.extend
    self.copy = functions.copy
    self.repeat = functions.repeat
    self.decode = functions.decode
    self.expert_ids = None
    if options.return_expert_ids:
      self.expert_ids = functions.expert_ids

  def publish(self, params: functional.Params) -> None:
    """Copies the policy's weights, which may have any layout."""
    self.params = self._copy_params(params)

  def put(self, *trees):
    """Puts arrays on the devices, sharded by slot like the state."""
    return jax.device_put(trees, self._by_slot)


class _Functions(NamedTuple):
  """The jitted functions, see `CompiledPrograms`."""

  copy_params: Callable[..., Any]
  empty: Callable[..., Any]
  extend: Callable[..., Any]
  copy: Callable[..., Any]
  repeat: Callable[..., Any]
  decode: Callable[..., Any]
  expert_ids: Callable[..., Any]


# The engines of a run's collecting and evaluating differ in few of these, and a
# process that trains several algorithms uses the same engine for all of them.
@functools.lru_cache(maxsize=8)
def _jit(
  model: functional.Model,
  mesh: jax.sharding.Mesh,
  *,
  blocks: tuple[int, ...],
  stopped: int,
  sampling: sampler.Sampling,
  num_tokens: int,
) -> _Functions:
  """Returns the jitted functions for these static values."""
  replicated = sharding.replicated(mesh)
  # The state has the same layout when it goes in and when it comes out; with
  # another one, the next call would be compiled anew.
  by_slot: dict[str, Any] = {'out_shardings': sharding.batch_sharding(mesh)}
  # On a CPU a branch is cheap and compiling is dear: one program looks at any
  # number of blocks. Elsewhere each number of blocks has its own program.
  cpu = mesh.devices.flat[0].platform == 'cpu'
  by_blocks: dict[str, Any] = by_slot | {
    'static_argnames': () if cpu else 'num_blocks'
  }
  return _Functions(
    # The weights are cast once here, to the dtype they are computed with:
    # every decoded token reads all of them. `jnp.copy` matters where the cast
    # changes nothing. The learner donates its weights to the next update, and
    # an output that aliased them, as `device_put` may also return, would be
    # overwritten while the engine still decodes.
    copy_params=jax.jit(
      lambda params: jax.tree.map(
        jnp.copy,
        model.split_layers(precision.cast(params, model.config.dtype)),
      ),
      out_shardings=replicated,
    ),
    empty=jax.jit(
      lambda num_slots: slot_state_lib.empty(model, num_slots, blocks),
      static_argnums=0,
      **by_slot,
    ),
    # The state is donated: the cache is the largest array of the engine, and
    # its new tokens must be stored in place.
    extend=jax.jit(
      functools.partial(slot_programs.extend, model=model),
      donate_argnums=1,
      **by_blocks,
    ),
    copy=jax.jit(slot_state_lib.copy_prompts, donate_argnums=0, **by_blocks),
    repeat=jax.jit(
      slot_state_lib.repeat_prompts, static_argnums=(1, 2), **by_slot
    ),
    decode=jax.jit(
      functools.partial(
        slot_programs.decode,
        model=model,
        stopped=stopped,
        sampling=sampling,
        num_tokens=num_tokens,
      ),
      donate_argnums=1,
      **by_blocks,
    ),
    expert_ids=jax.jit(slot_state_lib.expert_ids, out_shardings=replicated),
  )
