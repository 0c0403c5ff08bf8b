"""Decoding with a cache that lives through all turns of a dialogue.

S slots, C tokens appended at once, V vocabulary. Two programs do everything:
`extend` appends a prompt or an observation to some slots, `decode` lets the
policy write until its turn ends. Nothing is ever prefilled twice: a prompt
that several slots share is computed once and copied. All slots run in every
call, so shapes never depend on which rows are busy.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from stppo_jax.models import functional
from stppo_jax.models import heads
from stppo_jax.models import transformer
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import sharding
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
  """

  cache: transformer.Cache
  lengths_S: Array
  hidden_SD: Array


@dataclasses.dataclass(frozen=True)
class Written:
  """One row's turn: ids [N] int32, log-probs [N] float32, and if it stopped.

  `stopped` is False where a length limit ended the turn.
  """

  token_ids: np.ndarray
  logprobs: np.ndarray
  stopped: bool


class Engine:
  """Slots that generate; weights come from `publish`, keys from the caller.

  Args:
    model: the policy.
    mesh: local devices; rows are cut over its batch axes.
    automaton: where turns end, over the ids of the tokenizer.
    slots: rows decoded together; divisible by the mesh's batch axes.
    max_length: tokens a row can hold.
    temperature: of sampling; log-probabilities are of softmax(z/temperature).
    extend_chunk: tokens appended per call of `extend`.
    decode_chunk: most tokens written per call of `decode`.
  """

  def __init__(
    self,
    model: functional.Model,
    *,
    mesh: jax.sharding.Mesh,
    automaton: stops.StopAutomaton,
    slots: int,
    max_length: int,
    temperature: float,
    extend_chunk: int,
    decode_chunk: int,
  ):
    self.slots = slots
    self.max_length = max_length
    self._model = model
    self._extend_chunk = extend_chunk
    self._decode_chunk = decode_chunk
    self._stopped = automaton.stopped
    self._rows = sharding.batch_sharding(mesh)
    self._shards = math.prod(mesh.shape[axis] for axis in mesh_lib.BATCH_AXES)
    whole = sharding.replicated(mesh)
    self._table_SV = jax.device_put(
      automaton.table(model.config.vocab_size), whole
    )
    self._copy = jax.jit(
      lambda params: jax.tree.map(jnp.copy, params), out_shardings=whole
    )
    self._empty = jax.jit(
      self._empty_state, static_argnums=0, out_shardings=self._rows
    )
    self._spread = jax.jit(
      self._spread_state, static_argnums=1, out_shardings=self._rows
    )
    self._extend = jax.jit(self._extend_state, donate_argnums=1)
    self._decode = jax.jit(
      functools.partial(self._decode_state, temperature=temperature),
      donate_argnums=1,
    )
    self._params = None
    self._state = None
    self._lengths = np.zeros(slots, np.int32)

  def publish(self, params: functional.Params) -> None:
    """Takes a copy of the policy's weights; they serve until the next one."""
    self._params = self._copy(params)

  def reset(self) -> None:
    """Empties all slots."""
    self._state = self._empty(self.slots)
    self._lengths[:] = 0

  def remaining(self, slot: int) -> int:
    """Tokens that still fit into a slot."""
    return self.max_length - int(self._lengths[slot])

  def prefill(
    self, ids_by_group: Mapping[int, np.ndarray], *, group_size: int
  ) -> None:
    """Empties all slots and opens groups of adjacent slots with a prompt each.

    Slot g * group_size + i belongs to group g. A prompt is computed once, in a
    cache with a slot for each group (a shape of its own), then cache, length
    and hidden state are copied to all slots of the group. While that lasts,
    1 + 1 / group_size caches are in memory. With group_size 1 nothing is
    copied.

    Args:
      ids_by_group: prompts; a group without one stays empty.
      group_size: slots of a group, a divisor of `slots`.

    Raises:
      ValueError: a group size that does not divide the slots, or more tokens
        than fit into a slot.
    """
    if self.slots % group_size:
      raise ValueError(
        f'{self.slots} slots are no multiple of group_size={group_size}'
      )
    if group_size == 1:
      self.reset()
      self.extend(ids_by_group)
      return
    # Devices may be more than groups: the slots that pad the rows stay empty.
    groups = self.slots // group_size
    rows = -(-groups // self._shards) * self._shards
    self._state = None  # its memory is needed
    self._lengths[:] = 0
    prompts, lengths = self._append(
      self._empty(rows), np.zeros(rows, np.int32), ids_by_group
    )
    self._state = self._spread(prompts, group_size)
    self._lengths[:] = np.repeat(lengths[:groups], group_size)

  def extend(self, ids_by_slot: Mapping[int, np.ndarray]) -> None:
    """Appends tokens that the policy did not write.

    Raises:
      ValueError: more tokens than fit into a slot.
    """
    self._state, self._lengths = self._append(
      self._state, self._lengths, ids_by_slot
    )

  def _append(
    self,
    state: SlotState,
    lengths: np.ndarray,
    ids_by_row: Mapping[int, np.ndarray],
  ) -> tuple[SlotState, np.ndarray]:
    """A state (donated) with tokens appended to some rows, and its lengths."""
    for row, ids in ids_by_row.items():
      room = self.max_length - int(lengths[row])
      if len(ids) > room:
        raise ValueError(
          f'{len(ids)} tokens do not fit into the {room} left of '
          f'max_length={self.max_length}'
        )
    longest = max((len(ids) for ids in ids_by_row.values()), default=0)
    chunk = self._extend_chunk
    for start in range(0, longest, chunk):
      tokens_RC = np.zeros((len(lengths), chunk), np.int32)
      counts_R = np.zeros(len(lengths), np.int32)
      for row, ids in ids_by_row.items():
        part = ids[start : start + chunk]
        tokens_RC[row, : len(part)] = part
        counts_R[row] = len(part)
      state = self._extend(self._params, state, *self._put(tokens_RC, counts_R))
      lengths = lengths + counts_R
    return state, lengths

  def generate(
    self,
    slots: Sequence[int],
    *,
    keys_S: Array,
    max_tokens: int,
    greedy: bool,
  ) -> dict[int, Written]:
    """Lets the policy write one turn in each of the given slots.

    Args:
      slots: rows whose turn it is; the others stay as they are.
      keys_S: one typed key per slot; token t of a row is drawn with
        fold_in(key, t), t its position in the row.
      max_tokens: longest turn.
      greedy: take the likeliest token instead of drawing.

    Returns:
      What each of the slots wrote; at least one token wherever one fits.
    """
    budgets_S = np.zeros(self.slots, np.int32)
    for slot in slots:
      budgets_S[slot] = min(max_tokens, self.remaining(slot))
    automaton_S = np.zeros(self.slots, np.int32)  # stops.StopAutomaton.START
    ids = {slot: [] for slot in slots}
    logprobs = {slot: [] for slot in slots}
    busy = budgets_S > 0
    while busy.any():
      self._state, out = self._decode(
        self._params,
        self._state,
        self._table_SV,
        keys_S,
        *self._put(automaton_S, np.where(busy, budgets_S, 0)),
        greedy,
      )
      tokens_SN, logprobs_SN, counts_S, automaton_S = jax.device_get(out)
      for slot in slots:
        ids[slot].append(tokens_SN[slot, : counts_S[slot]])
        logprobs[slot].append(logprobs_SN[slot, : counts_S[slot]])
      self._lengths += counts_S
      budgets_S = budgets_S - counts_S
      busy = busy & (automaton_S != self._stopped) & (budgets_S > 0)
    return {
      slot: Written(
        np.concatenate([np.zeros(0, np.int32), *ids[slot]]),
        np.concatenate([np.zeros(0, np.float32), *logprobs[slot]]),
        bool(automaton_S[slot] == self._stopped),
      )
      for slot in slots
    }

  def _put(self, *arrays):
    return jax.device_put(arrays, self._rows)

  def _empty_state(self, rows: int) -> SlotState:
    config = self._model.config
    return SlotState(
      transformer.empty_cache(config, rows, self.max_length),
      jnp.zeros(rows, jnp.int32),
      jnp.zeros((rows, config.hidden_size), config.dtype),
    )

  def _spread_state(self, prompts: SlotState, group_size: int) -> SlotState:
    """Row g of the prompts in slots g * group_size and those that follow."""
    groups = self.slots // group_size
    return jax.tree.map(
      lambda x: jnp.repeat(x[:groups], group_size, axis=0), prompts
    )

  def _extend_state(self, params, state, tokens_SC, counts_S) -> SlotState:
    hidden_SCD, cache = self._model.extend(
      params, tokens_SC, state.cache, state.lengths_S, counts_S
    )
    last_S = jnp.maximum(counts_S - 1, 0)
    last_SD = jnp.take_along_axis(hidden_SCD, last_S[:, None, None], axis=1)
    return SlotState(
      cache,
      state.lengths_S + counts_S,
      jnp.where(counts_S[:, None] > 0, last_SD[:, 0], state.hidden_SD),
    )

  def _decode_state(
    self,
    params,
    state,
    table_SV,
    keys_S,
    automaton_S,
    budgets_S,
    greedy,
    *,
    temperature,
  ):
    """At most decode_chunk tokens for the slots that have a budget."""
    N = self._decode_chunk
    S = self.slots
    output_VD = self._model.output_VD(params)

    def busy(carry):
      _, _, _, counts_S, automaton_S, step = carry
      waiting_S = (counts_S < budgets_S) & (automaton_S != self._stopped)
      return (step < N) & jnp.any(waiting_S)

    def write_one(carry):
      state, tokens_SN, logprobs_SN, counts_S, automaton_S, step = carry
      write_S = (counts_S < budgets_S) & (automaton_S != self._stopped)
      scores_SV = heads.logits(state.hidden_SD, output_VD) / temperature
      noise_SV = _gumbel(keys_S, state.lengths_S, scores_SV.shape[1])
      noisy_SV = scores_SV + jnp.where(greedy, 0.0, noise_SV)
      tokens_S = jnp.argmax(noisy_SV, axis=-1).astype(jnp.int32)
      log_all_SV = jax.nn.log_softmax(scores_SV, axis=-1)
      logprobs_S = jnp.take_along_axis(log_all_SV, tokens_S[:, None], axis=1)
      state = self._extend_state(
        params, state, tokens_S[:, None], write_S.astype(jnp.int32)
      )
      moved_S = table_SV[automaton_S, tokens_S].astype(jnp.int32)
      return (
        state,
        tokens_SN.at[:, step].set(tokens_S),
        logprobs_SN.at[:, step].set(logprobs_S[:, 0]),
        counts_S + write_S,
        jnp.where(write_S, moved_S, automaton_S),
        step + 1,
      )

    start = (
      state,
      jnp.zeros((S, N), jnp.int32),
      jnp.zeros((S, N), jnp.float32),
      jnp.zeros(S, jnp.int32),
      automaton_S,
      0,
    )
    state, *out, _ = jax.lax.while_loop(busy, write_one, start)
    return state, tuple(out)


def _gumbel(keys_S: Array, positions_S: Array, vocab_size: int) -> Array:
  """[S, V] noise that depends on each row's key and position alone."""

  def row(key, position):
    key = jax.random.fold_in(key, position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)

  return jax.vmap(row)(keys_S, positions_S)
