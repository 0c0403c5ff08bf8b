"""Dialogues of known length, and a policy that is made to write them.

A benchmark of collecting needs turns of chosen lengths from a model that takes
as long as any model of its shape. So the vocabulary has entries that count
down: after ' s9' the policy writes ' s8', ' s7', ..., ' s1', '</search>'; after
' r9' it counts down to '</answer>' and the end of sequence. Each input of a
dialogue (the prompt, an observation) ends with such an entry, which decides how
long the next turn is and which tag closes it. All other entries are filler.

The weights are random except for the output matrix. In this matrix, the row of
an entry is the scaled embedding of the entry that comes before it in the
countdown. These weights take as much computation as any other weights. The
logit of the greedy token is the largest by a wide margin, while its
log-probability depends on the whole dialogue. Collections are compared by both,
the token and its log-probability.
"""

import asyncio
from collections.abc import Callable, Sequence
import dataclasses

import jax
import numpy as np

from stppo_jax import types
from stppo_jax.envs import prompts
from stppo_jax.envs import protocol
from stppo_jax.models import config as model_config
from stppo_jax.models import functional
from stppo_jax.sampling import tokenizer as tokenizer_lib

LONGEST = 125  # tokens of the longest turn
_SEARCH, _ANSWER = '</search>', '</answer>'
_EMBEDDING_SCALE = 0.5
# The initial kernels are multiplied by this number and divided by the root of
# the width. So earlier tokens change log-probabilities about equally at any
# width.
_KERNEL_SCALE = 24.0
_PEAK = 10.0  # the logit of the next token, roughly

Lengths = Callable[[np.random.Generator], int]


@dataclasses.dataclass(frozen=True)
class Script:
  """A dialogue whose texts are known before it is collected.

  Attributes:
    inputs: the prompt, then the observations.
    turns: the text that the policy writes after each input.
    latencies: the seconds until each observation.
  """

  inputs: Sequence[str]
  turns: Sequence[str]
  latencies: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Shape:
  """The sizes of dialogues in tokens.

  Attributes:
    prompt, turn, observation: functions that draw the length of a prompt, a
      turn and an observation.
    max_searches: the largest number of searches of a dialogue. Each number from
      1 to `max_searches` is equally likely.
  """

  prompt: Lengths
  turn: Lengths
  observation: Lengths
  max_searches: int


def between(low: int, high: int) -> Lengths:
  """Returns a function that draws uniform lengths, both ends included."""
  return lambda rng: int(rng.integers(low, high + 1))


def log_normal(median: float, sigma: float) -> Lengths:
  """Returns a function that draws log-normal lengths, in 1..LONGEST."""
  return lambda rng: int(
    np.clip(round(rng.lognormal(np.log(median), sigma)), 1, LONGEST)
  )


def tokenizer(filler: int) -> tokenizer_lib.Tokenizer:
  """Returns a tokenizer of counting and filler entries, tags and letters."""
  counts = [f' {kind}{n}' for kind in 'sr' for n in range(1, LONGEST + 1)]
  return tokenizer_lib.phrase_tokenizer(
    prompts.phrases([*counts, *(f' w{n}' for n in range(filler))])
  )


