"""Steps that share an engine have the dialogues that each has alone."""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading

import jax
import pytest

from stppo_jax.rollout import event_loop
from stppo_jax.rollout import shared_engine
from tests.rollout import dialogues
from tests.rollout import sampled_test
from tests.sampling import vocabularies

_STEPS, _SECONDS = 3, 60.0
_OPTIONS = {
  'tokenizer': vocabularies.phrases(),
  'max_turn_tokens': 6,
  'max_observation_tokens': 9,
  'group_size': 2,
}


@functools.cache
def _engine():
  """Returns an engine whose bits do not depend on who shares it."""
  return sampled_test.new_engine(deterministic=True, turn_swaps='keep')


def _step(step):
  """Returns the questions and the keys of a step."""
  texts = [f'{"why " * (n % 3)}{step}{n}?' for n in range(4)]
  questions = [dialogues.question(text, text) for text in texts]
  return questions, jax.random.split(jax.random.key(step), 8)


class _Counting:
  """An engine that counts its collections and the rows added to them."""

  def __init__(self, engine):
    self._engine = engine
    self.begun = self.added = 0

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def begin(self, *args, **options):
    self.begun += 1
    self._engine.begin(*args, **options)

  def add(self, *args):
    self.added += 1
    return self._engine.add(*args)


@contextlib.contextmanager
def _collections(engine, environment):
  """Yields a function that collects a step, on a thread of the step."""
  shared = shared_engine.SharedEngine(engine)
  with event_loop.EventLoop() as loop:
    collector = dialogues.make_collector(shared, environment, loop, **_OPTIONS)

    def collect(step):
      with shared.collecting():
        return collector.collect(*_step(step))

    with concurrent.futures.ThreadPoolExecutor(_STEPS) as threads:
      yield lambda step: threads.submit(collect, step)


def test_steps_that_share_an_engine_are_those_of_steps_that_do_not():
  alone = []
  environment = sampled_test.TwoAnswers({})
  with dialogues.collector(_engine(), environment, **_OPTIONS) as collector:
    for step in range(_STEPS):
      alone.append(collector.collect(*_step(step)))
  for seed in range(2):
    engine = _Counting(_engine())
    with _collections(engine, sampled_test.Slow(seed)) as begin:
      together = [begin(step) for step in range(_STEPS)]
      together = [future.result(timeout=_SECONDS) for future in together]
    assert engine.begun + engine.added == _STEPS and engine.added
    for ours, theirs in zip(together, alone, strict=True):
      sampled_test.assert_equal(ours, theirs, exact=True)


class _Waiting(sampled_test.TwoAnswers):
  """An environment that does not answer one question until it may."""

  def __init__(self):
    super().__init__({})
    self.may_answer = threading.Event()

  async def step(self, question, turn_index, text):
    while question.id == '00?' and not self.may_answer.is_set():
      await asyncio.sleep(0.001)
    return await super().step(question, turn_index, text)


def test_no_step_waits_for_the_last_dialogue_of_another():
  environment = _Waiting()
  with _collections(_engine(), environment) as begin:
    first, *others = [begin(step) for step in range(_STEPS)]
    for future in others:
      assert len(future.result(timeout=_SECONDS)) == 8
    assert not first.done()
    environment.may_answer.set()
    assert len(first.result(timeout=_SECONDS)) == 8


class _Gone(LookupError):
  exit_code = 75  # ends the run, where other errors end a dialogue


class _Broken(sampled_test.TwoAnswers):
  async def step(self, question, turn_index, text):
    if question.id.endswith('10?'):
      raise _Gone
    return await super().step(question, turn_index, text)


def test_an_error_of_one_step_leaves_its_slots_to_the_others():
  with _collections(_engine(), _Broken({})) as begin:
    first, broken, last = [begin(step) for step in range(_STEPS)]
    with pytest.raises(_Gone):
      broken.result(timeout=_SECONDS)
    for future in (first, last):
      assert len(future.result(timeout=_SECONDS)) == 8
