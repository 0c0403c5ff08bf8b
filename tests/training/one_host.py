"""One host of a run, as a process in which something goes wrong.

    python -m tests.training.one_host WHAT KIND NUMBER train FLAGS

At a moment of the run, see `faults`, the process raises an error, kills itself,
sends itself SIGTERM, loses its retriever, sleeps, or has a full disk from then
on.
It is one of two hosts, each of which collects half of a step, or the only one
that collects.

    python -m tests.training.one_host WHAT printed TEXT train FLAGS

does so once it has printed a text.
"""

import functools
import os
import resource
import signal
import sys
import time

from stppo_jax import __main__
from stppo_jax.retrieval import protocol
from tests.training import faults
from tests.training import runs


def _fill_disk():
  """Lets this process write no file beyond a few bytes."""
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))


def _lose_retriever_at(moment):
  def act(now):
    if now == moment:
      raise protocol.RetrieverUnreachable('not ready within 60 s')

  return act


def main(what: str, kind: str, number: str, *argv: str) -> int:
  act = {
    'raise': faults.crash_at,
    'kill': functools.partial(faults.send_at, number=signal.SIGKILL),
    'stop': functools.partial(faults.send_at, number=signal.SIGTERM),
    'outage': _lose_retriever_at,
    'sleep': lambda moment: lambda now: time.sleep(3.0 * (now == moment)),
    'fill': lambda moment: lambda now: _fill_disk() if now == moment else None,
  }[what]
  if kind == 'printed':
    with faults.printed(number, act((kind, 1))):
      return __main__.main(argv)
  collectors = [flag for flag in argv if 'mesh.collectors' in flag]
  num_hosts = 1 if collectors else 2
  with faults.at(runs.config(), act((kind, int(number))), num_hosts=num_hosts):
    return __main__.main(argv)


if __name__ == '__main__':
  code = main(*sys.argv[1:])
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