def model(
  tokenizer: tokenizer_lib.Tokenizer, shape: Sequence[int]
) -> tuple[functional.Model, functional.Params]:
  """Returns a policy that counts down.

  Args:
    tokenizer: the tokenizer with the policy's vocabulary.
    shape: the values of the first fields of `ModelConfig` after `vocab_size`.
  """
  config = model_config.ModelConfig(
    tokenizer.vocab_size,
    *shape,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    qkv_bias=True,
    tie_embeddings=False,
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
  for before, after in _successors(tokenizer):
    output_VD[after] = embedding_VD[before] * _PEAK / (D * _EMBEDDING_SCALE)
  params['embedding'] = embedding_VD.astype(np.float32)
  params['lm_head'] = output_VD.astype(np.float32)
  return policy, params


def _successors(tokenizer: tokenizer_lib.Tokenizer) -> list[tuple[int, int]]:
  """Returns pairs: a token's id, and the id of the token that comes next."""

  def chain(kind, end):
    return [
      token_id(tokenizer, f' {kind}{n}') for n in range(LONGEST, 0, -1)
    ] + [token_id(tokenizer, end)]

  search, answer = chain('s', _SEARCH), chain('r', _ANSWER)
  # If generation is not stopped after a search, the policy writes another
  # search.
  ends = [(search[-1], search[0]), (answer[-1], tokenizer.eos_id)]
  return [*zip(search, search[1:]), *zip(answer, answer[1:]), *ends]


def token_id(tokenizer: tokenizer_lib.Tokenizer, text: str) -> int:
  """Returns the id of a text that is one token.

  Raises:
    ValueError: if the text is several tokens.
  """
  (single,) = tokenizer.encode_prompt(text)
  return int(single)


def closing_ids(tokenizer: tokenizer_lib.Tokenizer) -> list[int]:
  """Returns the ids of the tokens that end a turn."""
  return [
    token_id(tokenizer, _SEARCH),
    token_id(tokenizer, _ANSWER),
    tokenizer.eos_id,
  ]


def scripts(
  count: int,
  shape: Shape,
  *,
  filler: int,
  latency: Callable[[np.random.Generator], float] = lambda rng: 0.0,
  seed: int = 0,
) -> list[Script]:
  """Returns random dialogues; the latency does not change their texts.

  Args:
    count: the number of dialogues.
    shape: the sizes of the dialogues.
    filler: the number of filler entries of the vocabulary.
    latency: a function that draws the seconds until an observation.
    seed: the seed of all draws.
  """
  rng = np.random.default_rng(seed)
  wait_rng = np.random.default_rng(seed + 1)

  def input_of(length, kind, turn):
    entries = [f' w{n}' for n in rng.integers(0, filler, length - 1)]
    return ''.join([*entries, f' {kind}{turn}'])

  def turn_of(kind, turn, end):
    return ''.join([*(f' {kind}{n}' for n in range(turn - 1, 0, -1)), end])

  dialogues = []
  for _ in range(count):
    searches = int(rng.integers(1, shape.max_searches + 1))
    turns = [shape.turn(rng) for _ in range(searches + 1)]
    sizes = [shape.prompt(rng)]
    sizes += [shape.observation(rng) for _ in range(searches)]
    kinds = [*'s' * searches, 'r']
    ends = [_SEARCH] * searches + [_ANSWER]
    dialogues.append(
      Script(
        [input_of(*x) for x in zip(sizes, kinds, turns)],
        [turn_of(*x) for x in zip(kinds, turns, ends)],
        [latency(wait_rng) for _ in range(searches)],
      )
    )
  return dialogues


class Scripted(protocol.Environment):
  """An environment that follows scripts; question n is script n.

  A turn that is not in the script raises a ValueError, so that every timed
  collection checks its own texts.
  """

  tags = ()

  def __init__(self, dialogues: Sequence[Script]):
    self._dialogues = dialogues
    self.max_turns = max(len(d.turns) for d in dialogues) - 1

  def questions(self) -> list[types.Question]:
    """Returns a question for each script."""
    return [
      types.Question(str(n), '', (), 'scripted')
      for n in range(len(self._dialogues))
    ]

  def prompt(self, question: types.Question) -> str:
    """Returns the first input of a dialogue."""
    return self._dialogues[int(question.id)].inputs[0]

  async def step(
    self, question: types.Question, turn_index: int, text: str
  ) -> protocol.Step:
    """Returns the next observation, after its latency.

    Raises:
      ValueError: if the script has another text in this turn.
    """
    script = self._dialogues[int(question.id)]
    if text != script.turns[turn_index]:
      raise ValueError(f'{text!r} is not {script.turns[turn_index]!r}')
    if turn_index == len(script.turns) - 1:
      return protocol.Step('answer', None, types.TrajectoryStatus.COMPLETED)
    if script.latencies[turn_index]:
      await asyncio.sleep(script.latencies[turn_index])
    body = script.inputs[turn_index + 1]
    return protocol.Step('search', protocol.Observation('', body, ''), None)

  def rewards(self, question, prompt, texts, status):
    """Returns no rewards and no scores."""
    del question, prompt, texts, status
    return {}, {}
