"""Rows of a collection wait only for their own answers.

Errors and interrupts end a collection and leave nothing behind.
"""

import asyncio
import threading
import time

import pytest

from stppo_jax import types
from stppo_jax.rollout import event_loop
from stppo_jax.rollout import pack
from stppo_jax.sampling import scripted
from tests.rollout import dialogues

_STATUS = types.TrajectoryStatus
_DONE = dialogues.end(_STATUS.COMPLETED)
_TIMEOUT = 20.0  # seconds after which a test that hangs fails


class _Slow(dialogues.TableEnvironment):
  """An environment that answers turns that say 's' only when it may.

  Attributes:
    events: what happened, in order.
    may_answer: an event; the answers to 's' wait for it.
  """

  def __init__(self, steps):
    super().__init__(steps)
    self.events = []
    self.may_answer = threading.Event()

  async def step(self, question, turn_index, text):
    self.events.append(f'{question.id} steps {text}')
    if text == 's':
      try:
        deadline = time.monotonic() + _TIMEOUT
        while not self.may_answer.is_set():
          assert time.monotonic() < deadline
          await asyncio.sleep(0.001)
      finally:
        self.events.append(f'{question.id} answers or is cancelled')
    step = await super().step(question, turn_index, text)
    if step.status:
      self.events.append(f'{question.id} ends')
    if question.id == 'last' and step.status:
      self.may_answer.set()
    return step


_ON = dialogues.observe('.')


def test_rows_do_not_wait_for_the_slow_answer_to_another():
  # It only comes when the last row has ended.
  environment = _Slow({'s': _ON, 'a': _ON, 'b': _ON, 'c': _DONE})
  questions = [dialogues.question('Q', n) for n in ('slow', 'other', 'last')]
  trajectories = dialogues.collect_scripts(
    [['s', 'c'], ['a', 'c'], ['a', 'b', 'a', 'c']], environment, questions
  )
  assert [len(t.turns) for t in trajectories] == [2, 2, 4]
  assert {t.status for t in trajectories} == {_STATUS.COMPLETED}
  events = environment.events
  answered = events.index('slow answers or is cancelled')
  assert events.index('other ends') < events.index('last ends') < answered
  assert events[answered:] == [
    'slow answers or is cancelled',
    'slow steps c',
    'slow ends',
  ]


def test_turns_that_end_together_start_together():
  # So their queries can be sent in one request.
  seen = []

  class Counting(dialogues.TableEnvironment):
    async def step(self, question, turn_index, text):
      seen.append(('starts', text))
      await asyncio.sleep(0)
      seen.append(('ends', text))
      return await super().step(question, turn_index, text)

  dialogues.collect_scripts(
    [['a', 'd'], ['b', 'd'], ['c', 'd']],
    Counting({'a': _ON, 'b': _ON, 'c': _ON, 'd': _DONE}),
    [dialogues.question('Q')] * 3,
  )
  expected = [(verb, text) for verb in ('starts', 'ends') for text in 'abc']
  expected += [(verb, 'd') for verb in ('starts', 'ends') for _ in range(3)]
  assert seen == expected


def test_an_error_of_the_environment_fails_its_row_only(caplog):
  class Broken(dialogues.TableEnvironment):
    def prompt(self, question):
      if question.id == 'prompt':
        raise OSError('no prompt')
      return super().prompt(question)

    def rewards(self, question, prompt, texts, status):
      if question.id == 'rewards':
        raise ZeroDivisionError('no reward')
      return super().rewards(question, prompt, texts, status)

  environment = Broken({'a': _ON, 'c': _DONE})
  names = ('step', 'prompt', 'rewards', 'healthy')
  questions = [dialogues.question('Q', name) for name in names]
  scripts = [['a', '?'], ['c'], ['c'], ['a', 'c']]
  *failed, healthy = dialogues.collect_scripts(scripts, environment, questions)
  assert {t.status for t in failed} == {_STATUS.INFRA_ERROR}
  assert [t.cause for t in failed] == [
    "KeyError: '?'",
    'OSError: no prompt',
    'ZeroDivisionError: no reward',
  ]
  # Only the first cause is logged.
  (record,) = caplog.records
  assert record.exc_info and 'no prompt' in str(record.exc_info[1])
  assert healthy.status is _STATUS.COMPLETED and healthy.cause == ''
  assert healthy.rewards and len(healthy.turns) == 2
  batch = pack.pack([*failed, healthy], length_bucket=4)
  assert batch.loss_mask_BL.sum(1).tolist() == [0, 0, 0, 2]


class _Fatal(Exception):
  exit_code = 2


def test_an_error_with_an_exit_code_ends_the_collection():
  class Refusing(_Slow):
    async def step(self, question, turn_index, text):
      if text == '?':
        raise _Fatal
      return await super().step(question, turn_index, text)

  environment = Refusing({'s': _DONE, 'a': _ON, 'c': _DONE})
  scripts = dialogues.letters(['s'], ['a', '?'], ['c'])
  engine = scripted.ScriptedEngine(scripts, 9)
  questions = [dialogues.question('Q', f'q{n}') for n in range(3)]
  with event_loop.EventLoop() as loop:
    collector = dialogues.make_collector(engine, environment, loop)
    with pytest.raises(_Fatal):
      collector.collect(questions, keys=None)
    loop.run(asyncio.sleep(0.01))
    # The requests for other answers are cancelled.
    assert environment.events[-1] == 'q0 answers or is cancelled'
    assert environment.ends == []
    # The next collection works as if there had been no error.
    environment.may_answer.set()
    scripts[:] = dialogues.letters(['c'], ['s'], ['a', 'c'])
    again = collector.collect(questions, keys=None)
  assert [len(t.turns) for t in again] == [1, 1, 2]


def test_an_error_of_the_tokenizer_leaves_nothing_behind():
  class Broken(dialogues.Letters):
    def decode(self, ids):
      if ids[0] == ord('b'):
        raise LookupError('no such letter')
      return super().decode(ids)

  environment = dialogues.TableEnvironment({'a': _DONE})
  with pytest.raises(LookupError, match='no such letter'):
    dialogues.collect_scripts(
      [['a'], ['b']],
      environment,
      [dialogues.question('Q')] * 2,
      tokenizer=Broken(),
    )
  assert environment.calls == []
