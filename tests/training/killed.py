"""Trains in this process until it kills itself, at a known moment.

    python -m tests.training.killed WORKDIR EVENT NAME [FLAGS]

A signal that nobody can catch, SIGKILL, is sent when Python is about to do
something with a file or folder: EVENT is the name of an audit event, such as
os.mkdir, and NAME the last part of the path. Or EVENT and NAME are a moment of
`faults.py`, such as `updated 5`. FLAGS are those of `train`, by default those
of `runs.train`.
"""

import functools
import os
import signal
import sys

from stppo_jax import __main__
from stppo_jax.commands.flags import configuration
from tests.training import faults
from tests.training import runs


def main(workdir: str, event: str, name: str, *flags: str) -> int:
  kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)

  def audit(happened, arguments):
    if happened == event and os.path.basename(str(arguments[0])) == name:
      kill()

  def act(moment):
    if moment == (event, int(name) if name.isdigit() else name):
      kill()

  sys.addaudithook(audit)
  flags = flags or tuple(runs.flags(num_steps=runs.STEPS))
  config = configuration.parse(flags)
  with faults.at(config, act):
    return __main__.main(['train', *flags, f'--workdir={workdir}'])


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
