"""Steps are traced when that is asked for, with the names of their phases."""

import jax
import jax.numpy as jnp
import pytest

from stppo_jax.workdir import heartbeat
from stppo_jax.workdir import run_monitor


def _names(trace):
  """Returns the names of all spans of a trace."""
  data = jax.profiler.ProfileData.from_file(str(trace))
  return {
    event.name
    for plane in data.planes
    for line in plane.lines
    for event in line.events
  }


def _traces(folder):
  return sorted((folder / 'profile').glob('plugins/profile/*/*.xplane.pb'))


def _steps(watch, numbers):
  for step in numbers:
    watch.begin_step(step)
    for phase in ('annotate', 'update'):
      watch.begin_phase(phase)
      jax.block_until_ready(jnp.ones(3) * step)
      watch.begin_phase('')


@pytest.mark.parametrize(
  ('steps', 'saved'), [((2, 4), 3), ((3, 9), 8), ((0, 0), None)]
)
@pytest.mark.slow
def test_whole_steps_are_traced(tmp_path, steps, saved):
  """Also if the run ends in the middle of them."""
  watch = run_monitor.Watch(lambda: 0)
  with watch.started(tmp_path, ['here'], steps):
    _steps(watch, range(1, 5))
  assert heartbeat.read(tmp_path).phase == 'end'
  assert len(_traces(tmp_path)) == (saved is not None)
  for trace in _traces(tmp_path):
    assert {'step', 'annotate', 'update'} <= _names(trace)
    assert (tmp_path / 'profile' / f'memory-{saved:06d}.prof').is_file()


@pytest.mark.slow
def test_a_trace_of_the_next_step_can_be_asked_for(tmp_path):
  watch = run_monitor.Watch(lambda: 0)
  request = tmp_path / run_monitor.REQUEST
  with watch.started(tmp_path, ['here'], (0, 0)):
    _steps(watch, [1])
    request.touch()
    _steps(watch, [2, 3])
    assert not request.exists()
    assert len(_traces(tmp_path)) == 1
    assert (tmp_path / 'profile' / 'memory-000002.prof').is_file()
  other = run_monitor.Watch(lambda: 0)  # of another host, which is not started
  request.touch()
  _steps(other, [4])
  assert request.exists()
