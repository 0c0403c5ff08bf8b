"""Compiled programs of the engine, and the weights they read.

They are shared by all lanes: a program is compiled once, whoever calls it
first.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from stppo_jax.models import functional
from stppo_jax.models import precision
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slot_programs
from stppo_jax.sampling import slot_state as slot_state_lib
from stppo_jax.sampling import stops


class CompiledPrograms:
  """What runs on the devices.

  Args:
    model: the policy; its own mesh is not used.
    mesh: local devices; slots are cut over its batch axes.
    automaton: where turns end, over the ids of the tokenizer.
    max_length: tokens a slot can hold.
    cache_blocks: parts of a slot's cache; programs read as many of them as the
      slots at work have begun.
    sampling: temperature and truncation.
    decode_chunk: most tokens that a call of `decode` writes.
    return_expert_ids: `expert_ids` is asked for.

  Attributes:
    block: tokens of a part of the cache.
    shards: how often slots are cut.
    params, table_SV: weights (`publish` sets them), and the automaton's table.
    empty, extend, copy, repeat, decode, expert_ids: see `slots` and
      `decoding`; the last one is None unless it is asked for.
  """

  def __init__(
    self,
    model: functional.Model,
    *,
    mesh: jax.sharding.Mesh,
    automaton: stops.StopAutomaton,
    max_length: int,
    cache_blocks: int,
    sampling: sampler.Sampling,
    decode_chunk: int,
    return_expert_ids: bool = False,
  ):
    model = dataclasses.replace(model, mesh=mesh)
    self.block = -(-max_length // cache_blocks)
    blocks = (self.block,) * cache_blocks
    self.shards = math.prod(mesh.shape[axis] for axis in mesh_lib.BATCH_AXES)
    self._by_row = sharding.batch_sharding(mesh)
    whole = sharding.replicated(mesh)
    self.params = None
    self.table_SV = jax.device_put(
      automaton.table(model.config.vocab_size), whole
    )
    # The same layout in and out, or the next call would be another program.
    by_row = {'out_shardings': self._by_row}
    # As they are computed with: every token reads them all.
    self._copy_params = jax.jit(
      lambda params: jax.tree.map(
        jnp.copy,
        model.split_layers(precision.cast(params, model.config.dtype)),
      ),
      out_shardings=whole,
    )
    self.empty = jax.jit(
      lambda num_slots: slot_state_lib.empty(model, num_slots, blocks),
      static_argnums=0,
      **by_row,
    )
    # A program for each number of blocks, but where branches are cheap.
    cpu = mesh.devices.flat[0].platform == 'cpu'
    by_blocks = by_row | {'static_argnames': () if cpu else 'num_blocks'}
    self.extend = jax.jit(
      functools.partial(slot_programs.extend, model=model),
      donate_argnums=1,
      **by_blocks,
    )
    self.copy = jax.jit(
      slot_state_lib.copy_prompts, donate_argnums=0, **by_blocks
    )
    self.repeat = jax.jit(
      slot_state_lib.repeat_prompts, static_argnums=(1, 2), **by_row
    )
    self.decode = jax.jit(
      functools.partial(
        slot_programs.decode,
        model=model,
        stopped=automaton.stopped,
        sampling=sampling,
        num_tokens=decode_chunk,
      ),
      donate_argnums=1,
      **by_blocks,
    )
    self.expert_ids = None
    if return_expert_ids:
      self.expert_ids = jax.jit(slot_state_lib.expert_ids, out_shardings=whole)

  def publish(self, params: functional.Params) -> None:
    """Takes a copy of the weights, in whatever layout they come."""
    self.params = self._copy_params(params)

  def send(self, *trees):
    """To the devices, cut by row where all slots are meant."""
    return jax.device_put(trees, self._by_row)
