"""Each step is collected with the right policy, on the right thread."""

import asyncio
import gc
import threading
import time
import weakref

import pytest

from stppo_jax.rollout import event_loop
from stppo_jax.rollout import prefetch

_SECONDS = 20.0  # until a test that waits for another thread has failed


class _State:
  """A training state whose weights are a string."""

  def __init__(self, version):
    self.params = f'policy {version}'


class _Engine:
  """A fake engine that records its calls.

  Attributes:
    events: ('publish', version), ('begin', step) and ('end', step), in order.
    threads: the threads on which steps were collected.
  """

  def __init__(self, hold=(), fail=()):
    self.events = []
    self.threads = set()
    self.may_end = {step: threading.Event() for step in hold}
    self._fail = fail

  def publish(self, params, version):
    assert params == f'policy {version}'
    self.events.append(('publish', version))

  def collect(self, step):
    self.threads.add(threading.current_thread())
    self.events.append(('begin', step))
    if step in self.may_end:
      assert self.may_end[step].wait(_SECONDS)
    if step in self._fail:
      raise LookupError(f'step {step}')
    self.events.append(('end', step))
    return [f'trajectory {step}'], {'step': float(step)}

  def wait_for(self, *event):
    """Waits until the event has happened."""
    until = time.monotonic() + _SECONDS
    while event not in self.events:
      assert time.monotonic() < until, f'{event} not in {self.events}'
      time.sleep(0.001)


class _Never:
  """A loop for engines that submit nothing."""

  def stop(self):
    pass


def _collector(engine, steps_ahead, *, background, loop=None, **options):
  return prefetch.Prefetcher(
    engine.collect,
    engine.publish,
    lambda state: state.params,
    steps_ahead=steps_ahead,
    num_steps=5,
    loop=(loop or _Never()) if background else None,
    **options,
  )


def _events(steps, steps_ahead):
  """Returns the events of collections one after the other."""
  return [
    event
    for step in steps
    for event in (
      ('publish', max(0, step - steps_ahead)),
      ('begin', step),
      ('end', step),
    )
  ]


@pytest.mark.parametrize('background', [False, True])
@pytest.mark.parametrize('steps_ahead', [0, 1, 2, 7])
def test_a_step_is_collected_with_the_policy_so_many_steps_behind(
  steps_ahead, background
):
  # A restored collector goes on as if nothing had happened.
  for done in range(5):
    first = _collector(_Engine(), steps_ahead, background=False)
    for step in range(done):
      first.schedule(step, _State(step))
      first.result(step)
    published = first.published(done, f'policy {done}')
    assert published == tuple(
      f'policy {max(0, done - behind)}' for behind in range(1, steps_ahead + 1)
    )
    engine = _Engine()
    collector = _collector(engine, steps_ahead, background=background)
    if done:
      collector.restore(done, published)
      # Saved again before anything happens, it is the same.
      assert collector.published(done, f'policy {done}') == published
    for step in range(done, 5):
      collector.schedule(step, _State(step))
      assert collector.policy(step) == f'policy {max(0, step - steps_ahead)}'
      collected = collector.result(step)
      assert collected.trajectories == [f'trajectory {step}']
      assert collected.metrics == {'step': step}
      assert 0 <= collected.seconds[0] < _SECONDS
    collector.close()
    # Weights change between collections only, and no later step is collected.
    assert engine.events == _events(range(done, 5), steps_ahead)
    (thread,) = engine.threads
    assert (thread is threading.current_thread()) != background


