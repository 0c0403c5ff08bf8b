"""Keeps the state of slots on the devices, and copies prompts between slots.

S slots, A active slots, D model width, N pages that a row can have. The module
`slot_programs` has the programs that append and decode, and explains `slots_A`.
The module `models/cache` explains pages.
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
  """Holds the state of all S slots, or of A active slots, on the devices.

  Attributes:
    cache: the pages with keys and values; the host assigns pages to slots.
    lengths: [S] int32, the number of tokens of each slot in the cache.
    hidden: [S, D], the final hidden state of the last token, which predicts the
      next token.
    prompt_hidden: [S, D], the final hidden state of the prompt's last token. A
      copy of the prompt starts from it, even if this slot holds later tokens.
    automaton: [S] int32, the state of the stop automaton in the current turn.
    budgets: [S] int32, the number of tokens that the policy may still generate
      in this turn. A slot generates only while its budget is above 0 and its
      automaton has not stopped.
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
  """Returns the state of slots without tokens.

  Args:
    model: the policy.
    num_slots: S.
    num_pages: the number of pages of all slots.
    page_size: the number of tokens in a page.
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
  """Returns the sharding of each array of the state on a mesh."""
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
  """Copies prompts from other slots into slots, and starts turns there.

  The full pages of a prompt are not copied: the host has listed these pages for
  both slots. The last page, which the prompt fills only in part, is copied,
  because rows differ after the prompt. The copied page may also contain later
  tokens of the source. They lie beyond the length of the new slot and are never
  read.

  Args:
    state: the state of all slots; the caller donates it.
    sources_A: the slots whose first lengths_A tokens are the prompt; they may
      hold later tokens, too.
    slots_A: the slots that begin with the prompt.
    lengths_A: int32, the number of tokens of the prompt.
    budgets_A: int32, the number of tokens that the policy may generate.
    from_A, to_A: the numbers of the prompt's last page and of the page to which
      it is copied; both are `cache.NO_PAGE` if the prompt fills its pages.
    mesh: the mesh of the slots.
  """
  # If a source holds later tokens, too, most of its state belongs to these
  # tokens. Only `prompt_hidden` still describes the prompt.
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
  """Returns the experts to which the tokens of some pages were routed.

  Args:
    state: the state of all slots.
    pages_N: int32, page numbers that count the pages of all devices.

  Returns:
    int16 [tokens of the pages, layers, experts of a token].
  """
  return cache_lib.expert_ids(state.cache, pages_N).astype(jnp.int16)


def gather_slots(state: SlotState, *, slots_A: Array | None) -> SlotState:
  """Returns the state of the active slots, without their cache."""
  state = dataclasses.replace(state, cache=())
  if slots_A is None:
    return state
  # A slot number of S or more stands for no slot. The values that are read for
  # it are never stored, because `scatter_slots` drops them.
  return jax.tree.map(lambda x: rows.take_clipped(x, slots_A), state)


def scatter_slots(
  state: SlotState,
  cache: cache_lib.Cache,
  *,
  slots_A: Array | None,
  mesh: jax.sharding.Mesh | None,
  **fields_A: Array,
) -> SlotState:
  """Returns the state with a new cache and new fields of the active slots."""
  if slots_A is None:
    return SlotState(cache, **fields_A)
  return SlotState(
    cache,
    **{
      name: rows.put(getattr(state, name), slots_A, new_A, mesh)
      for name, new_A in fields_A.items()
    },
  )
