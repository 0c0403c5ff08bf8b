"""Where a turn ends: a byte automaton that runs on token ids.

A stop string may be cut into tokens in many ways, so it is sought in bytes: an
Aho-Corasick automaton over the stop strings, advanced by every byte of a
token. The table is [states, vocabulary]; following it is one gather a token.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class StopAutomaton:
  """Transitions over tokens.

  Attributes:
    next_state_ZV: int16 [states, vocabulary]; the state after a token.
    stopped: the absorbing state, entered as soon as a stop string is complete,
      be it in the middle of a token.
  """

  next_state_ZV: np.ndarray
  stopped: int

  START = 0

  def table(self, vocab_size: int) -> np.ndarray:
    """next_state_ZV with a column for each id of a model.

    A model may have more ids than its tokenizer: those are padding, add
    nothing to the text and leave the state as it is.

    Raises:
      ValueError: the model has fewer ids.
    """
    states, known = self.next_state_ZV.shape
    if vocab_size < known:
      raise ValueError(
        f'the tokenizer has {known} ids, the model only {vocab_size}'
      )
    padding_S1 = np.arange(states, dtype=np.int16)[:, None]
    padding_SP = np.repeat(padding_S1, vocab_size - known, axis=1)
    return np.concatenate([self.next_state_ZV, padding_SP], axis=1)


def build(
  token_bytes: Sequence[bytes],
  *,
  stop_strings: Sequence[str],
  eos_id: int,
) -> StopAutomaton:
  """The automaton of a tokenizer's vocabulary.

  Args:
    token_bytes: what each id adds to the text; b'' leaves the state as it is.
    stop_strings: the first one completed ends the turn.
    eos_id: ends the turn too.

  Raises:
    ValueError: a stop string that no sequence of tokens can spell.
  """
  for stop in stop_strings:
    if not _spellable(stop.encode(), token_bytes):
      raise ValueError(f'no sequence of tokens can spell {stop!r}')
  step_SA = _byte_automaton([stop.encode() for stop in stop_strings])
  num_states = len(step_SA)
  width = max(len(token) for token in token_bytes)
  padded_VW = np.zeros((len(token_bytes), width), np.int64)
  lengths_V = np.array([len(token) for token in token_bytes])
  for token_id, token in enumerate(token_bytes):
    padded_VW[token_id, : len(token)] = list(token)
  state_SV = np.repeat(np.arange(num_states)[:, None], len(token_bytes), 1)
  for position in range(width):
    moved_SV = step_SA[state_SV, padded_VW[None, :, position]]
    state_SV = np.where(position < lengths_V[None], moved_SV, state_SV)
  stopped = num_states - 1
  state_SV[:, eos_id] = stopped
  return StopAutomaton(state_SV.astype(np.int16), stopped)


def _spellable(stop: bytes, token_bytes: Sequence[bytes]) -> bool:
  """Whether tokens can complete the string, be it with text around it."""
  tokens = set(token_bytes)
  ends = {
    n for n in range(1, len(stop)) if any(t.endswith(stop[:n]) for t in tokens)
  }
  for n in range(1, len(stop)):
    if n in ends:
      ends.update(m for m in range(n + 1, len(stop)) if stop[n:m] in tokens)
  return any(
    stop in token or any(token.startswith(stop[n:]) for n in ends)
    for token in tokens
  )


def _byte_automaton(stops: Sequence[bytes]) -> np.ndarray:
  """[states, 256] transitions; the last state means a stop is complete."""
  prefixes = sorted({stop[:n] for stop in stops for n in range(len(stop))})
  index = {prefix: n for n, prefix in enumerate(prefixes)}  # b'' is 0
  stopped = len(prefixes)
  table = np.zeros((stopped + 1, 256), np.int64)
  table[stopped] = stopped
  for prefix, state in index.items():
    for byte in range(256):
      text = prefix + bytes([byte])
      if any(text.endswith(stop) for stop in stops):
        table[state, byte] = stopped
        continue
      while text not in index:  # the longest suffix that may still grow
        text = text[1:]
      table[state, byte] = index[text]
  return table
