"""What the device remembers of slots, and how it moves between them.

S slots, A of them at work. `copy` gives a prompt that stands in one slot to
others; see `decoding` for what else changes slots, and for `rows_A` and
`num_blocks`.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.sampling import stops

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
  """What the device remembers of every slot.

  Attributes:
    cache: keys and values of all tokens of the dialogue so far.
    lengths_S: int32, tokens in the cache.
    hidden_SD: final hidden state of the last token: it predicts the next one.
    prompt_hidden_SD: that of the prompt's last token.
    automaton_S: int32, state of the stop automaton in the current turn.
    budgets_S: int32, tokens that may still be written in it; 0 = not its turn.
  """

  cache: cache_lib.Cache
  lengths_S: Array
  hidden_SD: Array
  prompt_hidden_SD: Array
  automaton_S: Array
  budgets_S: Array


def empty(
  model: functional.Model, num_slots: int, blocks: Sequence[int]
) -> SlotState:
  """Slots without a token; `blocks`: see `cache.empty`."""
  config = model.config
  hidden_SD = jnp.zeros((num_slots, config.hidden_size), config.dtype)
  zeros_S = jnp.zeros(num_slots, jnp.int32)
  return SlotState(
    cache_lib.empty(config, num_slots, blocks),
    lengths_S=zeros_S,
    hidden_SD=hidden_SD,
    prompt_hidden_SD=hidden_SD,
    automaton_S=zeros_S,
    budgets_S=zeros_S,
  )


def copy_prompts(
  state: SlotState,
  sources_A: Array,
  rows_A: Array,
  lengths_A: Array,
  budgets_A: Array,
  *,
  num_blocks: Array | int,
) -> SlotState:
  """Gives the prompts of `sources_A` to `rows_A`, whose turn begins.

  Args:
    state: donate it.
    sources_A: slots whose first lengths_A tokens are the prompt; they may have
      gone on since.
    rows_A: slots that are overwritten.
    lengths_A: int32, tokens of the prompt.
    budgets_A: int32, tokens the policy may write.
    num_blocks: blocks that hold the prompts.
  """
  part = gather_slots(state, sources_A)
  taken = gather_cache(state, sources_A, num_blocks)
  layers = [
    tuple(
      jax.lax.cond(
        n < num_blocks,
        lambda block, copied: _set_rows(block, rows_A, copied),
        lambda block, _: block,
        *pair,
      )
      for n, pair in enumerate(zip(blocks, copied))
    )
    for blocks, copied in zip(state.cache, taken)
  ]
  return scatter_slots(
    state,
    rows_A,
    tuple(layers),
    lengths_S=lengths_A,
    hidden_SD=part.prompt_hidden_SD,
    prompt_hidden_SD=part.prompt_hidden_SD,
    automaton_S=jnp.full_like(part.automaton_S, stops.StopAutomaton.START),
    budgets_S=budgets_A,
  )


def repeat_prompts(
  prompts: SlotState, num_groups: int, group_size: int
) -> SlotState:
  """Row g of the prompts in slots g * group_size and those that follow."""
  return jax.tree.map(
    lambda x: jnp.repeat(x[:num_groups], group_size, axis=0), prompts
  )


def expert_ids(state: SlotState, slot: Array) -> Array:
  """int16 [L, N, E]: the E experts that each token of a slot visited.

  In each of N layers; L positions of the cache, of which those before the
  slot's length mean something.
  """
  row = jax.tree.map(lambda x: x[slot][None], state.cache)
  return cache_lib.expert_ids(row)[0].astype(jnp.int16)


def gather_slots(state: SlotState, rows_A: Array | None) -> SlotState:
  """What is remembered of the slots at work, without their cache."""
  part = dataclasses.replace(state, cache=())
  return part if rows_A is None else _rows(part, rows_A)


def gather_cache(
  state: SlotState, rows_A: Array | None, num_blocks: Array | int
) -> cache_lib.Cache:
  """The cache of the slots at work: its first blocks, and zeros."""
  if rows_A is None:
    return state.cache
  nothing = lambda block, rows_A: jax.tree.map(
    lambda x: jnp.zeros((len(rows_A), *x.shape[1:]), x.dtype), block
  )
  return tuple(
    tuple(
      jax.lax.cond(n < num_blocks, _rows, nothing, block, rows_A)
      for n, block in enumerate(blocks)
    )
    for blocks in state.cache
  )


def _rows(tree, rows_A: Array):
  return jax.tree.map(lambda x: x.at[rows_A].get(mode='clip'), tree)


def scatter_slots(
  state: SlotState,
  rows_A: Array | None,
  cache: cache_lib.Cache,
  **fields_A: Array,
) -> SlotState:
  """The state with the fields of the slots at work, and another cache."""
  if rows_A is None:
    return SlotState(cache, **fields_A)
  fields = {name: getattr(state, name) for name in fields_A}
  return SlotState(cache, **_set_rows(fields, rows_A, fields_A))


def _set_rows(tree, rows_A: Array, new):
  return jax.tree.map(
    lambda x, new: x.at[rows_A].set(new, mode='drop'), tree, new
  )
