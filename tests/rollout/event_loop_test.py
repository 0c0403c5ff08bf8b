"""Synchronous code gets the results of coroutines, and can cancel them."""

import asyncio
import concurrent.futures
import gc
import itertools
import signal
import sys
import threading

import pytest

from stppo_jax.rollout import event_loop


def test_results_and_errors_come_back():
  async def work(value):
    await asyncio.sleep(0)
    if value < 0:
      raise LookupError('below zero')
    return value, threading.current_thread().name, asyncio.get_running_loop()

  before = set(threading.enumerate())
  with event_loop.EventLoop() as loop:
    value, thread, first = loop.run(work(3))
    assert value == 3 and thread == 'event-loop'
    with pytest.raises(LookupError, match='below zero'):
      loop.run(work(-1))
    # One loop for a whole run: connections outlive a call.
    assert loop.run(work(4))[2] is first
  assert first.is_closed()
  assert set(threading.enumerate()) <= before


def test_an_interrupt_cancels_the_coroutine():
  ended = []

  async def wait():
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
      await asyncio.sleep(60)
    finally:
      ended.append('wait')

  def interrupt(*_):
    raise KeyboardInterrupt

  before = signal.signal(signal.SIGALRM, interrupt)
  try:
    with event_loop.EventLoop() as loop:
      with pytest.raises(KeyboardInterrupt):
        loop.run(wait())
      loop.run(asyncio.sleep(0.01))
      assert ended == ['wait']  # at once, and not when the loop is left
  finally:
    signal.signal(signal.SIGALRM, before)


def test_an_interrupt_at_any_line_leaves_no_coroutine_unawaited(recwarn):
  async def work():
    pass

  class Interrupt(BaseException):
    pass

  # The first three lines take the coroutine over.
  for line in itertools.count(3):
    passed = 0

    def trace(frame, event, _, last=line):
      nonlocal passed
      if frame.f_code.co_filename == event_loop.__file__ and event == 'line':
        passed += 1
        if passed > last:
          sys.settrace(None)
          raise Interrupt
      return trace

    with event_loop.EventLoop() as loop:
      coroutine, before = work(), sys.gettrace()
      sys.settrace(trace)
      try:
        loop.run(coroutine)
        break
      except Interrupt:
        pass
      finally:
        sys.settrace(before)
      del coroutine
  gc.collect()
  assert line > 8
  assert not [str(x.message) for x in recwarn if 'await' in str(x.message)]


def test_leaving_the_loop_cancels_coroutines_and_ends_futures(caplog):
  ended = []

  async def serve(name):
    try:
      await asyncio.sleep(60)
    finally:
      await asyncio.sleep(0)
      ended.append(name)

  async def start():
    asyncio.get_running_loop().keep = asyncio.create_task(serve('task'))
    await asyncio.sleep(0)

  with event_loop.EventLoop() as loop:
    loop.run(start())
    (future,) = loop.submit([serve('submitted')])
    loop.run(asyncio.sleep(0))
  assert sorted(ended) == ['submitted', 'task']
  assert not caplog.records  # such as "Task was destroyed but it is pending"
  with pytest.raises(concurrent.futures.CancelledError):
    future.result(timeout=20)


def test_submitted_coroutines_start_together_and_end_in_any_order():
  events = []

  async def work(value):
    events.append(('starts', value))
    await asyncio.sleep(0.02 * (3 - value))
    events.append(('ends', value))
    if value == 2:
      raise LookupError('two')
    return value, threading.current_thread().name

  with event_loop.EventLoop() as loop:
    futures = loop.submit([work(value) for value in range(4)])
    waited = concurrent.futures.wait(futures, timeout=20)
    assert not waited.not_done
    for n in (0, 1, 3):
      assert futures[n].result() == (n, 'event-loop')
    with pytest.raises(LookupError, match='two'):
      futures[2].result()
    assert loop.submit([]) == []
  assert events == [('starts', n) for n in range(4)] + [
    ('ends', n) for n in (3, 2, 1, 0)
  ]


def test_cancelling_a_future_cancels_its_coroutine_only(caplog):
  events = []

  async def work(value, started):
    started.set()
    try:
      await asyncio.sleep(0.05 if value else 60)
      events.append(value)
    finally:
      events.append(f'{value} is over')
    return value

  async def fail(started):
    started.set()
    await asyncio.sleep(0.01)
    raise LookupError('nobody waits for this')

  with event_loop.EventLoop() as loop:
    started = [threading.Event() for _ in range(3)]
    cancelled, kept = loop.submit([work(n, started[n]) for n in range(2)])
    (failing,) = loop.submit([fail(started[2])])
    assert all(event.wait(20) for event in started)
    assert cancelled.cancel() and failing.cancel()
    assert kept.result(timeout=20) == 1
    # Before it starts, too: a coroutine that never runs is no warning.
    (never,) = loop.submit([work(0, threading.Event())])
    never.cancel()
    loop.run(asyncio.sleep(0.02))
  assert cancelled.cancelled() and failing.cancelled()
  assert events[:3] == ['0 is over', 1, '1 is over']
  assert not caplog.records
