"""One host of a run without devices, as a process of its own.

    python -m tests.parallel.one_host ADDRESS INDEX COUNT WHAT [PATIENCE]

It meets the others, exchanges a word, and then does WHAT. `python -u` prints
what happens, and the exit code is that of a command.
"""

import os
import signal
import sys
import time

from stppo_jax.parallel import connected_hosts
from stppo_jax.parallel import hosts as hosts_lib

GRACE = 1.0
START_TIMEOUT = 7.0


def main(
  address: str, index: str, count: str, what: str, patience: str = '30'
) -> int:
  hosts = None
  try:
    hosts = connected_hosts.ConnectedHosts(
      address,
      int(index),
      int(count),
      jax_port=1,
      start_timeout=START_TIMEOUT,
      patience=float(patience),
      grace=GRACE,
    )
    assert hosts.exchange('word', index) == [str(n) for n in range(int(count))]
    if what == 'raise':
      raise ValueError('two\nlines')
    if what == 'die':
      os.kill(os.getpid(), signal.SIGKILL)
    if what == 'freeze':
      os.kill(os.getpid(), signal.SIGSTOP)
    if what == 'compute':  # as a program does that waits for another host
      time.sleep(60)
    if what == 'wait':
      hosts.exchange('more', None)
    hosts.leave()
    hosts.close()
    return 0
  except hosts_lib.HostFailed as failure:
    print(failure, file=sys.stderr)
    if hosts is not None:
      hosts.fail(str(failure), failure.exit_code)
    return failure.exit_code
  except ValueError as error:
    assert hosts is not None
    hosts.fail(
      f'{hosts.describe(hosts.index)}: {hosts_lib.describe(error)}', 70
    )
    return 70


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
