"""The largest memory of a process, and what it compiles for how long."""

import threading

import jax
import numpy as np
import pytest

from stppo_jax import streams
from stppo_jax.parallel import compilation
from stppo_jax.parallel import memory


@pytest.mark.slow
def test_the_largest_memory_grows_and_never_falls():
  before = memory.max_memory()['perf/max_memory_host_gb']
  assert before > 0.01
  array = np.ones(int(before * (1 << 30)), np.uint8)
  del array
  after = memory.max_memory()['perf/max_memory_host_gb']
  assert before < after < 4 * before + 1


def test_compiling_is_measured_once_and_only_inside():
  with compilation.measured() as take:
    jax.jit(lambda x: x * 2 + 41)(1)
    assert take() > 0
    assert take() == 0
    jax.jit(lambda x: x * 3 + 41)(1)
  assert take() > 0
  jax.jit(lambda x: x * 4 + 41)(1)
  assert take() == 0


def test_a_long_compilation_is_announced_and_its_end_too():
  lines, shown = [], threading.Event()

  def show(line):
    lines.append(line)
    shown.set()

  def record(event, seconds, name):
    # As jax does at the end of each.
    jax.monitoring.record_event_duration_secs(
      f'/jax/core/compile/{event}', seconds, fun_name=f'jit({name})'
    )

  with streams.logged(show), compilation.announced(long=0.01):
    record('jaxpr_to_mlir_module_duration', 1.0, 'update_rows')
    assert shown.wait(timeout=60)
    record('backend_compile_duration', 33.6, 'update_rows')
    record('backend_compile_duration', 0.001, 'small')
  record('backend_compile_duration', 50.0, 'later')
  assert lines == [
    'compiling update_rows: 0 s so far',
    'compiled update_rows in 34 s',
  ]


def test_programs_of_jax_are_announced_by_name(said):
  def _scaled(x):
    return x * 5 + 41

  with compilation.announced(long=0.0):
    jax.jit(_scaled)(1)
  assert said[-1] == 'compiled scaled in 0 s'
