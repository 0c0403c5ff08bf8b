"""Makes tests/golden/dialogues_*.npz: whole dialogues of the qwen2_* models.

    pip install torch==2.13.0 transformers numpy
    python tests/golden/make_dialogues.py

Each turn is one greedy `transformers` `generate` over all that was said so
far, with nothing kept from the turn before. The scripted retriever answers
with random tokens. N tokens of all dialogues of a collection, one after the
other, in three arrays: the token, its row, and its part (0 the prompt, odd
parts the policy's turns, even ones the observations after them).
"""

from collections.abc import Sequence
import dataclasses
import pathlib

import numpy as np

HERE = pathlib.Path(__file__).parent
MODELS = ('qwen2_tied', 'qwen2_untied')
LIMITS = (3, 24)  # tokens of a turn, one collection each
MAX_LENGTH = 640  # of a row

# What each id spells; those behind are known to the model alone.
EOS = 57
TOKENS = (
  *(a.encode() for a in 'abcdefgh'),
  *((a + b).encode() for a in 'abcdefg' for b in 'abcdefg'),
  b'<eos>',
)
STOP_STRINGS = ('ab', 'gfg')
# Projections of the stored weights are multiplied by this, or the policies
# would repeat one token for ever.
SCALE = 3.0
# Two implementations differ by some 1e-5; a greedy choice must not hang on it.
_LEAST_MARGIN = 2e-4


@dataclasses.dataclass(frozen=True)
class Script:
  """What a row is told: its prompt, and what follows each turn but the last."""

  prompt: np.ndarray
  observations: Sequence[np.ndarray]


def scripts() -> list[Script]:
  """Prompts of 3 to 300 tokens, 0 to 4 observations of 0 to 200 tokens."""
  rng = np.random.default_rng(5)
  draw = lambda size: rng.integers(0, EOS, size).astype(np.int32)
  sizes = (
    (3, (0, 200, 1, 64)),
    (300, ()),
    (17, (5,)),
    (64, (63, 129)),
    (300, (200, 37, 90, 8)),  # some of these do not fit
    (65, (12, 0, 31)),
    (128, (7, 7, 7, 7)),
    (211, (200, 200)),
    (5, (0, 0, 0, 0)),
    (90, (33, 2, 150)),
    (300, (200, 133)),  # the last turn is cut short by MAX_LENGTH
  )
  return [Script(draw(n), [draw(m) for m in told]) for n, told in sizes]


def is_over(turn: Sequence[int]) -> bool:
  """Whether a turn has come to its end, read from its text."""
  text = b''.join(TOKENS[n] for n in turn if n < len(TOKENS) and n != EOS)
  return EOS in turn or any(stop.encode() in text for stop in STOP_STRINGS)


def play(model, script: Script, limit: int) -> list[np.ndarray]:
  """The parts of a dialogue, written by a model of `transformers`."""
  parts = [script.prompt]
  for turn in range(len(script.observations) + 1):
    so_far = np.concatenate(parts)
    room = MAX_LENGTH - len(so_far)
    parts.append(_generate(model, so_far, min(limit, room)))
    if turn < len(script.observations):
      told = script.observations[turn]
      if len(told) >= room - len(parts[-1]):
        break
      parts.append(told)
  return parts


def _generate(model, ids: np.ndarray, max_new_tokens: int) -> np.ndarray:
  import torch  # the numbers are read without it

  def stop(input_ids, scores, **_):
    del scores
    over = is_over(input_ids[0, len(ids) :].tolist())
    return torch.tensor([over])

  prompt = torch.tensor(ids[None], dtype=torch.long)
  out = model.generate(
    prompt,
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=max_new_tokens,
    do_sample=False,
    pad_token_id=EOS,
    stopping_criteria=[stop],
    output_logits=True,
    return_dict_in_generate=True,
  )
  for logits in out.logits:
    first, second = torch.topk(logits[0], 2).values.tolist()
    if first - second < _LEAST_MARGIN:
      raise ValueError(f'a margin of {first - second}: choose another seed')
  return out.sequences[0, len(ids) :].numpy().astype(np.int32)


def load_model(name: str):
  """A model of `transformers`, float32, its projections scaled."""
  import torch
  import transformers

  model = transformers.Qwen2ForCausalLM.from_pretrained(HERE / name).eval()
  with torch.no_grad():
    for key, parameter in model.named_parameters():
      if key.endswith('_proj.weight'):
        parameter.mul_(SCALE)
  return model


def read(name: str, limit: int) -> list[list[np.ndarray]]:
  """The stored parts of each row."""
  with np.load(HERE / f'dialogues_{name}_{limit}.npz') as stored:
    tokens_N, rows_N, parts_N = (
      stored[key] for key in ('tokens_N', 'rows_N', 'parts_N')
    )
  rows = []
  for row in range(rows_N.max() + 1):
    last = parts_N[rows_N == row].max()
    rows.append(
      [
        tokens_N[(rows_N == row) & (parts_N == part)]
        for part in range(last + 1)
      ]
    )
  return rows


def main():
  for name in MODELS:
    model = load_model(name)
    for limit in LIMITS:
      rows = [play(model, script, limit) for script in scripts()]
      flat = [
        (token, row, part)
        for row, parts in enumerate(rows)
        for part, ids in enumerate(parts)
        for token in ids
      ]
      tokens_N, rows_N, parts_N = np.array(flat, np.int16).T
      np.savez_compressed(
        HERE / f'dialogues_{name}_{limit}.npz',
        tokens_N=tokens_N,
        rows_N=rows_N,
        parts_N=parts_N,
      )


if __name__ == '__main__':
  main()