@pytest.mark.parametrize('steps_ahead', [1, 2])
def test_further_steps_are_collected_meanwhile_but_not_too_many(steps_ahead):
  engine = _Engine(hold=[steps_ahead + 1])
  collector = _collector(engine, steps_ahead, background=True)
  collector.schedule(0, _State(0))
  collector.result(0)
  # Their results are not requested, and there is no next policy yet.
  engine.wait_for('end', steps_ahead)
  collector.drain()
  assert engine.events == _events(range(steps_ahead + 1), steps_ahead)
  collector.schedule(1, _State(1))
  engine.wait_for('begin', steps_ahead + 1)
  assert collector.result(1).metrics == {'step': 1}  # that one goes on
  engine.may_end[steps_ahead + 1].set()
  collector.drain()
  assert engine.events == _events(range(steps_ahead + 2), steps_ahead)
  collector.close()


def test_weights_are_sent_once_by_the_thread_that_learns():
  engine, sent = _Engine(), []

  def send(params):
    assert threading.current_thread() is threading.main_thread()
    sent.append(params)
    return params

  collector = _collector(engine, 1, background=True, send=send)
  for step in range(5):
    collector.schedule(step, _State(step))
    collector.result(step)
  collector.close()
  assert engine.events == _events(range(5), 1)
  assert sent == [f'policy {version}' for version in range(4)]


def test_old_policies_are_released():
  class Weights:
    pass

  class Copies(_Engine):
    def publish(self, params, version):
      assert isinstance(params, Weights)  # which are copied, not kept

  collector = _collector(Copies(), 2, background=False)
  copies = []

  for version in range(5):
    state = _State(version)
    state.params = Weights()
    copies.append(weakref.ref(state.params))
    collector.schedule(version, state)
  del state
  gc.collect()
  held = [version for version, copy in enumerate(copies) if copy() is not None]
  assert held == [2, 3, 4]


def test_an_error_is_raised_with_the_result_of_its_step():
  engine = _Engine(fail=[1])
  collector = _collector(engine, 2, background=True)
  collector.schedule(0, _State(0))
  collector.drain()  # ignores the error
  assert collector.result(0).metrics == {'step': 0}
  with pytest.raises(LookupError, match='step 1'):
    collector.result(1)
  with pytest.raises(prefetch.Abandoned):
    collector.result(2)
  collector.close()
  assert ('begin', 2) not in engine.events


@pytest.fixture
def loop():
  with event_loop.EventLoop() as running:
    yield running


@pytest.mark.parametrize('waits', ['submit', 'run', 'samples'])
def test_closing_ends_a_collection(loop, waits):
  """A collection that waits or samples without end is ended."""
  stoppable = prefetch.StoppableLoop(loop)
  events = {name: threading.Event() for name in ('waiting', 'cancelled')}

  async def endless():
    events['waiting'].set()
    try:
      await asyncio.sleep(10 * _SECONDS)
    except asyncio.CancelledError:
      events['cancelled'].set()
      raise

  class Endless(_Engine):
    def collect(self, step):
      if waits == 'run':
        stoppable.run(endless())
      elif waits == 'submit':
        (future,) = stoppable.submit([endless()])
        future.result()
      while True:  # a chunk of tokens that ends no turn
        events['waiting'].set()
        stoppable.submit([])

  collector = _collector(Endless(), 1, background=True, loop=stoppable)
  collector.schedule(0, _State(0))
  assert events['waiting'].wait(_SECONDS)
  started = time.monotonic()
  collector.close()
  assert time.monotonic() - started < _SECONDS / 2
  assert waits == 'samples' or events['cancelled'].wait(_SECONDS)
  assert not any(t.name.startswith('collect') for t in threading.enumerate())


def test_a_stopped_loop_runs_no_coroutine(loop):
  stoppable = prefetch.StoppableLoop(loop)

  async def answer():
    return 3

  assert stoppable.run(answer()) == 3
  assert [f.result() for f in stoppable.submit([answer(), answer()])] == [3, 3]
  stoppable.stop()
  # The coroutines are closed: a warning that they never ran is an error here.
  with pytest.raises(prefetch.Abandoned):
    stoppable.submit([answer()])
  with pytest.raises(prefetch.Abandoned):
    stoppable.run(answer())
  assert loop.run(answer()) == 3  # others are served
