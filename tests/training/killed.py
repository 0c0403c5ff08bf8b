"""Trains in this process until it kills itself, at a known moment.

    python -m tests.training.killed WORKDIR EVENT NAME

A signal that nobody can catch, SIGKILL, is sent when Python is about to do
something with a file or folder: EVENT is the name of an audit event, such as
os.mkdir, and NAME the last part of the path. With the event `collect`, NAME is
the number of the collection that begins.
"""

import functools
import os
import pathlib
import signal
import sys

from tests.training import faults
from tests.training import runs


def main(workdir: str, event: str, name: str) -> int:
  kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)

  def audit(happened, arguments):
    if happened == event and os.path.basename(str(arguments[0])) == name:
      kill()

  def act(moment):
    if event == 'collect' and moment == (event, int(name)):
      kill()

  sys.addaudithook(audit)
  with faults.at(runs.config(), act):
    return runs.train(pathlib.Path(workdir))


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
