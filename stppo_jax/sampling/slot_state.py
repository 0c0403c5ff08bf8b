"""Keeps the state of slots on the devices, and copies prompts between them.

S slots, A active slots, D model width, N pages that a row can have. See
`slot_programs` for the programs that append and decode, and for the meaning of
`slots_A`; see `models/cache` for pages.
"""

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
  """Holds the state of all slots, or of A active ones, on the devices.

  Attributes:
    cache: keys and values in pages, which the host gives to slots.
    lengths: [S] int32, tokens of each slot in the cache.
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
  model: functional.Model, num_slots: int, num_pages: int, page_size: int
) -> SlotState:
  """Returns slots without a token.

  Args:
    model: the policy.
    num_slots: S.
    num_pages: pages of all slots.
    page_size: tokens of a page.
  """
  config = model.config
  hidden = jnp.zeros((num_slots, config.hidden_size), config.dtype)
  zeros_S = jnp.zeros(num_slots, jnp.int32)
  return SlotState(
    cache_lib.empty(config, num_pages, page_size),
    lengths=zeros_S,
    hidden=hidden,
    prompt_hidden=hidden,
    automaton=zeros_S,
    budgets=zeros_S,
  )


def shardings(model: functional.Model, mesh: jax.sharding.Mesh) -> SlotState:
  """Returns the layout of slots on a mesh."""
  by_slot: Any = sharding.batch_sharding(mesh)
  return SlotState(
    cache_lib.shardings(model.config, mesh),
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
  from_A: Array,
  to_A: Array,
  *,
  mesh: jax.sharding.Mesh,
) -> SlotState:
  """Lets slots begin with the prompts of other slots, and starts their turns.

  The full pages of the prompt are not copied: the host has listed them as pages
  of these slots, too. The last page, which the prompt fills only in part, is
  copied, because rows differ after the prompt. Beyond the prompt, the copy has
  what followed it in the source, but the slot's length makes that invisible.

  Args:
    state: all slots; donate it.
    sources_A: slots whose first lengths_A tokens are the prompt; their rows may
      have gone on since.
    slots_A: slots that begin.
    lengths_A: int32, tokens of the prompt.
    budgets_A: int32, tokens that the policy may generate.
    from_A, to_A: the last page of the prompt, and the page that it is copied
      to; both `cache.NO_PAGE` where the prompt fills its pages.
    mesh: the mesh of the slots.
  """
  # The source may have gone on, so its present state is that of its own turns.
  # Only what it keeps of the prompt is copied.
  sources = gather_slots(state, slots_A=sources_A)
  cache = cache_lib.copy_pages(state.cache, from_A, to_A, mesh=mesh)
  return scatter_slots(
    state,
    cache,
    slots_A=slots_A,
    mesh=mesh,
    lengths=lengths_A,
    hidden=sources.prompt_hidden,
    prompt_hidden=sources.prompt_hidden,
    automaton=jnp.full_like(sources.automaton, stops.StopAutomaton.START),
    budgets=budgets_A,
  )


def expert_ids(state: SlotState, pages_N: Array) -> Array:
  """Returns the experts that the tokens of pages visited.

  Args:
    state: all slots.
    pages_N: int32, numbers of pages, of all devices.

  Returns:
    int16 [tokens of the pages, layers, experts of a token].
  """
  return cache_lib.expert_ids(state.cache, pages_N).astype(jnp.int16)


def gather_slots(state: SlotState, *, slots_A: Array | None) -> SlotState:
  """Returns the state of the active slots, without their cache."""
  state = dataclasses.replace(state, cache=())
  if slots_A is None:
    return state
  # A slot id of S or more stands for no slot: what is read there is never
  # stored, because `scatter_slots` drops it.
  return jax.tree.map(lambda x: rows.take_clipped(x, slots_A), state)


def scatter_slots(
  state: SlotState,
  cache: cache_lib.Cache,
  *,
  slots_A: Array | None,
  mesh: jax.sharding.Mesh | None,
  **fields_A: Array,
) -> SlotState:
  """Returns the state with new fields of the active slots and a new cache."""
  if slots_A is None:
    return SlotState(cache, **fields_A)
  return SlotState(
    cache,
    **{
      name: rows.put(getattr(state, name), slots_A, new_A, mesh)
      for name, new_A in fields_A.items()
    },
  )
