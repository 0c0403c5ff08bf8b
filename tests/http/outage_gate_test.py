"""The gate alone, without a server. `retrieval/outages_test.py` has one."""

import asyncio

import pytest

from stppo_jax.http import outage_gate


def test_a_request_that_is_cancelled_leaves_the_others_waiting():
  probes = []

  async def run():
    ready = asyncio.Event()

    async def until_ready():
      probes.append(1)
      await ready.wait()

    is_away = lambda error: isinstance(error, ConnectionError)
    gate = outage_gate.OutageGate(0.5, is_away, until_ready, server='it')

    async def request(error=None):
      async with gate.request():
        if error is not None:
          raise error

    for _ in range(3):
      with pytest.raises(ConnectionError):
        await request(ConnectionError())
    assert gate.times_closed == 1
    cancelled, other = (asyncio.create_task(request()) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
      await cancelled
    assert not other.done()
    ready.set()
    await asyncio.wait_for(other, 10)
    await request()  # it is open

  asyncio.run(run())
  assert probes == [1]
