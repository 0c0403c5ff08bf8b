"""Records the effect of a step's updates on the tokens of a trajectory.

The values become the dict `tokens` of a turn in `trajectories-*.jsonl`. Most of
the dict's values are lists with a number for each token of the turn, rounded to
four digits.
"""

import codecs
from collections.abc import Sequence
import functools
from typing import Any, Protocol

import numpy as np

from stppo_jax import batch as batch_lib
from stppo_jax import types

# Name in the record -> field of `TokenDetails`.
_LISTS = {
  'old_logprob': 'old_logprobs_BL',
  'ratio': 'ratio_BL',
  'entropy': 'entropy_BL',
  'advantage': 'advantages_BL',
  'value': 'values_BL',
}


class Tokenizer(Protocol):
  """The method of `sampling.tokenizer.Tokenizer` that token records need."""

  def token_bytes(self) -> list[bytes]: ...


def turn_records(
  trajectory: types.Trajectory,
  details: batch_lib.TokenDetails,
  row: int,
  tokenizer: Tokenizer,
) -> list[dict[str, Any] | None]:
  """Returns the dict `tokens` of each turn; None for turns not trained on.

  Returns:
    For each turn that was trained on, a dict with these keys:
      characters: for each token, the number of characters that it adds to the
        text of the turn.
      old_logprob, ratio, entropy, advantage, value: one number for each token.
        `value` is absent without a value model.
      turn_ratio: the ratio of the turn.
      clipped: the indices of the tokens whose gradient the objective cuts.
      weight: for each token, the factor of its policy term, from corrections
        and normalisation. `weight` is absent if all factors are 1.
  """
  records = []
  start = len(trajectory.prompt_ids)
  for turn in trajectory.turns:
    place = slice(start, start + len(turn.token_ids))
    start = place.stop + len(turn.observation_ids)
    trained = details.loss_mask_BL[row, place]
    # The turn was cut out of the batch, or its trajectory has failed.
    if not len(trained) or not trained.all():
      records.append(None)
      continue
    record: dict[str, Any] = {
      'characters': character_counts(turn.token_ids, tokenizer)
    }
    for name, field in _LISTS.items():
      array_BL = getattr(details, field)
      if array_BL is not None:
        record[name] = _rounded(array_BL[row, place])
    # All tokens of a turn share its ratio.
    record['turn_ratio'] = _rounded(details.turn_ratio_BL[row, place][:1])[0]
    record['clipped'] = np.flatnonzero(details.cut_BL[row, place]).tolist()
    weights = details.weights_BL[row, place]
    if not (weights == 1).all():
      record['weight'] = _rounded(weights)
    records.append(record)
  return records


def character_counts(
  token_ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer
) -> list[int]:
  """Returns the number of characters that each token adds to the turn's text.

  If a character is spread over several tokens, the token that completes the
  character adds it.
  """
  # The decoder keeps the bytes of an incomplete character for the next token.
  pieces = tokenizer.token_bytes()
  decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')
  counts = [
    len(decoder.decode(pieces[i] if i < len(pieces) else b''))
    for i in token_ids
  ]
  if counts:
    counts[-1] += len(decoder.decode(b'', final=True))
  return counts


def _rounded(values: np.ndarray) -> list[float | None]:
  """Returns each value with four digits, or None if it is not finite."""
  return [_round(float(value)) for value in values]


@functools.lru_cache(maxsize=1 << 14)
def _round(value: float) -> float | None:
  return float(f'{value:.4g}') if np.isfinite(value) else None
