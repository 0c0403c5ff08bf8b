"""Finds where a turn ends: a byte automaton that runs on token ids.

Z states of the automaton, V vocabulary. A tokenizer can cut a stop string into
tokens in many ways, and a stop string can end in the middle of a token, so that
comparing token ids would miss some. The automaton of Aho and Corasick (1975,
"Efficient string matching") reads bytes instead: its state is the longest
suffix of the text that begins a stop string. All bytes of a token are read in
advance, once for each state, which gives a table [Z, V] of states after a
token. On the device, following the automaton is one gather for each token.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class StopAutomaton:
  """Transitions over tokens.

  Attributes:
    next_state_ZV: int16, the state after a token.
    stopped: the absorbing state, entered as soon as a stop string is complete,
      even in the middle of a token.
  """

  next_state_ZV: np.ndarray
  stopped: int

  START = 0

  def table(self, vocab_size: int) -> np.ndarray:
    """Returns next_state_ZV with a column for each id of a model.

    A model may have more ids than its tokenizer. They are padding: they add
    nothing to the text and leave the state as it is.

    Args:
      vocab_size: ids of the model, at least those of the tokenizer.
    """
    states, known = self.next_state_ZV.shape
    # Ids of padding stand for no token, but they can be sampled: their logits
    # are as finite as those of others.
    padding_Z1 = np.arange(states, dtype=np.int16)[:, None]
    padding = np.repeat(padding_Z1, vocab_size - known, axis=1)
    return np.concatenate([self.next_state_ZV, padding], axis=1)


def build(
  token_bytes: Sequence[bytes],
  *,
  stop_strings: Sequence[str],
  eos_ids: Sequence[int],
) -> StopAutomaton:
  """Builds the automaton for a tokenizer's vocabulary.

  Args:
    token_bytes: the bytes that each id adds to the text; b'' leaves the state
      as it is.
    stop_strings: the first one that is completed ends the turn.
    eos_ids: the ids that end the turn too.

  Raises:
    ValueError: if no sequence of tokens can spell a stop string.
  """
  for stop in stop_strings:
    if not _spellable(stop.encode(), token_bytes):
      raise ValueError(f'no sequence of tokens can spell {stop!r}')
  transitions = _byte_automaton([stop.encode() for stop in stop_strings])
  stopped = len(transitions) - 1
  # The bytes of each entry of the vocabulary, padded to the longest.
  width = max(len(token) for token in token_bytes)
  padded = np.zeros((len(token_bytes), width), np.int64)
  lengths_V = np.array([len(token) for token in token_bytes])
  for token_id, token in enumerate(token_bytes):
    padded[token_id, : len(token)] = list(token)
  state_ZV = np.repeat(
    np.arange(len(transitions))[:, None], len(token_bytes), 1
  )
  # All tokens are read side by side, byte by byte, from every state; a token
  # that has ended stays where it is.
  for position in range(width):
    moved_ZV = transitions[state_ZV, padded[None, :, position]]
    state_ZV = np.where(position < lengths_V[None], moved_ZV, state_ZV)
  state_ZV[:, list(eos_ids)] = stopped
  return StopAutomaton(state_ZV.astype(np.int16), stopped)


def _spellable(stop: bytes, token_bytes: Sequence[bytes]) -> bool:
  """Returns whether tokens can spell the string, with or without other text."""
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


def num_states(stop_strings: Sequence[str]) -> int:
  """Returns Z, which depends on the stop strings but not on the vocabulary."""
  return len(_byte_automaton([stop.encode() for stop in stop_strings]))


def _byte_automaton(stops: Sequence[bytes]) -> np.ndarray:
  """Returns transitions [Z, 256]; in the last state a stop is complete."""
  # A state is a proper prefix of a stop string. Whole ones share the last
  # state, since nothing after them matters.
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
