"""Hosts that decode together write what each of them writes alone."""

import collections
import contextlib
import functools
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from stppo_jax.sampling import engine as engine_lib
from stppo_jax.sampling import slice_driver
from tests.sampling import tiny_engine


class _Other:
  """Another host, which needs programs at random until it is done.

  Attributes:
    called: how often the two hosts have called each program.
  """

  def __init__(self, sizes, pages):
    self._rng = np.random.default_rng(0)
    self._sizes, self._pages, self._left = sizes, pages, 60
    self.called = collections.Counter()

  @contextlib.contextmanager
  def agreed(self, mine):
    self._left -= 1
    order = ['extend', 'copy', 'decode', 'waits', 'done']
    program = str(self._rng.choice(order[:4]))
    if self._left <= 0:
      program = 'done'
    if not self.called:  # a host begins with a prompt
      program = 'extend'
    size, pages = map(int, map(self._rng.choice, (self._sizes, self._pages)))
    self.called[min(program, mine.program, key=order.index)] += 1
    # As they are read from JSON.
    yield [list(mine), [program, size, pages, 1, False]]


@pytest.mark.parametrize(
  ('deterministic', 'sizes', 'pages'),
  [(False, [1, 4], [0, 1, 2]), (True, [4], [2])],
)
def test_programs_for_other_hosts_change_nothing(deterministic, sizes, pages):
  other, recorded = _Other(sizes, pages), []

  def make_driver(programs, options):
    programs.takes_any_number = False  # as on a GPU
    recorded.append(tiny_engine.RecordingPrograms(programs, lanes=1))
    return slice_driver.SliceDriver(recorded[0], options, agreed=other.agreed)

  engine = engine_lib.Engine(
    tiny_engine.MODEL,
    placement=tiny_engine.placement(),
    automaton=tiny_engine.automaton(),
    options=tiny_engine.options(deterministic=deterministic),
    make_driver=make_driver,
  )
  engine.publish(tiny_engine.PARAMS, 0)
  run = functools.partial(tiny_engine.dialogues, rows=6, group_size=2)
  expected = run(tiny_engine.engine())
  tiny_engine.assert_all_same(run(engine, delays=0), expected)
  engine.finish()
  programs = ('extend', 'copy', 'decode')
  assert set(other.called) == {*programs, 'waits', 'done'}
  calls = recorded[0].calls
  assert all(len(calls[name]) == other.called[name] for name in programs)
  if deterministic:
    # Which other hosts begin a wave meanwhile must not change a shape, or
    # choose a program.
    assert all(slots is None for slots, *_ in calls['extend'])
    assert set(recorded[0].num_pages) == {2}


@pytest.mark.slow
def test_two_hosts_write_together_what_each_writes_alone():
  """With other numbers of dialogues and collections, and other delays."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  module = [sys.executable, '-m', 'tests.sampling.slice_host', address]
  hosts = [
    subprocess.Popen(
      [*module, str(index)],
      cwd=pathlib.Path(__file__).parents[2],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for index in range(2)
  ]
  outputs = [host.communicate(timeout=600)[0] for host in hosts]
  for host, output in zip(hosts, outputs, strict=True):
    assert host.returncode == 0, output
    assert output.endswith('same\n')
