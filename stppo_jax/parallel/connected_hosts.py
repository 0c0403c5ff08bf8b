"""Connects a process with the other processes of its run; see `coordinator`."""

import asyncio
import atexit
from collections.abc import Coroutine, Sequence
import concurrent.futures
import contextlib
import json
import socket
import threading
from typing import Any

from stppo_jax import interruption
from stppo_jax import streams
from stppo_jax.parallel import coordinator as coordinator_lib
from stppo_jax.parallel import hosts as hosts_lib

# Seconds that every process of a failed run has to end by itself.
_GRACE = 10.0
# If another host may have caused an error of this host, the seconds to wait for
# the message that names the other host.
_DIAGNOSIS = 5.0


class ConnectedHosts(hosts_lib.Hosts):
  """Connects this host with the other hosts of its run.

  Args:
    address: host name and port of the coordinator.
    index, count: see `Hosts`; host 0 runs the coordinator.
    jax_port: on host 0, the port for jax's own coordinator; other hosts do not
      use it.
    start_timeout: seconds to wait at the start until all hosts are connected.
    patience: seconds to wait for a host that is late or does not answer.
    grace: seconds that this process has to end by itself after the run has
      failed.
    collectors: the number of hosts that only collect; they are the last hosts.

  Attributes:
    jax_address: host name and port by which jax reaches jax's coordinator.

  Raises:
    HostFailed: the hosts could not all connect.
  """

  def __init__(
    self,
    address: str,
    index: int,
    count: int,
    *,
    jax_port: int,
    start_timeout: float,
    patience: float,
    grace: float = _GRACE,
    collectors: int = 0,
  ):
    super().__init__(index, [''] * count)
    self.collectors, self.learns = collectors, index < count - collectors
    self._address = address
    self._patience, self._grace = patience, grace
    self._waiting: dict[str, concurrent.futures.Future] = {}
    self._rounds: dict[str, int] = {}
    self._lock = threading.Lock()
    self._failure: hosts_lib.HostFailed | None = None
    self._stopped = False
    self._failed = threading.Event()
    self._ending = False
    self._server: coordinator_lib.Coordinator | None = None
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='hosts', daemon=True
    )
    self._thread.start()
    host, _, port = address.rpartition(':')
    host = host.strip('[]')
    self.jax_address = f'127.0.0.1:{jax_port}'
    if index == 0:
      self._server = coordinator_lib.Coordinator(
        address=address,
        count=count,
        jax_port=jax_port,
        start_timeout=start_timeout,
        patience=patience,
      )
      try:
        self._call(self._server.start(host, int(port)))
      except OSError as error:
        line = f'the coordinator, process 0, cannot listen at {address}: '
        raise hosts_lib.HostFailed(line + str(error)) from error
    else:
      self._relay = coordinator_lib.Relay(host, int(port))
      self.jax_address = f'127.0.0.1:{self._call(self._relay.start())}'
    # The future exists before the connection, because the coordinator may
    # answer at once.
    met = self._expect('met')
    self._call(self._connect(host, int(port), start_timeout))
    self.names = met.result()
    # Other hosts reach host 0 by the name of the coordinator, and any other
    # host by the local address of its connection to the coordinator.
    self.reached_at = host
    if index:
      self.reached_at = self._writer.get_extra_info('sockname')[0]

  @property
  def group(self) -> hosts_lib.Hosts:
    """The hosts with the same task as this host; see `Hosts.group`."""
    if not self.collectors:
      return self
    first = self.count - self.collectors  # the first host that only collects
    members = range(first) if self.learns else range(first, self.count)
    return hosts_lib.Group(self, members, learns=self.learns)

  def exchange(
    self,
    what: str,
    value: Any,
    *,
    timeout: float | None = None,
    among: Sequence[int] = (),
  ) -> list[Any]:
    """Returns the values of several hosts; see `Hosts.exchange`.

    Only the hosts in `among` take part. If `among` is (), all hosts take part.
    """
    return self._give(what, value, 'all', among).result(timeout)

  def gather(
    self, what: str, value: Any, *, among: Sequence[int] = ()
  ) -> list[Any] | None:
    """Returns several hosts' values on one host; see `Hosts.gather`.

    Only the hosts in `among` take part. If `among` is (), all hosts take part.
    The first host that takes part gets the values, and the others get None.
    """
    return self._give(what, value, 'first', among).result()

  def stop(self) -> None:
    """Asks all hosts to abandon work that can be repeated; see `Hosts.stop`."""
    self._send({'stop': True})

  def diagnose(self, error: BaseException) -> BaseException:
    """Returns the cause of an error of this host; see `Hosts.diagnose`.

    The method waits up to `_DIAGNOSIS` seconds to hear of a failed host.
    """
    self._failed.wait(_DIAGNOSIS)
    return self._failure or error

  def fail(self, line: str, exit_code: int) -> None:
    """Tells the other hosts that the run has failed.

    The caller must then end this process. The call returns when the message is
    sent. On host 0, the call also waits until the other hosts have left, but at
    most `_GRACE` seconds.

    Args:
      line: the host that has failed, and the cause.
      exit_code: the exit code with which all hosts end.
    """
    # Two threads may fail at once. The second failure often follows from the
    # first, so only the first failure is sent.
    with self._lock:
      first, self._ending = not self._ending, True
    if first and self._failure is None:
      self._send({'failed': line, 'code': exit_code})
    # At the end of the process, jax's exit handler would wait for hosts that
    # never come. The handler that is registered here runs first.
    atexit.register(interruption.end_process, exit_code)
    self._send({'bye': True})
    self._call(self._close())

  def leave(self) -> None:
    """Leaves the run; every host calls this when it is done."""
    # No host closes its connection before all hosts are done. So a connection
    # that ends earlier always means a lost host.
    self.exchange('the end', None)
    self._ending = True
    if self._server is None:
      self._relay.passes_end = True

  def close(self) -> None:
    """Closes the connection to the coordinator, after `leave`."""
    self._send({'bye': True})
    self._call(self._close())
    self._call(self._stop())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  async def _connect(self, host: str, port: int, timeout: float) -> None:
    """Connects to the coordinator, names this host, and begins to listen."""
    loop = asyncio.get_running_loop()
    began, said = loop.time(), loop.time() + coordinator_lib.FIRST_WAIT
    who = f'process {self.index} of {self.count}'
    while True:
      try:
        reader, writer = await coordinator_lib.connect(host, port)
        break
      except OSError as error:
        if loop.time() - began > timeout:
          raise hosts_lib.HostFailed(
            f'{who} could not reach the coordinator, process 0, at '
            f'{self._address} within {timeout:.0f} s: {error}'
          ) from error
      if loop.time() > said:
        said += coordinator_lib.NEXT_WAIT
        streams.say(
          f'{who} waits for the coordinator, process 0, at {self._address}'
        )
      await asyncio.sleep(coordinator_lib.RETRY)
    self._writer = writer
    name = socket.gethostname()
    if self.collectors:
      name += ', which learns' if self.learns else ', which collects'
    hello = {'process': self.index, 'count': self.count, 'name': name}
    coordinator_lib.send(writer, hello)
    self._clock = coordinator_lib.AwakeClock()
    self._heard = self._clock.now  # time of the coordinator's last message
    self._listener = loop.create_task(self._receive_all(reader))
    if self._server is None:
      self._watching = loop.create_task(self._watch())

  async def _receive_all(self, reader) -> None:
    """Handles the coordinator's messages until the connection ends."""
    # ValueError: the line is too long or is not JSON.
    with contextlib.suppress(OSError, ValueError):
      while line := await reader.readline():
        self._receive(json.loads(line))
    if not self._ending:
      why = 'it was killed, or its machine or network has failed'
      self._end(hosts_lib.HostFailed(f'{self._coordinator} is gone: {why}'))

  async def _watch(self) -> None:
    """Prints that this host waits if the coordinator sends no message.

    If the coordinator stays silent for `patience` seconds, all waits of this
    host end with `HostFailed`, see `_end`.
    """
    said = coordinator_lib.FIRST_WAIT
    while self._failure is None and not self._ending:
      await asyncio.sleep(coordinator_lib.PAUSE)
      self._clock.tick()
      silent = self._clock.now - self._heard - coordinator_lib.ASK_EVERY
      if silent > self._patience:
        line = f'{self._coordinator} failed to answer within '
        self._end(hosts_lib.HostFailed(f'{line}{self._patience:.0f} s'))
      elif silent > said:
        said = silent + coordinator_lib.NEXT_WAIT
        streams.say(f'waiting for {self._coordinator} to answer')
      elif silent < coordinator_lib.FIRST_WAIT:
        said = coordinator_lib.FIRST_WAIT

  @property
  def _coordinator(self) -> str:
    name = self.names[0] and f' ({self.names[0]})'
    return f'host 0{name}, the coordinator,'

  def _receive(self, message: coordinator_lib.Message) -> None:
    self._heard = self._clock.now
    if 'ask' in message:
      coordinator_lib.send(self._writer, {'answer': True})
    elif 'done' in message:
      with self._lock:
        future = self._waiting.pop(message['done'], None)
      if future is not None:
        future.set_result(message['values'])
    elif 'waiting' in message:
      if self._waiting or self.index == 0:
        streams.say(f'waiting {message["waiting"]}')
    elif 'stop' in message:
      # All hosts get the coordinator's messages in the same order. So before a
      # program, either all hosts or no host have the values of the exchange.
      self._stopped = True
      self._end_exchanges(interruption.Interrupted(), coordinator_lib.PROGRAM)
      self.on_stop()
    elif 'failed' in message:
      self._end(hosts_lib.HostFailed(message['failed'], message['code']))

  def _end_exchanges(self, error: BaseException, what: str = '') -> None:
    """Raises an error in threads that wait for some of the exchanges.

    Args:
      error: the error to raise.
      what: the name of these exchanges. The keys of the exchanges begin with
        this name. '': all exchanges.
    """
    with self._lock:
      keys = [key for key in self._waiting if key.startswith(what)]
      futures = [self._waiting.pop(key) for key in keys]
    for future in futures:
      future.set_exception(error)

  def _end(self, failure: hosts_lib.HostFailed) -> None:
    """Ends all waits for other hosts, because the run has failed.

    If this process has not begun to end `grace` seconds later, `_abort` ends
    the process.
    """
    with self._lock:
      if self._failure is not None:
        return
      self._failure = failure
    self._failed.set()
    self._end_exchanges(failure)
    self.on_stop()
    # The main thread may be waiting in a compiled program for a lost host. The
    # main thread then cannot end the process, so another thread does.
    self._loop.call_later(self._grace, self._abort, failure)

  def _abort(self, failure: hosts_lib.HostFailed) -> None:
    if not self._ending:  # the main thread has not begun to end the process
      streams.say(str(failure))
      interruption.end_process(failure.exit_code)

  def _give(
    self, what: str, value: Any, to: str, among: Sequence[int]
  ) -> concurrent.futures.Future:
    if among:
      what += f' of the hosts that {"learn" if self.learns else "collect"}'
    # All hosts make the exchanges of one name in the same order, so equal
    # numbers mean the same exchange.
    number = self._rounds[what] = self._rounds.get(what, -1) + 1
    key = f'{what}/{number}'
    future = self._expect(key)
    self._send({'give': key, 'value': value, 'to': to, 'among': [*among]})
    return future

  def _expect(self, key: str) -> concurrent.futures.Future:
    """Returns the future of the values of an exchange.

    If the run fails, or a stop abandons the exchange, the future gets an error.
    """
    future = concurrent.futures.Future()
    # Because of the lock, a failure comes either before this block, and is seen
    # here, or after this block, and then ends the future.
    with self._lock:
      abandoned = self._stopped and key.startswith(coordinator_lib.PROGRAM)
      if self._failure is None and not abandoned:
        self._waiting[key] = future
        return future
    future.set_exception(self._failure or interruption.Interrupted())
    return future

  async def _close(self) -> None:
    """Sends pending messages; host 0 also waits until all hosts have left."""
    with contextlib.suppress(OSError):
      await self._writer.drain()
    self._writer.close()
    if self._server is not None:
      await self._server.close(_GRACE)

  async def _stop(self) -> None:
    """Closes the relay, and cancels the tasks that are left on the loop.

    Do not call this after a failure: jax aborts a process whose relay is
    closed.
    """
    if self._server is None:
      self._relay.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
      task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

  def _send(self, message: coordinator_lib.Message) -> None:
    self._loop.call_soon_threadsafe(coordinator_lib.send, self._writer, message)

  def _call(self, coroutine: Coroutine) -> Any:
    """Runs a coroutine on the event loop, and waits for its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
