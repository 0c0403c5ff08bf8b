"""Dialogues of known length, and a policy that is made to write them.

A benchmark of collecting needs turns of chosen lengths from a model that costs
what any model of its shape costs. So the vocabulary has words that count:
after ' s9' the policy writes ' s8', ' s7', ..., ' s1', '</search>'; after ' r9'
the same towards '</answer>' and the end of sequence. What is told to a row ends
with such a word: it decides how long the next turn is, and what closes it. All
other words are filler.

The weights are random but for the output matrix, whose row of a word is the
embedding of the word before it. Nothing is computed less than for weights of
any other value. The chosen token is certain by a wide margin, its
log-probability depends on all that was said: parity is asserted on both.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.sampling import tokenizer as tokenizer_lib

LONGEST = 125  # words of a turn that can be asked for
_SEARCH, _ANSWER = '</search>', '</answer>'
_EMBEDDING_SCALE = 0.5
# Of the usual start, times the root of the width: what was said weighs in as
# much at any width.
_KERNEL_SCALE = 24.0
_PEAK = 10.0  # the logit of the word that comes next, roughly

Lengths = Callable[[np.random.Generator], int]


@dataclasses.dataclass(frozen=True)
class Script:
  """A dialogue: what is told (the prompt first), and what is written then."""

  told: Sequence[str]
  written: Sequence[str]
  latencies: Sequence[float]  # seconds until each observation


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of dialogues in tokens.

  Attributes:
    prompt, turn, observation: draw a length.
    max_searches: each row has 1 to so many, all equally likely.
  """

  prompt: Lengths
  turn: Lengths
  observation: Lengths
  max_searches: int


def between(low: int, high: int) -> Lengths:
  """Uniform, ends included."""
  return lambda rng: int(rng.integers(low, high + 1))


def log_normal(median: float, sigma: float) -> Lengths:
  """Rounded, at least 1 and at most LONGEST."""
  return lambda rng: int(
    np.clip(round(rng.lognormal(np.log(median), sigma)), 1, LONGEST)
  )


def tokenizer(filler: int) -> tokenizer_lib.Tokenizer:
  """Counting words, so many filler words, and the usual tags and letters."""
  counts = [f' {kind}{n}' for kind in 'sr' for n in range(1, LONGEST + 1)]
  return tokenizer_lib.phrase_tokenizer(
    prompts.phrases([*counts, *(f' w{n}' for n in range(filler))])
  )


def model(
  words: tokenizer_lib.Tokenizer, **shape: int
) -> tuple[functional.Model, functional.Params]:
  """A policy that counts; `shape` is of `ModelConfig`."""
  config = model_config.ModelConfig(
    vocab_size=words.vocab_size,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=False,
    **shape,
  )
  policy = functional.Model(config, 'vocabulary')
  scale = _KERNEL_SCALE / float(np.sqrt(config.hidden_size))
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: x * scale if path[-1].key == 'kernel' else x,
    dict(jax.jit(policy.init)(jax.random.key(0))),
  )
  rng = np.random.default_rng(0)
  V, D = config.vocab_size, config.hidden_size
  embedding_VD = rng.normal(size=(V, D)) * _EMBEDDING_SCALE
  output_VD = rng.normal(size=(V, D)) / np.sqrt(D)
  for before, after in _successors(words):
    output_VD[after] = embedding_VD[before] * _PEAK / (D * _EMBEDDING_SCALE)
  params['embedding'] = embedding_VD.astype(np.float32)
  params['lm_head'] = output_VD.astype(np.float32)
  return policy, params


def _successors(words: tokenizer_lib.Tokenizer) -> list[tuple[int, int]]:
  """Pairs of ids: a word and the one that the policy writes after it."""

  def chain(kind, end):
    return [token_id(words, f' {kind}{n}') for n in range(LONGEST, 0, -1)] + [
      token_id(words, end)
    ]

  search, answer = chain('s', _SEARCH), chain('r', _ANSWER)
  # Whoever does not stop after a search goes on with another one.
  ends = [(search[-1], search[0]), (answer[-1], words.eos_id)]
  return [*zip(search, search[1:]), *zip(answer, answer[1:]), *ends]


def token_id(words: tokenizer_lib.Tokenizer, word: str) -> int:
  """The id of a word.

  Raises:
    ValueError: it is several tokens.
  """
  (single,) = words.encode_prompt(word)
  return int(single)


def closing_ids(words: tokenizer_lib.Tokenizer) -> list[int]:
  """Ids of the tokens that end a turn."""
  return [token_id(words, _SEARCH), token_id(words, _ANSWER), words.eos_id]


def scripts(
  count: int,
  shape: Shape,
  *,
  filler: int,
  latency: Callable[[np.random.Generator], float] = lambda rng: 0.0,
  seed: int = 0,
) -> list[Script]:
  """Random dialogues; the same ones whatever the latency.

  Args:
    count: of dialogues.
    shape: their sizes.
    filler: how many filler words there are.
    latency: draws seconds until an answer.
    seed: of all draws.
  """
  rng = np.random.default_rng(seed)
  wait_rng = np.random.default_rng(seed + 1)

  def told(length, kind, turn):
    words = [f' w{n}' for n in rng.integers(0, filler, length - 1)]
    return ''.join([*words, f' {kind}{turn}'])

  def written(kind, turn, end):
    return ''.join([*(f' {kind}{n}' for n in range(turn - 1, 0, -1)), end])

  made = []
  for _ in range(count):
    searches = int(rng.integers(1, shape.max_searches + 1))
    turns = [shape.turn(rng) for _ in range(searches + 1)]
    sizes = [shape.prompt(rng)]
    sizes += [shape.observation(rng) for _ in range(searches)]
    kinds = [*'s' * searches, 'r']
    ends = [_SEARCH] * searches + [_ANSWER]
    made.append(
      Script(
        [told(*x) for x in zip(sizes, kinds, turns)],
        [written(*x) for x in zip(kinds, turns, ends)],
        [latency(wait_rng) for _ in range(searches)],
      )
    )
  return made


class Scripted:
  """The environment of scripts; question n is script n.

  A text that does not stand in the script is a ValueError: each collection
  that is timed checks what was written in it.
  """

  def __init__(self, dialogues: Sequence[Script]):
    self._dialogues = dialogues
    self.max_turns = max(len(d.written) for d in dialogues) - 1

  def questions(self) -> list[types.Question]:
    """One for each script."""
    return [
      types.Question(str(n), '', (), 'scripted')
      for n in range(len(self._dialogues))
    ]

  def prompt(self, question: types.Question) -> str:
    """What the row is told first."""
    return self._dialogues[int(question.id)].told[0]

  async def step(
    self, question: types.Question, turn_index: int, text: str
  ) -> protocol.Step:
    """The next observation, after its latency.

    Raises:
      ValueError: another text than that of the script.
    """
    script = self._dialogues[int(question.id)]
    if text != script.written[turn_index]:
      raise ValueError(f'{text!r} is not {script.written[turn_index]!r}')
    if turn_index == len(script.written) - 1:
      return protocol.Step('answer', None, types.TrajectoryStatus.COMPLETED)
    if script.latencies[turn_index]:
      await asyncio.sleep(script.latencies[turn_index])
    body = script.told[turn_index + 1]
    return protocol.Step('search', protocol.Observation('', body, ''), None)

  def rewards(self, question, prompt, texts, status):
    """None."""
    del question, prompt, texts, status
    return {}, {}
