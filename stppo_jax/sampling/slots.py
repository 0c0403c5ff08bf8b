"""The device side of decoding: slots, and the programs that run on them.

S slots, A of them at work, C tokens appended at once, N tokens written at
most, V vocabulary. `extend` appends what the policy did not write, `decode`
lets it write, `copy` gives a prompt that stands in one slot to others. A slot's
keys and values stay through all turns of a dialogue: nothing is computed
twice.

Every program works on all slots (`rows_A=None`: no copy of the cache is made)
or on the slots `rows_A`, of which it takes out what it needs. A row of `rows_A`
that is S or more stands for none. `num_blocks`, static, is how many blocks of
the cache hold all that those slots have read so far.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.sampling import sampler
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Appended:
  """What `extend` is told of each row.

  Attributes:
    tokens_AC: int32.
    counts_A: int32, tokens to append.
    starts_A: bool, the row is emptied before.
    prompts_A: bool, the prompt ends with these tokens.
    budgets_A: int32, tokens the policy may write after these; -1 = it is not
      its turn yet.
  """

  tokens_AC: Array
  counts_A: Array
  starts_A: Array
  prompts_A: Array
  budgets_A: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
  """What `decode` wrote.

  Attributes:
    tokens_AN: int32, the first counts_A of each row.
    logprobs_AN, drawn_logprobs_AN: float32, see `sampler.Drawn`.
    counts_A: int32.
    stopped_A: bool, the turn ended with a stop string or EOS.
    ended_A: bool, the turn ended, be it by its budget.
  """

  tokens_AN: Array
  logprobs_AN: Array
  drawn_logprobs_AN: Array
  counts_A: Array
  stopped_A: Array
  ended_A: Array


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


def extend(
  params: functional.Params,
  state: SlotState,
  rows_A: Array | None,
  told: Appended,
  *,
  model: functional.Model,
  num_blocks: int,
) -> SlotState:
  """Appends tokens that the policy did not write; donate the state."""
  part = _take(state, rows_A, num_blocks)
  A, C = told.tokens_AC.shape
  lengths_A = jnp.where(told.starts_A, 0, part.lengths_S)
  hidden_ACD, recent = model.extend(
    params,
    told.tokens_AC,
    part.cache,
    lengths_A,
    cache_lib.nothing_recent(model.config, A, C),
    0,
  )
  hidden_AD = _last(hidden_ACD, told.counts_A, part.hidden_SD)
  opens_A = told.budgets_A >= 0
  # What is not finite stays out of the cache. And so it is certain that blocks
  # are overwritten when all of them have been read: else they were copied.
  finite_A = jnp.all(jnp.isfinite(hidden_AD), axis=1)
  counts_A = jnp.where(finite_A, told.counts_A, 0)
  cache = cache_lib.store(state.cache, recent, lengths_A, counts_A, rows_A)
  return _put(
    state,
    rows_A,
    cache,
    lengths_S=lengths_A + told.counts_A,
    hidden_SD=hidden_AD,
    prompt_hidden_SD=jnp.where(
      told.prompts_A[:, None], hidden_AD, part.prompt_hidden_SD
    ),
    automaton_S=jnp.where(opens_A, stops.StopAutomaton.START, part.automaton_S),
    budgets_S=jnp.where(opens_A, told.budgets_A, part.budgets_S),
  )


def copy(
  state: SlotState,
  sources_A: Array,
  rows_A: Array,
  lengths_A: Array,
  budgets_A: Array,
  *,
  num_blocks: int,
) -> SlotState:
  """Gives the prompts of `sources_A` to `rows_A`, whose turn begins.

  Args:
    state: donate it.
    sources_A: slots whose first lengths_A tokens are the prompt; they may have
      gone on since.
    rows_A: slots that are overwritten.
    lengths_A: int32, tokens of the prompt.
    budgets_A: int32, tokens the policy may write.
    num_blocks: static, blocks that hold the prompts.
  """
  part = _take(state, sources_A, num_blocks)
  layers = [
    (*_set_rows(blocks[:num_blocks], rows_A, copied), *blocks[num_blocks:])
    for blocks, copied in zip(state.cache, part.cache)
  ]
  return _put(
    state,
    rows_A,
    tuple(layers),
    lengths_S=lengths_A,
    hidden_SD=part.prompt_hidden_SD,
    prompt_hidden_SD=part.prompt_hidden_SD,
    automaton_S=jnp.full_like(part.automaton_S, stops.StopAutomaton.START),
    budgets_S=budgets_A,
  )


def repeat(prompts: SlotState, num_groups: int, group_size: int) -> SlotState:
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


def decode(
  params: functional.Params,
  state: SlotState,
  rows_A: Array | None,
  key_data_A2: Array,
  table_SV: Array,
  greedy: Array | bool,
  *,
  model: functional.Model,
  stopped: int,
  sampling: sampler.Sampling,
  num_tokens: int,
  num_blocks: int,
) -> tuple[SlotState, Chunk]:
  """At most `num_tokens` tokens for the rows that have a budget.

  Args:
    params: of the policy.
    state: donate it.
    rows_A: see the module.
    key_data_A2: uint32, a key for each row.
    table_SV: of the stop automaton.
    greedy: take the likeliest token.
    model: the policy.
    stopped: the automaton's last state.
    sampling: how tokens are drawn.
    num_tokens: N.
    num_blocks: see the module.
  """
  part = _take(state, rows_A, num_blocks)
  keys_A = jax.random.wrap_key_data(key_data_A2)
  output_VD = model.output_VD(params)
  A, N = len(part.lengths_S), num_tokens
  if rows_A is not None:
    budgets_A = jnp.where(rows_A < len(state.lengths_S), part.budgets_S, 0)
    part = dataclasses.replace(part, budgets_S=budgets_A)

  def waiting(part):
    return (part.budgets_S > 0) & (part.automaton_S != stopped)

  def busy(carry):
    part, *_, step = carry
    return (step < N) & jnp.any(waiting(part))

  def write_one(carry):
    part, recent, chunk, step = carry
    write_A = waiting(part)
    *written, counts_A = chunk
    drawn = sampler.draw(
      heads.logits(part.hidden_SD, output_VD),
      keys_A,
      begin.lengths_S + counts_A,
      sampling,
      greedy,
    )
    hidden_A1D, recent = model.extend(
      params,
      drawn.tokens_S[:, None],
      begin.cache,
      begin.lengths_S,
      recent,
      step,
    )
    moved_A = table_SV[part.automaton_S, drawn.tokens_S].astype(jnp.int32)
    one_A = write_A.astype(jnp.int32)
    part = dataclasses.replace(
      part,
      hidden_SD=jnp.where(write_A[:, None], hidden_A1D[:, 0], part.hidden_SD),
      automaton_S=jnp.where(write_A, moved_A, part.automaton_S),
      budgets_S=part.budgets_S - one_A,
    )
    written = [x_AN.at[:, step].set(x_A) for x_AN, x_A in zip(written, drawn)]
    return part, recent, (*written, counts_A + one_A), step + 1

  nothing_AN = jnp.zeros((A, N), jnp.float32)
  chunk = (
    jnp.zeros((A, N), jnp.int32),
    nothing_AN,
    nothing_AN,
    jnp.zeros(A, jnp.int32),
  )
  recent = cache_lib.nothing_recent(model.config, A, N)
  # The blocks are only looked at: what the loop carries is small.
  begin, part = part, dataclasses.replace(part, cache=())
  part, recent, chunk, _ = jax.lax.while_loop(
    busy, write_one, (part, recent, chunk, 0)
  )
  counts_A = chunk[-1]
  stopped_A = part.automaton_S == stopped
  out = Chunk(*chunk, stopped_A, stopped_A | (part.budgets_S == 0))
  cache = cache_lib.store(
    state.cache, recent, begin.lengths_S, counts_A, rows_A
  )
  state = _put(
    state,
    rows_A,
    cache,
    lengths_S=begin.lengths_S + counts_A,
    hidden_SD=part.hidden_SD,
    prompt_hidden_SD=part.prompt_hidden_SD,
    automaton_S=part.automaton_S,
    budgets_S=part.budgets_S,
  )
  return state, out


def _last(hidden_ACD, counts_A, otherwise_AD):
  """The hidden state of each row's last new token, where there is one."""
  last_A = jnp.maximum(counts_A - 1, 0)
  last_A1D = jnp.take_along_axis(hidden_ACD, last_A[:, None, None], axis=1)
  return jnp.where(counts_A[:, None] > 0, last_A1D[:, 0], otherwise_AD)


def _take(state: SlotState, rows_A: Array | None, num_blocks: int) -> SlotState:
  """The slots at work, with the first blocks of their cache."""
  part = dataclasses.replace(
    state, cache=tuple(blocks[:num_blocks] for blocks in state.cache)
  )
  if rows_A is None:
    return part
  return jax.tree.map(lambda x: x.at[rows_A].get(mode='clip'), part)


def _put(
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
