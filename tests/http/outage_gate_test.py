"""The gate alone, without a server. `retrieval/outages_test.py` has one."""

import asyncio
import contextlib

import pytest

from stppo_jax.http import outage_gate


class _Away(Exception):
  """The error of a server that is away."""


async def _closed_gate(until_ready):
  gate = outage_gate.OutageGate(
    0.5,
    lambda error: isinstance(error, _Away),
    until_ready,
    server='the server',
  )
  for _ in range(3):
    with contextlib.suppress(_Away):
      async with gate.request():
        raise _Away
  assert gate.times_closed == 1
  return gate


async def _pass(gate):
  async with gate.request():
    pass


def test_a_request_that_is_cancelled_leaves_the_others_waiting():
  probes = []

  async def run():
    ready = asyncio.Event()

    async def until_ready():
      probes.append(1)
      await ready.wait()

    gate = await _closed_gate(until_ready)
    cancelled, other = (asyncio.create_task(_pass(gate)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
      await cancelled
    assert not other.done()
    ready.set()
    await asyncio.wait_for(other, 10)
    await _pass(gate)  # it is open

  asyncio.run(run())
  assert probes == [1]
