"""Steps that share an engine have the dialogues that each has alone."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time

import numpy as np
import pytest

from stppo_jax.rollout import event_loop
from stppo_jax.rollout import shared_engine
from tests.models import tiny
from tests.rollout import dialogues
from tests.rollout import sampled_test
from tests.sampling import tiny_engine

_STEPS, _SECONDS = 3, 60.0
_OPTIONS = sampled_test.OPTIONS | {'group_size': 2}


class _Slow(sampled_test.TwoAnswers):
  """An environment that answers each turn after a random time."""

  def __init__(self, seed):
    super().__init__({})
    self._rng = np.random.default_rng(seed)

  async def step(self, question, turn_index, text):
    await asyncio.sleep(self._rng.exponential(0.005))
    return await super().step(question, turn_index, text)


def _engine():
  """Returns an engine whose bits do not depend on who shares it."""
  return tiny_engine.engine(turn_swaps='keep')


def _step(step):
  """Returns the questions and the keys of a step."""
  texts = [f'{"why " * (n % 3)}{step}{n}?' for n in range(4)]
  questions = [dialogues.question(text, text) for text in texts]
  return questions, tiny_engine.keys(8, seed=step)


class _Record(dict):
  """A record of versions in memory, see `turn_versions.TurnVersions`."""

  write, read = dict.__setitem__, dict.get


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
def _collections(engine, environment, recorded=None, repeated=None):
  """Yields a function that collects a step, on a thread of the step."""
  recorded = _Record() if recorded is None else recorded
  shared = shared_engine.SharedEngine(engine, recorded, repeated)
  with event_loop.EventLoop() as loop:
    collector = dialogues.make_collector(shared, environment, loop, **_OPTIONS)

    def collect(step):
      with shared.collecting(step):
        return collector.collect(*_step(step))

    with concurrent.futures.ThreadPoolExecutor(_STEPS) as threads:

      def begin(step):
        future = threads.submit(collect, step)
        while not shared.has_entered(step):
          time.sleep(0.001)
        return future

      yield begin, shared


def test_steps_that_share_an_engine_are_those_of_steps_that_do_not():
  alone = []
  environment = sampled_test.TwoAnswers({})
  with dialogues.collector(_engine(), environment, **_OPTIONS) as collector:
    for step in range(_STEPS):
      alone.append(collector.collect(*_step(step)))
  for seed in range(2):
    engine = _Counting(_engine())
    with _collections(engine, _Slow(seed)) as (begin, _):
      together = [begin(step) for step in range(_STEPS)]
      together = [future.result(timeout=_SECONDS) for future in together]
    assert engine.begun + engine.added == _STEPS and engine.added
    for ours, theirs in zip(together, alone, strict=True):
      sampled_test.assert_equal(ours, theirs)


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
  with _collections(_engine(), environment) as (begin, _):
    first, *others = [begin(step) for step in range(_STEPS)]
    for future in others:
      assert len(future.result(timeout=_SECONDS)) == 8
    assert not first.done()
    environment.may_answer.set()
    assert len(first.result(timeout=_SECONDS)) == 8


def _swapped(seed, repeated=None):
  """Returns steps during which weights change, and the record of versions."""
  engine, _ = tiny_engine.new_engine(turn_swaps='recompute')
  version, record = 0, _Record()
  slow = _Slow(seed)
  with _collections(engine, slow, record, repeated) as (begin, shared):
    steps = [begin(step) for step in range(_STEPS)]
    until = time.monotonic() + _SECONDS
    while not all(step.done() for step in steps):
      assert time.monotonic() < until
      time.sleep(0.01)
      if shared.may_publish(version + 1, range(_STEPS)):
        version += 1
        weights = engine.transferred(
          tiny.params(tiny_engine.MODEL, version % 5)
        )
        engine.swap_weights(weights, version)
    return [step.result() for step in steps], record


def test_a_record_of_versions_repeats_all_bits():
  expected, record = _swapped(0)
  turns = [turn for step in expected for t in step for turn in t.turns]
  rows = [row for step in range(_STEPS) for row in record[step][0]]
  versions = [version for row in rows for version in row]
  assert versions == [turn.version for turn in turns]
  assert len(set(versions)) > 3
  steps, again = _swapped(1, record)
  assert again == record
  for ours, theirs in zip(steps, expected, strict=True):
    sampled_test.assert_equal(ours, theirs)


class _Gone(LookupError):
  exit_code = 75  # ends the run, where other errors end a dialogue


class _Broken(sampled_test.TwoAnswers):
  async def step(self, question, turn_index, text):
    if question.id.endswith('10?'):
      raise _Gone
    return await super().step(question, turn_index, text)


def test_an_error_of_one_step_leaves_its_slots_to_the_others():
  with _collections(_engine(), _Broken({})) as (begin, _):
    first, broken, last = [begin(step) for step in range(_STEPS)]
    with pytest.raises(_Gone):
      broken.result(timeout=_SECONDS)
    for future in (first, last):
      assert len(future.result(timeout=_SECONDS)) == 8
