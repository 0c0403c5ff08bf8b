"""Coroutines from synchronous code: results, errors, interrupts."""

import asyncio
import signal
import threading

import pytest

from stppo_jax.rollout import event_loop


def test_results_and_errors_come_back():
  async def work(value):
    await asyncio.sleep(0)
    if value < 0:
      raise LookupError('below zero')
    return value, threading.current_thread().name, asyncio.get_running_loop()

  with event_loop.EventLoop() as loop:
    value, thread, first = loop.run(work(3))
    assert value == 3 and thread == 'event-loop'
    with pytest.raises(LookupError, match='below zero'):
      loop.run(work(-1))
    # One loop for a whole run: connections outlive a call.
    assert loop.run(work(4))[2] is first
  assert first.is_closed()
  assert 'event-loop' not in [t.name for t in threading.enumerate()]


def test_an_interrupt_cancels_what_was_waited_for():
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


def test_leaving_ends_what_is_still_running(caplog):
  ended = []

  async def serve():
    try:
      await asyncio.sleep(60)
    finally:
      await asyncio.sleep(0)
      ended.append('serve')

  async def start():
    asyncio.get_running_loop().keep = asyncio.create_task(serve())
    await asyncio.sleep(0)

  with event_loop.EventLoop() as loop:
    loop.run(start())
  assert ended == ['serve']
  assert not caplog.records  # such as "Task was destroyed but it is pending"
