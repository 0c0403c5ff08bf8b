"""The policy reads and writes in slots.

S slots, A of them at work, C tokens appended at once, N tokens written at
most, V vocabulary. `extend` appends what the policy did not write, `decode`
lets it write. A slot's keys and values stay through all turns of a dialogue:
nothing is computed twice.

Every program works on all slots (`rows_A=None`: no copy of the cache is made)
or on the slots `rows_A`, of which it takes out what it needs. A row of `rows_A`
that is S or more stands for none. `num_blocks` is how many blocks of the cache
hold all that those slots have read so far; see `cache.extend`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slot_state
from stppo_jax.sampling import stops

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AppendBatch:
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
    logprobs_AN, truncated_logprobs_AN: float32, see `sampler.Drawn`.
    counts_A: int32.
    stopped_A: bool, the turn ended with a stop string or EOS.
    ended_A: bool, the turn ended, be it by its budget.
  """

  tokens_AN: Array
  logprobs_AN: Array
  truncated_logprobs_AN: Array
  counts_A: Array
  stopped_A: Array
  ended_A: Array


def extend(
  params: functional.Params,
  state: slot_state.SlotState,
  rows_A: Array | None,
  told: AppendBatch,
  *,
  model: functional.Model,
  num_blocks: Array | int,
) -> slot_state.SlotState:
  """Appends tokens that the policy did not write; donate the state."""
  part = slot_state.gather_slots(state, rows_A)
  A, C = told.tokens_AC.shape
  lengths_A = jnp.where(told.starts_A, 0, part.lengths_S)
  hidden_ACD, recent = model.extend(
    params,
    told.tokens_AC,
    cache=state.cache,
    lengths_B=lengths_A,
    recent=cache_lib.nothing_recent(model.config, A, C),
    first=0,
    num_blocks=num_blocks,
    slots_B=rows_A,
  )
  hidden_AD = _last(hidden_ACD, told.counts_A, part.hidden_SD)
  opens_A = told.budgets_A >= 0
  cache = _stored(state, rows_A, recent, lengths_A, told.counts_A, hidden_AD)
  return slot_state.scatter_slots(
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


def decode(
  params: functional.Params,
  state: slot_state.SlotState,
  rows_A: Array | None,
  key_data_A2: Array,
  table_SV: Array,
  greedy: Array | bool,
  enough: Array | int,
  *,
  model: functional.Model,
  stopped: int,
  sampling: sampler.Sampling,
  num_tokens: int,
  num_blocks: Array | int,
) -> tuple[slot_state.SlotState, Chunk]:
  """At most `num_tokens` tokens for the rows that have a budget.

  Args:
    params: of the policy.
    state: donate it.
    rows_A: see the module.
    key_data_A2: uint32, a key for each row.
    table_SV: of the stop automaton.
    greedy: take the likeliest token.
    enough: turns after whose end no further token is written in any row.
    model: the policy.
    stopped: the automaton's last state.
    sampling: how tokens are drawn.
    num_tokens: N.
    num_blocks: see the module.
  """
  part = slot_state.gather_slots(state, rows_A)
  # Out of the loop, which reads them for every token.
  blocks = slot_state.gather_cache(state, rows_A, num_blocks)
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
    num_waiting = jnp.sum(waiting(part))
    ended = num_begun - num_waiting
    return (step < N) & (num_waiting > 0) & (ended < enough)

  def write_one(carry):
    part, recent, chunk, step = carry
    write_A = waiting(part)
    *written, counts_A = chunk
    drawn = sampler.sample(
      heads.logits(part.hidden_SD, output_VD),
      keys_A,
      begin.lengths_S + counts_A,
      sampling,
      greedy,
    )
    hidden_A1D, recent = model.extend(
      params,
      drawn.tokens_S[:, None],
      cache=blocks,
      lengths_B=begin.lengths_S,
      recent=recent,
      first=step,
      num_blocks=num_blocks,
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
  begin = part = dataclasses.replace(part, cache=())
  num_begun = jnp.sum(waiting(part))
  part, recent, chunk, _ = jax.lax.while_loop(
    busy, write_one, (part, recent, chunk, 0)
  )
  counts_A = chunk[-1]
  stopped_A = part.automaton_S == stopped
  out = Chunk(*chunk, stopped_A, stopped_A | (part.budgets_S == 0))
  cache = _stored(
    state, rows_A, recent, begin.lengths_S, counts_A, part.hidden_SD
  )
  state = slot_state.scatter_slots(
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


def _stored(state, rows_A, recent, lengths_A, counts_A, hidden_AD):
  """The cache with what is recent, but for rows that are not finite.

  A slot outlives its row: even where nothing of it is visible, 0 times what it
  holds must be 0. And so it is certain that blocks are overwritten when all of
  them have been read: else they were copied.
  """
  finite_A = jnp.all(jnp.isfinite(hidden_AD), axis=1)
  counts_A = jnp.where(finite_A, counts_A, 0)
  return cache_lib.store(state.cache, recent, lengths_A, counts_A, rows_A)


def _last(hidden_ACD, counts_A, otherwise_AD):
  """The hidden state of each row's last new token, where there is one."""
  last_A = jnp.maximum(counts_A - 1, 0)
  last_A1D = jnp.take_along_axis(hidden_ACD, last_A[:, None, None], axis=1)
  return jnp.where(counts_A[:, None] > 0, last_A1D[:, 0], otherwise_AD)
