"""The relay through which jax reaches its coordinator in process 0."""

import asyncio

import pytest

from stppo_jax.parallel import coordinator


async def _relayed(check):
  """Calls `check` with a relay, a client's connection, and process 0's end.

  Process 0 ends in the middle of a message that it has not answered.
  """
  accepted = asyncio.get_running_loop().create_future()

  async def serve(reader, writer):
    await reader.readline()  # the relay's first line
    accepted.set_result((reader, writer))

  server = await asyncio.start_server(serve, '127.0.0.1', 0)
  relay = coordinator.Relay('127.0.0.1', server.sockets[0].getsockname()[1])
  client = await asyncio.open_connection('127.0.0.1', await relay.start())
  client[1].write(b'question')
  reader, writer = await accepted
  assert await reader.readexactly(8) == b'question'
  writer.write(b'answer')
  assert await client[0].readexactly(6) == b'answer'

  async def end():
    server.close()
    writer.transport.abort()  # as of a process that is killed
    await asyncio.sleep(0.05)

  try:
    await check(relay, client, end)
  finally:
    client[1].close()
    relay.close()


def test_a_client_that_goes_on_writing_does_not_lose_its_connection():
  """It would abort its process, before anyone has said why."""

  async def check(relay, client, end):
    await end()
    for _ in range(3):
      client[1].write(b'more')
      await client[1].drain()
      with pytest.raises(asyncio.TimeoutError):
        assert not await asyncio.wait_for(client[0].read(1), 0.1)

  asyncio.run(_relayed(check))


def test_the_end_of_process_0_is_passed_on_when_it_is_expected():
  async def check(relay, client, end):
    relay.passes_end = True
    await end()
    assert await asyncio.wait_for(client[0].read(), 10) == b''

  asyncio.run(_relayed(check))


def test_the_time_of_a_process_that_was_stopped_does_not_count():
  times = [100.0, 100.5, 101.0, 101.5 + 3600, 102.0 + 3600]
  clock = coordinator.AwakeClock(iter(times).__next__)
  counted = []
  for _ in times[1:]:
    clock.tick()
    counted.append(clock.now)
  assert counted[:2] == [0.5, 1.0]
  assert counted[2] < 5  # and not an hour
  assert counted[3] == counted[2] + 0.5
