"""The pieces of `accelerator` that measure the engine, and a whole step."""

import asyncio
from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
import numpy as np

from benchmarks import accelerator_learner as learner_pieces
from benchmarks import collectors
from benchmarks import learners
from benchmarks import schedule
from benchmarks import waste
from stppo_jax import types
from stppo_jax.envs import protocol
from stppo_jax.models import flops
from stppo_jax.models import functional
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.rollout import pack
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import stops
from stppo_jax.sampling import tokenizer as tokenizer_lib

_MEAN_TURN = 170  # tokens of a turn in `step`


def _engine(
  model: functional.Model, automaton: stops.StopAutomaton, **options
) -> engine_lib.Engine:
  return collectors.engine(
    model,
    automaton,
    pages=0,
    prefill_chunk=256,
    early_exit=0.25,
    lookahead=1,
    lanes=1,
    batch_rows=0,
    **options,
  )


def _collect(
  engine: engine_lib.Engine, prompts_AL: np.ndarray, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
  """Samples a turn of `num_tokens` tokens after each prompt.

  Returns:
    The tokens of the turns and their log-probabilities, [A, num_tokens].
  """
  rows = len(prompts_AL)
  engine.begin(
    list(prompts_AL),
    jax.random.split(jax.random.key(0), rows),
    group_size=1,
    max_turn_tokens=num_tokens,
    greedy=False,
  )
  turns = {}
  while len(turns) < rows:
    for row, turn in engine.poll().items():
      turns[row] = turn
      engine.close(row)
  ordered = [turns[row] for row in range(rows)]
  return (
    np.stack([turn.token_ids for turn in ordered]),
    np.stack([turn.logprobs for turn in ordered]),
  )


def _mismatch(
  model: functional.Model,
  params: functional.Params,
  prompts_AL: np.ndarray,
  turns: tuple[np.ndarray, np.ndarray],
) -> tuple[float, float]:
  """Returns how much the log-probabilities of engine and trainer differ.

  Returns the mean and the 99th percentile of the absolute differences.

  Args:
    model, params: the policy.
    prompts_AL: the prompts.
    turns: the result of `_collect` for these prompts.

  Raises:
    AssertionError: if the mean is not less than `learner_pieces.MISMATCH`.
  """
  token_ids, sampled = turns
  trained_AL, _ = jax.jit(
    functools.partial(model.logprobs_and_entropy, temperature=1.0)
  )(params, np.concatenate([prompts_AL, token_ids], axis=1))
  trained = np.asarray(trained_AL)[:, prompts_AL.shape[1] :]
  differences = np.abs(trained - sampled)
  mean = float(differences.mean())
  if not mean < learner_pieces.MISMATCH:
    raise AssertionError(f'engine and trainer differ by {mean:.4f} on average')
  return mean, float(np.quantile(differences, 0.99))


def parts_of(
  measure: Callable[[], Sequence[float]], share: float
) -> tuple[float, float]:
  """Returns the seconds of decoding, and the seconds of the prompts.

  Only the tokens that long turns have in addition to the tokens of short turns
  count as decoding.

  Args:
    measure: a function that returns two times: the seconds of prompts with
      short turns, and the seconds of prompts with long turns. If a result would
      not be positive, as on a busy machine, the function is called again.
    share: the number of tokens of short turns, divided by the number of tokens
      that long turns have in addition.

  Raises:
    RuntimeError: if a result is not positive in three attempts.
  """
  for _ in range(3):
    short, long = measure()
    decoding = long - short
    extending = short - decoding * share
    if min(decoding, extending) > 0:
      return decoding, extending
  raise RuntimeError(
    f'prompts took {short:.3g} s with short turns and {long:.3g} s with long '
    'ones: other work on this machine disturbs the times'
  )


def decode(
  options: learner_pieces.Options, *, size: str, rows: int
) -> list[learner_pieces.Line]:
  """Times the decoding of turns after a prompt, and the prefill of the prompt.

  First, the engine's log-probabilities are compared with the trainer's. Then
  short turns and long turns are timed, both with their prompts. The difference
  of the two times is the time of decoding, without prompts. The time of the
  prompts follows from it, see `parts_of`.
  """
  shape = learner_pieces.shape_of(size)
  model = functional.Model(shape, 'vocabulary', chunk=4096)
  params = jax.jit(model.init)(jax.random.key(0))
  short, long = 2 * options.decode_chunk, 10 * options.decode_chunk
  # The first entries are single bytes, so that the stop string can be spelt.
  pieces = [bytes([n]) for n in range(256)]
  pieces += [f' {n}'.encode() for n in range(256, shape.vocab_size)]
  engine = _engine(
    model,
    stops.build(pieces, stop_strings=('</search>',), eos_ids=()),
    slots=rows,
    max_length=options.prompt + long,
    page_size=0,
    decode_chunk=options.decode_chunk,
    deterministic=True,
  )
  engine.publish(params, 0)
  prompts_AL = np.random.default_rng(0).integers(
    0, shape.vocab_size, (rows, options.prompt), np.int32
  )
  run = functools.partial(_collect, engine, prompts_AL)
  few = slice(0, 8)  # the trainer has no memory for activations of more rows
  token_ids, sampled = run(short)
  mean, most = _mismatch(
    model, params, prompts_AL[few], (token_ids[few], sampled[few])
  )
  decoded = long - short
  decoding, extending = parts_of(
    lambda: [
      learner_pieces.seconds_of(functools.partial(run, n), 3)
      for n in (short, long)
    ],
    short / decoded,
  )
  weights = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  middle = options.prompt + (long + short) / 2
  kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * middle
  extended, _ = flops.forward_operations(shape, [options.prompt] * rows, rows)
  return [
    learner_pieces.Line(
      f'decode, {rows} rows after {options.prompt} tokens, '
      f'mismatch {mean:.3f}, at 99 % {most:.3f}',
      decoding,
      rows * decoded,
      bytes=2.0 * decoded * (weights + rows * kv),  # two bytes per number
    ),
    learner_pieces.Line(
      f'extend, {rows} rows of {options.prompt} tokens',
      extending,
      rows * options.prompt,
      extended,
    ),
  ]


class Dialogues(protocol.Environment):
  """An environment that ignores what the policy writes.

  A dialogue has 2 to 5 turns, whose lengths are random, and observations of
  about 420 tokens, each of which comes after 250 ms; see `schedule`.

  Args:
    scale: the factor by which the lengths of prompts and observations are
      multiplied.
  """

  tags = ()
  max_turns = 4

  def __init__(self, scale: float):
    self._scale = scale

  def _words(self, count: float) -> str:
    return ' w1' * max(int(count * self._scale), 1)

  def prompt(self, question: types.Question) -> str:
    """Returns a text of about 100 tokens, times `scale`."""
    return self._words(schedule.PROMPT)

  async def step(
    self, question: types.Question, turn_index: int, text: str
  ) -> protocol.Step:
    """Returns an observation, or the end of the dialogue."""
    del text
    rng = np.random.default_rng((int(question.id), turn_index))
    if turn_index > int(question.id) % 4:
      return protocol.Step('answer', None, types.TrajectoryStatus.COMPLETED)
    await asyncio.sleep(schedule.SEARCH_SECONDS)
    body = self._words(rng.normal(schedule.OBSERVATION, 60))
    return protocol.Step('search', protocol.Observation('', body, ''), None)

  def rewards(self, question, prompt, texts, status):
    """Returns a reward of 0 or 1 that depends only on the question's id."""
    del prompt, texts, status
    return {'chance': float(int(question.id) % 2)}, {}


def step(
  options: learner_pieces.Options, *, size: str
) -> list[learner_pieces.Line]:
  """Times the parts of a step: collection, annotate and update.

  The weights do not change during the collection.
  """
  scale, count = options.length / waste.LONGEST, options.dialogues
  environment = Dialogues(scale)
  learner = learner_pieces.build_learner(
    size, options, rows=count, minibatch=count // 2, attend='auto'
  )
  shape = learner.policy.config
  others = 98  # entries that are no words: characters and two special tokens
  tokenizer = tokenizer_lib.phrase_tokenizer(
    f' w{n}' for n in range(shape.vocab_size - others)
  )
  entries = tokenizer.token_bytes()
  # Random weights give all tokens about the same probability. One token in
  # `every` ends a turn, so a turn has `every` tokens on average.
  every = max(int(_MEAN_TURN * scale), 2)
  engine = _engine(
    learner.decoded,
    stops.build(
      entries,
      stop_strings=('</search>',),
      eos_ids=range(0, len(entries), every),
    ),
    slots=options.slots,
    max_length=options.length,
    page_size=options.length // 4,  # few page counts: each compiles a program
    decode_chunk=options.decode_chunk,
    deterministic=False,
  )
  box: list[Any] = [learner.start()]  # the state, which updates donate
  reference = learner.reference()
  keys = jax.random.split(jax.random.key(0), count)
  questions = [types.Question(str(n), '', (), 'random') for n in range(count)]
  kept: dict[str, Any] = {}
  with event_loop.EventLoop() as loop:
    collector = collect.Collector(
      engine=engine,
      environment=environment,
      tokenizer=tokenizer,
      loop=loop,
      max_turn_tokens=max(int(schedule.MAX_TURN * scale), 1),
      max_observation_tokens=options.length,
    )

    def collected():
      engine.publish(box[0].policy.params, 0)
      kept['dialogues'] = collector.collect(questions, keys)

    seconds = [learner_pieces.seconds_of(collected, 1)]
  engine.release()

  def annotated():
    packed = pack.pack(kept['dialogues'], length_bucket=options.length)
    kept['packed'] = packed
    batch, _ = learner.annotate(box[0], packed, reference=reference)
    kept['batch'] = jax.block_until_ready(batch)

  def updated():
    box[0], _ = learners.update_epochs(learner, box[0], kept['batch'], 0)
    jax.block_until_ready(box[0])

  seconds += [
    learner_pieces.seconds_of(annotated, 1),
    learner_pieces.seconds_of(updated, 1),
  ]
  lengths_B = kept['packed'].lengths_B
  losses = int(kept['packed'].loss_mask_BL.sum())
  tokens = int(lengths_B.sum())
  counts = learner_pieces.passes(shape, lengths_B, losses)
  name = f'step of {count} dialogues'
  return [
    learner_pieces.Line(f'{name}: collect', seconds[0], losses),
    learner_pieces.Line(f'{name}: annotate', seconds[1], tokens, counts[0]),
    learner_pieces.Line(f'{name}: update', seconds[2], tokens, counts[1]),
    learner_pieces.Line(name, sum(seconds), tokens),
  ]
