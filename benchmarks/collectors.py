"""The side of `collect` that uses this package: policies and a collector."""

from collections.abc import Callable, Sequence
import math
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import dialogues
from benchmarks import measure
from stppo_jax import types
from stppo_jax.envs import actions
from stppo_jax.models import functional
from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import publish
from stppo_jax.rollout import collect
from stppo_jax.rollout import event_loop
from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import engine_options
from stppo_jax.sampling import sampler
from stppo_jax.sampling import slot_driver
from stppo_jax.sampling import stops
from stppo_jax.sampling import tokenizer as tokenizer_lib

PARITY = 1e-4  # the largest difference of log-probabilities that is accepted
# The most tokens of a turn and of an observation: a quarter of the paper's 500.
MAX_TURN_TOKENS = dialogues.LONGEST
MAX_LENGTH = 980  # more than the longest dialogue: 100 + 4 * 125 + 3 * 125
# The number of filler entries of the vocabulary, and the fields of
# `ModelConfig` after `vocab_size`. tiny is the quickstart's model, but with
# untied embeddings. grouped has the proportions of Qwen2.5-0.5B, with seven
# query heads to a key/value head, at a quarter of its width. wide is a larger
# model.
WIDTHS = {
  'tiny': (44, (64, 176, 3, 2, 2, 32)),
  'grouped': (44, (224, 1216, 3, 7, 1, 32)),
  'wide': (3728, (256, 704, 6, 8, 2, 32)),
}


class Policy(NamedTuple):
  """A tokenizer and a model that counts down, see `dialogues`.

  Attributes:
    tokenizer: the tokenizer.
    model: the model.
    params: the weights of the model.
    filler: the number of filler entries of the vocabulary.
  """

  tokenizer: tokenizer_lib.Tokenizer
  model: functional.Model
  params: functional.Params
  filler: int


def policy(width: str) -> Policy:
  """Returns the policy of a width, one of `WIDTHS`."""
  filler, shape = WIDTHS[width]
  tokenizer = dialogues.tokenizer(filler)
  return Policy(tokenizer, *dialogues.model(tokenizer, shape), filler)


def engine(
  model: functional.Model,
  automaton: stops.StopAutomaton,
  *,
  make_driver: Callable[..., Any] = slot_driver.SlotDriver,
  **options,
) -> engine_lib.Engine:
  """Returns an engine on one device; see `EngineOptions` for its options."""
  mesh = mesh_lib.make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
  return engine_lib.Engine(
    model,
    placement=publish.Placement(mesh, tensor=1),
    automaton=automaton,
    options=engine_options.EngineOptions(
      sampling=sampler.Sampling(temperature=1.0), **options
    ),
    make_driver=make_driver,
  )


class SlotCollector:
  """Collects dialogues with the engine, which has a lane for each core.

  The settings of the engine are not the defaults of configs (`rollout.lanes`,
  ...). If `deterministic` is True, `batch_rows` and `early_exit` have no
  effect. If the number of slots is not a multiple of the number of cores, the
  engine has fewer lanes than cores.
  """

  def __init__(
    self,
    policy: Policy,
    loop: event_loop.EventLoop,
    *,
    slots: int,
    deterministic: bool,
  ):
    automaton = stops.build(
      policy.tokenizer.token_bytes(),
      stop_strings=actions.STOP_STRINGS,
      eos_ids=(policy.tokenizer.eos_id,),
    )
    self._tokenizer = policy.tokenizer
    self._loop = loop
    self._engine = engine(
      policy.model,
      automaton,
      slots=slots,
      max_length=MAX_LENGTH,
      page_size=-(-MAX_LENGTH // 10),
      pages=0,
      prefill_chunk=64,
      decode_chunk=24,
      early_exit=0.5,
      lookahead=0,
      lanes=math.gcd(len(os.sched_getaffinity(0)), slots),
      batch_rows=16,
      deterministic=deterministic,
    )
    self._engine.publish(policy.params, 0)

  def collect(self, environment: dialogues.Scripted) -> list[types.Trajectory]:
    """Returns the trajectories of all dialogues of the environment.

    Raises:
      ValueError: if the policy wrote another text than the script.
    """
    questions = environment.questions()
    return collect.Collector(
      engine=self._engine,
      environment=environment,
      tokenizer=self._tokenizer,
      loop=self._loop,
      max_turn_tokens=MAX_TURN_TOKENS,
      max_observation_tokens=MAX_TURN_TOKENS,
    ).collect(
      questions,
      jax.random.split(jax.random.key(0), len(questions)),
      greedy=True,
    )


def case(collector, environment: dialogues.Scripted) -> measure.Case:
  """Returns a case that times one collection."""
  return measure.single(lambda: collector.collect(environment))


def assert_parity(
  trajectories: Sequence[types.Trajectory],
  others: Sequence[types.Trajectory],
) -> None:
  """Checks that two collections have equal trajectories.

  Tokens must be equal, and log-probabilities must differ by at most PARITY.

  Raises:
    AssertionError: if trajectories differ; the message names the row.
  """
  for n, (one, other) in enumerate(zip(trajectories, others, strict=True)):
    for ours, theirs in zip(one.turns, other.turns, strict=True):
      np.testing.assert_array_equal(
        ours.token_ids, theirs.token_ids, f'tokens of row {n}'
      )
      np.testing.assert_allclose(
        ours.sampler_logprobs,
        theirs.sampler_logprobs,
        atol=PARITY,
        err_msg=f'log-probabilities of row {n}',
      )
