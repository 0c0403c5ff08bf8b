"""Defines the two programs of the engine, which append and decode tokens.

S slots, A active slots, C tokens of a chunk, D model width, N pages of a row, V
vocabulary, Z states of the stop automaton. `extend` appends prompts and
observations; `decode` samples tokens from the policy. The keys and values of a
slot stay in the cache through all turns of a dialogue, so earlier tokens need
not be computed again.

Shapes are fixed, because XLA compiles a program for each shape. Rows come, go
and end their turns at any time, which changes only masks, counts and lengths. A
row that waits or has ended is computed along with the other rows, but a mask
freezes the row, and nothing that is computed for the row is stored.

If `slots_A` is None, a program works on all slots. Otherwise it works on the
active slots, and gathers their state first. `slots_A` is int32 [A]. If several
devices hold the slots, it is [devices, A / devices], and counts the slots of
each device from 0. An element of S or more is padding, and stands for no slot.

`table_AN` has the page numbers of each active slot. `num_pages` is the number
of pages that hold all tokens of the longest active slot so far. Attention reads
no further pages, so the cost of short dialogues does not depend on
`max_length`; see `models/cache`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import cache as cache_lib
from stppo_jax.models import cached_pass
from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slot_state
from stppo_jax.sampling import stops

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AppendBatch:
  """Holds the tokens that `extend` appends to each active slot.

  Attributes:
    tokens_AC: int32, of which the first counts_A of each slot are appended.
    counts_A: int32, the number of tokens to append; may be 0.
    starts_A: bool, whether the slot is emptied first.
    prompts_A: bool, whether the prompt ends with these tokens.
    budgets_A: int32, the number of tokens that the policy may generate after
      these tokens; -1 if more tokens are to be appended before the turn begins.
  """

  tokens_AC: Array | np.ndarray
  counts_A: Array | np.ndarray
  starts_A: Array | np.ndarray
  prompts_A: Array | np.ndarray
  budgets_A: Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
  """Holds the tokens that `decode` sampled.

  Attributes:
    tokens_AC: int32, of which the first counts_A of each slot were decoded.
    logprobs_AC, truncated_logprobs_AC: float32, see `sampler.SampledTokens`.
    counts_A: int32, the number of tokens that each slot decoded.
    stopped_A: bool, whether a stop string or EOS ended the turn.
    ended_A: bool, whether the turn ended, by a stop or by its budget.
  """

  tokens_AC: Array
  logprobs_AC: Array
  truncated_logprobs_AC: Array
  counts_A: Array
  stopped_A: Array
  ended_A: Array


def extend(
  params: functional.Params,
  state: slot_state.SlotState,
  appended: AppendBatch,
  table_AN: Array,
  *,
  slots_A: Array | None,
  model: functional.Model,
  num_pages: Array | int,
) -> slot_state.SlotState:
  """Appends prompts or observations to slots.

  Args:
    params: the policy's weights.
    state: the state of all slots; the caller donates it.
    appended: the tokens to append.
    table_AN: the page numbers of each active slot, see the module.
    slots_A: the active slots, see the module.
    model: the policy.
    num_pages: the number of pages that are read, see the module.

  Returns:
    The state with the tokens in it.
  """
  active = slot_state.gather_slots(state, slots_A=slots_A)
  A, C = appended.tokens_AC.shape
  # A length of 0 is enough to empty a slot, because nothing beyond the length
  # is ever read.
  lengths_A = jnp.where(appended.starts_A, 0, active.lengths)
  hidden_ACD, recent = model.extend(
    params,
    jnp.asarray(appended.tokens_AC),
    cached=cached_pass.read(
      model.config,
      state.cache,
      table_AN,
      # With length 0, no page is read for a slot that gets no tokens.
      jnp.where(appended.counts_A > 0, lengths_A, 0),
      count=num_pages,
      once=True,
      mesh=model.mesh,
    ),
    lengths_B=lengths_A,
    recent=cache_lib.nothing_recent(model.config, A, C),
    first=0,
  )
  hidden_AD = _last(hidden_ACD, appended.counts_A, active.hidden)
  begins_A = appended.budgets_A >= 0
  cache = _stored(
    state.cache,
    recent,
    table_AN,
    lengths_A,
    appended.counts_A,
    hidden_AD,
    mesh=model.mesh,
  )
  return slot_state.scatter_slots(
    state,
    cache,
    slots_A=slots_A,
    mesh=model.mesh,
    lengths=lengths_A + appended.counts_A,
    hidden=hidden_AD,
    prompt_hidden=jnp.where(
      appended.prompts_A[:, None], hidden_AD, active.prompt_hidden
    ),
    automaton=jnp.where(begins_A, stops.StopAutomaton.START, active.automaton),
    budgets=jnp.where(begins_A, appended.budgets_A, active.budgets),
  )


def decode(
  params: functional.Params,
  state: slot_state.SlotState,
  key_data_A2: Array,
  runs_A: Array,
  table_AN: Array,
  table_ZV: Array,
  *,
  slots_A: Array | None,
  greedy: Array | bool,
  enough: Array | int,
  model: functional.Model,
  stopped: int,
  sampling: sampler.Sampling,
  num_tokens: int,
  num_pages: Array | int,
  captured: bool,
) -> tuple[slot_state.SlotState, Chunk]:
  """Decodes at most `num_tokens` tokens in each slot that has a budget.

  The chunk ends early after `enough` turns have ended in it. Otherwise the rows
  that still generate would be decoded in a batch that is mostly frozen, and the
  rows whose turns ended would wait for them.

  On a GPU, a program with an early end or a branch needs the host, which reads
  a result after each token to find out what comes next. So with `captured` the
  chunk has `num_tokens` steps and no branch, whatever the data, and XLA can
  capture its kernels as CUDA graphs. Rows whose turns have ended are frozen, so
  the tokens are the same.

  Args:
    params: the policy's weights.
    state: the state of all slots; the caller donates it.
    key_data_A2: uint32, the data of each row's key.
    runs_A: bool, whether the slot decodes if it has a budget.
    table_AN: the page numbers of each active slot, see the module.
    table_ZV: the transitions of the stop automaton.
    slots_A: the active slots, see the module.
    greedy: whether to take the most probable token instead of sampling.
    enough: the chunk ends once this many turns have ended in it. It has no
      effect if `captured`.
    model: the policy.
    stopped: the automaton's absorbing state.
    sampling: temperature and truncation.
    num_tokens: C, the most tokens that a slot decodes.
    num_pages: the number of pages that are read, see the module. It must be an
      int if `captured` and no kernel reads the pages.
    captured: whether the program has neither branches nor an early end.

  Returns:
    The new state, and the tokens of the chunk.
  """
  active = slot_state.gather_slots(state, slots_A=slots_A)
  keys_A = jax.random.wrap_key_data(key_data_A2)
  output_VD = model.output_VD(params)
  A, C = len(active.lengths), num_tokens

  def generating(active):
    return runs_A & (active.budgets > 0) & (active.automaton != stopped)

  def goes_on(carry):
    active, *_, step = carry
    if captured:
      return step < C
    num_generating = jnp.sum(generating(active))
    ended = num_begun - num_generating
    return (step < C) & (num_generating > 0) & (ended < enough)

  def decode_one(carry):
    active, recent, chunk, step = carry
    generating_A = generating(active)
    *columns, counts_A = chunk
    # The token's position in the dialogue is folded into the row's key, and not
    # the number of the call. So the same token is sampled whatever slot, batch
    # and chunk the row is in.
    sampled = sampler.sample(
      heads.logits(active.hidden, output_VD),
      keys_A,
      begin.lengths + counts_A,
      sampling,
      greedy,
      branches=not captured,
    )
    hidden_A1D, recent = model.extend(
      params,
      sampled.tokens_S[:, None],
      cached=cached,
      lengths_B=begin.lengths,
      recent=recent,
      first=step,
    )
    next_A = table_ZV[active.automaton, sampled.tokens_S].astype(jnp.int32)
    one_A = generating_A.astype(jnp.int32)
    # The mask freezes the rows that do not generate. Tokens that are sampled
    # for these rows are stored in the columns below, but not counted.
    active = dataclasses.replace(
      active,
      hidden=jnp.where(generating_A[:, None], hidden_A1D[:, 0], active.hidden),
      automaton=jnp.where(generating_A, next_A, active.automaton),
      budgets=active.budgets - one_A,
    )
    columns = [x_AC.at[:, step].set(x_A) for x_AC, x_A in zip(columns, sampled)]
    return active, recent, (*columns, counts_A + one_A), step + 1

  zeros_AC = jnp.zeros((A, C), jnp.float32)
  chunk = (
    jnp.zeros((A, C), jnp.int32),
    zeros_AC,
    zeros_AC,
    jnp.zeros(A, jnp.int32),
  )
  recent = cache_lib.nothing_recent(model.config, A, C)
  begin, generates_A = active, generating(active)
  num_begun = jnp.sum(generates_A)
  # The pages are read outside the loop, because every token needs the same
  # pages. The loop stores new keys and values in `recent` and not in the pages:
  # a loop that carried the pages would copy the whole cache for every token.
  cached = cached_pass.read(
    model.config,
    state.cache,
    table_AN,
    jnp.where(generates_A, begin.lengths, 0),
    count=num_pages,
    once=False,
    mesh=model.mesh,
  )
  active, recent, chunk, _ = jax.lax.while_loop(
    goes_on, decode_one, (active, recent, chunk, 0)
  )
  counts_A = chunk[-1]
  stopped_A = active.automaton == stopped
  out = Chunk(*chunk, stopped_A, stopped_A | (active.budgets == 0))
  cache = _stored(
    state.cache,
    recent,
    table_AN,
    begin.lengths,
    counts_A,
    active.hidden,
    mesh=model.mesh,
  )
  state = slot_state.scatter_slots(
    state,
    cache,
    slots_A=slots_A,
    mesh=model.mesh,
    lengths=begin.lengths + counts_A,
    hidden=active.hidden,
    prompt_hidden=active.prompt_hidden,
    automaton=active.automaton,
    budgets=active.budgets,
  )
  return state, out


def _stored(cache, recent, table_AN, lengths_A, counts_A, hidden_AD, *, mesh):
  """Returns the cache with the recent tokens of rows whose values are finite.

  After a row has ended, its pages are used by other rows. Attention gives
  masked positions the weight 0, but 0 times nan is nan, so no value that is not
  finite may reach the cache. The recent tokens of a row are stored only if the
  row's final hidden state is finite. The final hidden states are computed from
  the pages that attention reads, so pages are overwritten only after all reads.
  Without this order the compiler would have to copy the pages.
  """
  finite_A = jnp.all(jnp.isfinite(hidden_AD), axis=1)
  counts_A = jnp.where(finite_A, counts_A, 0)
  return cache_lib.store(
    cache, recent, table_AN, lengths_A, counts_A, mesh=mesh
  )


def _last(hidden_ACD, counts_A, otherwise_AD):
  """Returns the hidden state of the last new token of each slot.

  A slot without a new token gets its row of `otherwise_AD`.
  """
  last_A = jnp.maximum(counts_A - 1, 0)
  last_A1D = jnp.take_along_axis(hidden_ACD, last_A[:, None, None], axis=1)
  return jnp.where(counts_A[:, None] > 0, last_A1D[:, 0], otherwise_AD)
