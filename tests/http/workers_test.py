"""Workers that end are replaced, more slowly the more of them there are."""

import asyncio
import sys

from stppo_jax.http import server
from stppo_jax.http import workers

_CRASH = 'print("ready", flush=True); raise SystemExit(3)'


def test_workers_that_crash_are_replaced_after_growing_pauses(capsys):
  starts = []

  async def run():
    stopping = asyncio.Event()

    def command(descriptor):
      starts.append(descriptor)
      if len(starts) == 4:
        stopping.set()
      return [sys.executable, '-I', '-S', '-c', _CRASH]

    with server.listen('127.0.0.1', 0) as bound:
      await workers.supervise(
        command,
        num_workers=1,
        bound=bound,
        stopping=stopping,
        ready=lambda: None,
        first_pause=0.01,
      )

  asyncio.run(run())
  lines = capsys.readouterr().err.splitlines()
  assert [line.partition(' ended with ')[2] for line in lines] == [
    f'exit code 3; starting another one in {pause:g} s'
    for pause in (0.01, 0.02, 0.04)
  ]
