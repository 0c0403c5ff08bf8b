"""Finds where a turn ends, with a byte automaton that runs on token ids.

Z states of the automaton, V vocabulary. A tokenizer can split a stop string
into tokens in many ways, and a stop string can end in the middle of a token, so
a comparison of token ids would miss some stop strings. The automaton of Aho and
Corasick (1975, "Efficient string matching") reads bytes instead. Its state is
the longest suffix of the text so far with which a stop string begins. The bytes
of every token are read in advance, once from each state. This gives a table [Z,
V] with the state after each token. On the device, following the automaton is
one gather for each token.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class StopAutomaton:
  """Holds the transitions of the stop automaton over tokens.

  Attributes:
    next_state_ZV: int16, for each state, the next state after each token.
    stopped: the absorbing state, which is entered as soon as a stop string is
      complete, even in the middle of a token.
  """

  next_state_ZV: np.ndarray
  stopped: int

  START = 0

  def table(self, vocab_size: int) -> np.ndarray:
    """Returns next_state_ZV with a column for each token id of a model.

    A model may have more ids than its tokenizer. The additional ids are
    padding: they add nothing to the text and do not change the state.

    Args:
      vocab_size: the number of ids of the model, not fewer than the tokenizer
        has.
    """
    states, known = self.next_state_ZV.shape
    # Padding ids stand for no token, but the policy can sample them, because
    # their logits are finite.
    padding_Z1 = np.arange(states, dtype=np.int16)[:, None]
    padding = np.repeat(padding_Z1, vocab_size - known, axis=1)
    return np.concatenate([self.next_state_ZV, padding], axis=1)


def build(
  token_bytes: Sequence[bytes],
  *,
  stop_strings: Sequence[str],
  eos_ids: Sequence[int],
) -> StopAutomaton:
  """Builds the stop automaton for a tokenizer's vocabulary.

  Args:
    token_bytes: the bytes that each id adds to the text; b'' does not change
      the state.
    stop_strings: strings that end a turn as soon as one of them is complete.
    eos_ids: token ids that end a turn too.

  Raises:
    ValueError: if no sequence of tokens can spell a stop string.
  """
  for stop in stop_strings:
    if not _spellable(stop.encode(), token_bytes):
      raise ValueError(f'no sequence of tokens can spell {stop!r}')
  transitions = _byte_automaton([stop.encode() for stop in stop_strings])
  stopped = len(transitions) - 1
  # The bytes of each token, padded to the length of the longest token.
  width = max(len(token) for token in token_bytes)
  padded = np.zeros((len(token_bytes), width), np.int64)
  lengths_V = np.array([len(token) for token in token_bytes])
  for token_id, token in enumerate(token_bytes):
    padded[token_id, : len(token)] = list(token)
  state_ZV = np.repeat(
    np.arange(len(transitions))[:, None], len(token_bytes), 1
  )
  # All tokens are read in parallel, byte by byte, from every state. A token
  # that has no further byte keeps its state.
  for position in range(width):
    moved_ZV = transitions[state_ZV, padded[None, :, position]]
    state_ZV = np.where(position < lengths_V[None], moved_ZV, state_ZV)
  state_ZV[:, list(eos_ids)] = stopped
  return StopAutomaton(state_ZV.astype(np.int16), stopped)


def _spellable(stop: bytes, token_bytes: Sequence[bytes]) -> bool:
  """Returns whether the bytes of some sequence of tokens contain `stop`."""
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
  """Returns Z, the number of states, which depends only on the stop strings."""
  return len(_byte_automaton([stop.encode() for stop in stop_strings]))


def _byte_automaton(stops: Sequence[bytes]) -> np.ndarray:
  """Returns, for each state, the next state after each byte, [Z, 256].

  The last state is the state `stopped`.
  """
  # Each state but the last is a proper prefix of a stop string. All complete
  # stop strings share the last state, because the text after them does not
  # matter.
  prefixes = sorted({stop[:n] for stop in stops for n in range(len(stop))})
  # The prefix b'' comes first, so its state is `StopAutomaton.START`.
  index = {prefix: n for n, prefix in enumerate(prefixes)}
  stopped = len(prefixes)
  table = np.zeros((stopped + 1, 256), np.int64)
  table[stopped] = stopped
  for prefix, state in index.items():
    for byte in range(256):
      text = prefix + bytes([byte])
      if any(text.endswith(stop) for stop in stops):
        table[state, byte] = stopped
        continue
      # Bytes are cut off in front until a stop string begins with the text.
      while text not in index:
        text = text[1:]
      table[state, byte] = index[text]
  return table
