"""One process of a run, in which something goes wrong.

    python -m tests.training.one_host WHAT KIND NUMBER train FLAGS

At a moment of the run, see `faults`, the process raises an error, kills itself,
sends itself SIGTERM, is stuck, loses its retriever, sleeps, or has a full disk
from then on.
It collects a whole step, or half of a step as one of two hosts.

    python -m tests.training.one_host WHAT printed TEXT train FLAGS

does so once it has printed a text, and

    python -m tests.training.one_host WHAT EVENT NAME train FLAGS

when Python is about to do something with a file or folder: EVENT is the name of
an audit event, such as os.mkdir, and NAME the last part of the path.
"""

import functools
import hashlib
import os
import signal
import sys
import threading
import time

from stppo_jax import __main__
from stppo_jax.commands.flags import configuration
from stppo_jax.retrieval import protocol
from tests.training import faults


def _lose_retriever():
  raise protocol.RetrieverUnreachable('not ready within 60 s')


def _crash():
  raise faults.Crash('a bug, or a power cut')


def _be_stuck():
  """Begins what nothing interrupts, and what does not end."""
  # The main thread is stuck when it comes.
  threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
  # What the grace seconds are for: then the process is killed.
  threading.Timer(6, os.kill, (os.getpid(), signal.SIGKILL)).start()
  hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)


_FAULTS = {
  'raise': _crash,
  'kill': functools.partial(signal.raise_signal, signal.SIGKILL),
  'stop': lambda: os.kill(os.getpid(), signal.SIGTERM),
  'stuck': _be_stuck,
  'outage': _lose_retriever,
  'sleep': functools.partial(time.sleep, 3.0),
  'fill': faults.fill_disk,
}


def main(what: str, kind: str, number: str, *argv: str) -> int:
  def act(moment):
    if moment == (kind, int(number) if number.isdigit() else number):
      _FAULTS[what]()

  if kind == 'printed':
    with faults.printed(number, lambda moment: _FAULTS[what]()):
      return __main__.main(argv)
  if '.' in kind:
    sys.addaudithook(
      lambda event, args: (
        event == kind and act((event, os.path.basename(str(args[0]))))
      )
    )
  joined = ' '.join(argv)
  is_half = '--num_processes' in joined and 'mesh.collectors' not in joined
  config = configuration.parse([x for x in argv if x.startswith('--config')])
  with faults.at(config, act, num_hosts=1 + is_half):
    return __main__.main(argv)


if __name__ == '__main__':
  code = main(*sys.argv[1:])
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
