"""A long run needs no more memory, threads, files or programs than a short one.

STEPS sets its length; docs/reliability.md reports a measurement.
"""

import gc
import os
import pathlib
import threading
from typing import NamedTuple

import pytest

from tests import compilations
from tests.training import runs

_STEPS = int(os.environ.get('STEPS', '2000'))
_KIB_PER_STEP = 48  # of memory that allocators may keep between steps


class _Use(NamedTuple):
  """The things that the process holds at the end of a step."""

  memory: int  # KiB
  threads: int
  files: int
  sockets: int
  compiled: int


def _use(programs):
  gc.collect()
  links = []
  for path in pathlib.Path('/proc/self/fd').iterdir():
    try:
      links.append(os.readlink(path))
    except OSError:  # the one that lists them
      continue
  status = pathlib.Path('/proc/self/status').read_text('utf-8')
  memory = status.partition('VmRSS:')[2].split()[0]
  sockets = sum(link.startswith('socket:') for link in links)
  return _Use(
    int(memory),
    threading.active_count(),
    len(links) - sockets,
    sockets,
    len(programs),
  )


@pytest.mark.slow
def test_nothing_grows_from_step_to_step(tmp_path, record_property):
  # Steps are as short as they can be, and evaluations and saves are rare.
  changes = {
    'num_steps': _STEPS,
    'evaluate__every': 50,
    'evaluate__num_questions': 4,
    'checkpoint__every': 50,
    'writer__samples': 0,
    'writer__trajectories': 1,
    'env__max_turns': 1,
    'rollout__trajectories_per_step': 8,  # one for each device
    'updates__minibatch_size': 8,
  }
  used = {}
  with compilations.counted() as programs:

    def act(moment):
      kind, number = moment
      # Not beside an evaluation or a save, which the next step may find open,
      # and not before the first of them, which compile.
      if kind == 'updated' and number % 50 == 25 and number > 50:
        used[number] = _use(programs)

    assert runs.train(tmp_path, act, **changes) == 0
  numbers = sorted(used)
  first, last = numbers[len(numbers) // 4], numbers[-1]
  before, after = used[first], used[last]
  growth = (after.memory - before.memory) / (last - first)
  record_property('KiB per step', growth)
  print(f'steps {first} to {last}: {growth:.1f} KiB per step, {after}')
  assert growth < _KIB_PER_STEP, used
  # A file may be open for a moment, such as that of the heartbeat.
  early = [used[number] for number in numbers[: len(numbers) // 2]]
  assert after.files <= max(use.files for use in early), used
  same = {'memory': 0, 'files': 0}
  assert after._replace(**same) == before._replace(**same), used
