"""The state of the slots on the devices, and how prompts move between slots.

S slots, A active slots, D model width, L positions of the cache, E experts a
token visits. See `slot_programs` for the programs that append and decode, and
for the meaning of `slots_A` and `num_blocks`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.parallel import rows
from stppo_jax.parallel import sharding
from stppo_jax.sampling import stops

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
  """The state of all slots, or of A active ones, on the devices.

  Attributes:
    cache: keys and values of all tokens of the dialogue so far.
    lengths: [S] int32, tokens in the cache.
    hidden: [S, D], final hidden state of the last token; it predicts the next.
    prompt_hidden: [S, D], final hidden state of the prompt's last token; a copy
      of the prompt starts from it after the slot itself has gone on.
    automaton: [S] int32, state of the stop automaton in the current turn.
    budgets: [S] int32, tokens that the policy may still generate in this turn;
      0 where it is not the policy's turn.
  """

  cache: cache_lib.Cache
  lengths: Array
  hidden: Array
  prompt_hidden: Array
  automaton: Array
  budgets: Array


def empty(
  model: functional.Model, num_slots: int, blocks: Sequence[int]
) -> SlotState:
  """Returns slots without a token.

  Args:
    model: the policy.
    num_slots: S.
    blocks: tokens of each block of the cache.
  """
  config = model.config
  hidden = jnp.zeros((num_slots, config.hidden_size), config.dtype)
  zeros_S = jnp.zeros(num_slots, jnp.int32)
  return SlotState(
    cache_lib.empty(config, num_slots, blocks),
    lengths=zeros_S,
    hidden=hidden,
    prompt_hidden=hidden,
    automaton=zeros_S,
    budgets=zeros_S,
  )


def shardings(
  model: functional.Model, mesh: jax.sharding.Mesh, num_blocks: int
) -> SlotState:
  """Returns the layout of slots on a mesh."""
  by_slot: Any = sharding.batch_sharding(mesh)
  return SlotState(
    cache_lib.shardings(model.config, mesh, num_blocks),
    lengths=by_slot,
    hidden=by_slot,
    prompt_hidden=by_slot,
    automaton=by_slot,
    budgets=by_slot,
  )


def copy_prompts(
  state: SlotState,
  sources_A: Array,
  slots_A: Array,
  lengths_A: Array,
  budgets_A: Array,
  *,
  num_blocks: Array | int,
) -> SlotState:
  """Copies prompts from slots to other slots, in which a turn begins.

  A slot still holds its prompt when its row has gone on, because the cache only
  grows at the end. Beyond the prompt, the copy has what followed it in the
  source, but its length makes those positions invisible.

  Args:
    state: all slots; donate it.
    sources_A: slots whose first lengths_A tokens are the prompt.
    slots_A: slots that are overwritten.
    lengths_A: int32, tokens of the prompt.
    budgets_A: int32, tokens that the policy may generate.
    num_blocks: blocks that hold the prompts.
  """
  sources = gather_slots(state, slots_A=sources_A)
  gathered = gather_cache(state, slots_A=sources_A, num_blocks=num_blocks)
  layers = [
    tuple(
      jax.lax.cond(
        n < num_blocks,
        lambda block, copied: _scatter(block, slots_A, copied),
        lambda block, _: block,
        *pair,
      )
      for n, pair in enumerate(zip(blocks, copied))
    )
    for blocks, copied in zip(state.cache, gathered)
  ]
  return scatter_slots(
    state,
    tuple(layers),
    slots_A=slots_A,
    lengths=lengths_A,
    hidden=sources.prompt_hidden,
    prompt_hidden=sources.prompt_hidden,
    automaton=jnp.full_like(sources.automaton, stops.StopAutomaton.START),
    budgets=budgets_A,
  )


def repeat_prompts(
  prompts: SlotState, num_groups: int, group_size: int
) -> SlotState:
  """Returns slots in which each prompt is repeated `group_size` times.

  Args:
    prompts: a slot for each group, then possibly slots of padding.
    num_groups: number of groups, without the padding.
    group_size: slots of each group.
  """
  return jax.tree.map(
    lambda x: jnp.repeat(x[:num_groups], group_size, axis=0), prompts
  )


def expert_ids(state: SlotState, slot: Array) -> Array:
  """Returns the experts that each token of a slot visited.

  Returns:
    int16 [L, layers, E]; arbitrary from the slot's length on.
  """
  cache = jax.tree.map(lambda x: x[slot][None], state.cache)
  return cache_lib.expert_ids(cache)[0].astype(jnp.int16)


def gather_slots(state: SlotState, *, slots_A: Array | None) -> SlotState:
  """Returns the state of the active slots, without their cache."""
  state = dataclasses.replace(state, cache=())
  return state if slots_A is None else _gather(state, slots_A)


def gather_cache(
  state: SlotState, *, slots_A: Array | None, num_blocks: Array | int
) -> cache_lib.Cache:
  """Returns the cache of the active slots: its first blocks, then zeros."""
  if slots_A is None:
    return state.cache
  zeros = lambda block, slots_A: jax.tree.map(
    lambda x: jnp.zeros((slots_A.size, *x.shape[1:]), x.dtype), block
  )
  return tuple(
    tuple(
      jax.lax.cond(n < num_blocks, _gather, zeros, block, slots_A)
      for n, block in enumerate(blocks)
    )
    for blocks in state.cache
  )


def _gather(tree, slots_A: Array):
  # A slot id of S or more stands for no slot: what is read there is never
  # stored, because `_scatter` drops it.
  return jax.tree.map(lambda x: rows.take(x, slots_A), tree)


def scatter_slots(
  state: SlotState,
  cache: cache_lib.Cache,
  *,
  slots_A: Array | None,
  **fields_A: Array,
) -> SlotState:
  """Returns the state with new fields of the active slots and a new cache."""
  if slots_A is None:
    return SlotState(cache, **fields_A)
  fields = {name: getattr(state, name) for name in fields_A}
  return SlotState(cache, **_scatter(fields, slots_A, fields_A))


def _scatter(tree, slots_A: Array, new):
  return jax.tree.map(lambda x, new: rows.put(x, slots_A, new), tree, new)
