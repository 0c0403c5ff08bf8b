"""The largest memory of a process, and its seconds of compiling."""

import jax
import numpy as np

from stppo_jax.parallel import compile_time
from stppo_jax.parallel import peaks


def test_the_largest_memory_grows_and_never_falls():
  before = peaks.max_memory()['perf/max_memory_host_gb']
  assert before > 0.01
  array = np.ones(int(before * (1 << 30)), np.uint8)
  del array
  after = peaks.max_memory()['perf/max_memory_host_gb']
  assert before < after < 4 * before + 1


def test_compiling_is_measured_once_and_only_inside():
  with compile_time.measured() as take:
    jax.jit(lambda x: x * 2 + 41)(1)
    assert take() > 0
    assert take() == 0
    jax.jit(lambda x: x * 3 + 41)(1)
  assert take() > 0
  jax.jit(lambda x: x * 4 + 41)(1)
  assert take() == 0
