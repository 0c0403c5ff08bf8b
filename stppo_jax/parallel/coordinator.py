"""Lets the processes of a run connect, agree, and hear of lost processes.

The coordinator is a server in process 0, at an address that all processes know.
Every process, including process 0, keeps a connection to it and sends:

    {"process": 1, "count": 4, "name": "worker-1"}    I am process 1 of 4
    {"give": "vote/3", "value": ..., "to": "all",
     "among": []}                                     my value of an exchange
    {"stop": true}                                    abandon repeatable work
    {"failed": "host 1 ...", "code": 70}              the run cannot go on
    {"answer": true}                                  I am alive
    {"bye": true}                                     I am done

`to` is 'all' or 'first': the processes that get the values. `among` has the
numbers of the processes that take part; [] for all. The coordinator sends:

    {"waiting": "for host 2, host 3 ..."}             these hosts are late
    {"done": "met", "values": ["worker-0", ...]}      all are connected
    {"done": "vote/3", "values": [...]}               all values of an exchange
    {"ask": true}                                     are you alive?
    {"stop": true}, {"failed": "...", "code": 75}     passed on to everybody

A message is a line of JSON. The connection of a killed process ends, and the
coordinator at once names the lost process to all others. A process that is
stopped, or whose machine hangs, keeps its connection, but does not answer.

jax has its own coordinator, which XLA needs. Its key-value store and barriers
could carry the exchanges, but do not handle failures. A wait in jax cannot be
ended from outside, so a host would hear of a signal or a failure of another
host only at the time-out. A jax client that loses jax's coordinator aborts its
process with a stack trace that names no host, even with
`jax_enable_recoverability`. So each process other than process 0 has a relay,
to which its jax client connects. The relay passes bytes on to this coordinator,
which passes them on to jax's coordinator. If process 0 is lost, the relay keeps
the client's connection open.
"""

import asyncio
from collections.abc import Callable, Container, Sequence
import contextlib
import dataclasses
import json
import socket
import time
from typing import Any, NamedTuple

from stppo_jax import exits

# The name of the exchange that precedes a program which either all hosts or no
# host may call. A stop abandons only exchanges of this name.
PROGRAM = 'the next program'
JAX = b'jax\n'  # the first line of a connection that is relayed
# Suppressed errors of a connection's task. asyncio would log a cancelled task.
_ENDS = (OSError, asyncio.CancelledError)
_LIMIT = 1 << 28  # the most bytes of a message
_CHUNK = 1 << 16  # the most bytes that a relay reads at once
# Seconds until a waiting process prints which hosts it waits for, and seconds
# until the process prints the line again.
FIRST_WAIT, NEXT_WAIT = 5.0, 60.0
PAUSE = 0.5  # seconds between two checks for late processes
ASK_EVERY = 5.0  # seconds between two questions whether a process is alive
RETRY = 0.1  # seconds between two attempts to connect
# Linux probes a silent connection after 5 seconds, and ends it 15 seconds
# later. Nothing else ends the connections of a machine that has lost its power.
_KEEPALIVE = {'TCP_KEEPIDLE': 5, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 3}

Message = dict[str, Any]


class AwakeClock:
  """Counts the seconds in which this process was awake.

  A process that was itself stopped for hours must not conclude that the other
  processes were silent for hours.

  Args:
    clock: a function that returns the time in seconds.

  Attributes:
    now: the awake seconds until the last `tick`.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self.now = 0.0
    self._clock, self._last = clock, clock()

  def tick(self) -> None:
    """Adds the time since the last call, but at most 4 times `PAUSE`.

    A longer gap means that the process was stopped, since a call is due every
    `PAUSE` seconds.
    """
    last, self._last = self._last, self._clock()
    self.now += min(self._last - last, 4 * PAUSE)


class _Member(NamedTuple):
  """Describes a connected process."""

  name: str
  writer: asyncio.StreamWriter


@dataclasses.dataclass(eq=False, kw_only=True)
class Coordinator:
  """Serves all processes from process 0, on one event loop.

  Attributes:
    address: the host name and port of the coordinator, for messages.
    count: the number of processes.
    jax_port: the port of jax's coordinator on this machine.
    start_timeout: seconds to wait until all processes are connected.
    patience: the most seconds that the first process of an exchange waits for
      the last, and the most seconds that a process may take to answer.
  """

  address: str
  count: int
  jax_port: int
  start_timeout: float
  patience: float

  def __post_init__(self):
    self._members: dict[int, _Member] = {}
    self._left: set[int] = set()  # processes that sent `bye` or are gone
    # Key of each unfinished exchange -> when it began, the processes that take
    # part in it, and the values so far.
    self._given: dict[str, tuple[float, Sequence[int], dict[int, Any]]] = {}
    self._asked: dict[int, float] = {}  # process -> when it was asked
    # Line -> the seconds of waiting after which the line is printed again.
    self._said: dict[str, float] = {}
    self._clock = AwakeClock()
    self._failed = self._stopped = False
    self._all_left = asyncio.Event()

  async def start(self, host: str, port: int) -> None:
    """Listens at the first of a host name's addresses that can be bound.

    Raises:
      OSError: the name is not known, or the port is in use.
    """
    errors = []
    for place in addresses(host):
      try:
        self._server = await asyncio.start_server(
          self._serve, place, port, limit=_LIMIT
        )
        break
      except OSError as error:
        errors.append(error)
    else:
      raise errors[0]
    self._watching = asyncio.create_task(self._watch())

  async def close(self, seconds: float) -> None:
    """Waits, at most `seconds`, until all processes have left, and closes."""
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self._all_left.wait(), seconds)
    self._server.close()
    self._watching.cancel()

  async def _serve(self, reader, writer) -> None:
    keep_alive(writer)
    with contextlib.closing(writer):
      # A peer that sends no valid message does not belong to the run, so its
      # errors are ignored.
      with contextlib.suppress(*_ENDS, ValueError, KeyError, TypeError):
        first = await reader.readline()
        if first == JAX:
          await self._relay(reader, writer)
        elif first:
          await self._join(json.loads(first), reader, writer)

  async def _relay(self, reader, writer) -> None:
    """Waits for jax's coordinator, and connects a client of jax with it."""
    while True:
      try:
        inner = await asyncio.open_connection('127.0.0.1', self.jax_port)
        break
      except ConnectionRefusedError:
        await asyncio.sleep(RETRY)
    # When one direction ends, `pump` ends the other direction.
    with contextlib.closing(inner[1]):
      await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer))

  async def _join(self, hello: Message, reader, writer) -> None:
    """Serves a process from its first message to its last."""
    process, count, name = hello['process'], hello['count'], hello['name']
    refusal, code = '', exits.USAGE
    if count != self.count:
      refusal = f'{self.count} processes are expected, not {count}'
    elif process in self._left:
      # The process was started again before the other processes had ended.
      refusal = f'the run there, which host {process} has left, is about to end'
      code = exits.TRY_AGAIN
    elif not 0 <= process < count or process in self._members:
      taken = self._members.get(process)
      by = f'taken by {taken.name} already' if taken else 'out of range'
      refusal = f'--process_id={process} is {by}'
    if refusal:
      send(writer, {'failed': f'{self.address}: {refusal}', 'code': code})
      return
    self._members[process] = _Member(name, writer)
    if len(self._members) == self.count:
      names = [self._members[n].name for n in range(self.count)]
      self._broadcast({'done': 'met', 'values': names})
    # If a line is no message, the process cannot be trusted to answer. So its
    # connection ends, and the other processes hear that the process is gone.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
      while line := await reader.readline():
        self._receive(process, json.loads(line))
    self._leave(process)

  def _receive(self, process: int, message: Message) -> None:
    """Handles a message of a process."""
    # Any message shows that the process is alive, and so counts as an answer.
    self._asked.pop(process, None)
    if 'give' in message:
      self._give(process, message)
    elif 'stop' in message:
      self._stopped = True
      self._broadcast(message)
    elif 'failed' in message:
      self._fail(message['failed'], message['code'])
    elif 'bye' in message:
      self._note_left(process)

  def _give(self, process: int, message: Message) -> None:
    """Adds a process's value to an exchange; the last value completes it."""
    key, among = message['give'], message['among'] or range(self.count)
    *_, parts = self._given.setdefault(key, (self._clock.now, among, {}))
    parts[process] = message['value']
    if len(parts) == len(among):
      del self._given[key]
      values = [parts[n] for n in among]
      for n in among:
        to_it = message['to'] == 'all' or n == among[0]
        done = {'done': key, 'values': values if to_it else None}
        send(self._members[n].writer, done)

  def _leave(self, process: int) -> None:
    if process not in self._left:
      self._fail(
        f'{self.describe(process)} is gone: it was killed, or its machine or '
        'network has failed',
        exits.TRY_AGAIN,
      )
    self._note_left(process)

  def _note_left(self, process: int) -> None:
    self._left.add(process)
    self._asked.pop(process, None)
    if len(self._left) == self.count:
      self._all_left.set()

  def _fail(self, line: str, code: int) -> None:
    """Sends the first failure to all, and drops later failures."""
    if not self._failed:
      self._failed = True
      self._broadcast({'failed': line, 'code': code})

  def _broadcast(self, message: Message) -> None:
    for member in self._members.values():
      send(member.writer, message)

  async def _watch(self) -> None:
    """Names late processes to all, and fails the run at the time limits."""
    clock = self._clock
    started = asked = clock.now
    while not self._failed:
      await asyncio.sleep(PAUSE)
      clock.tick()
      if clock.now - asked > ASK_EVERY:
        asked = clock.now
        # A process that still owes an answer is not asked again.
        silent = self._members.keys() - self._left - self._asked.keys()
        for process in silent:
          self._asked[process] = asked
          send(self._members[process].writer, {'ask': True})
      shortest = min(FIRST_WAIT, self.patience)
      waits = [
        (since, self.patience, 'to answer', self.describe(process))
        for process, since in self._asked.items()
        if clock.now - since > shortest
      ]
      if missing := self._missing(range(self.count), self._members):
        line = f'to connect to {self.address}'
        waits.append((started, self.start_timeout, line, missing))
      for key, (since, among, parts) in self._given.items():
        if self._stopped and key.startswith(PROGRAM):
          continue  # the stop has abandoned this exchange
        line = f'to join the others ({key.rpartition("/")[0]})'
        missing = self._missing(among, parts)
        waits.append((since, self.patience, line, missing))
      for since, patience, line, late in waits:
        waited = clock.now - since
        if waited > patience:
          self._fail(
            f'{late} failed {line} within {patience:.0f} s', exits.TRY_AGAIN
          )
          break
        line = f'{late} {line}'
        if waited > self._said.get(line, FIRST_WAIT):
          self._said[line] = waited + NEXT_WAIT
          self._broadcast({'waiting': f'for {line}'})
      if not waits:
        self._said.clear()

  def _missing(self, of: Sequence[int], present: Container[int]) -> str:
    """Returns the processes in `of` but not in `present`, as text."""
    return ', '.join(self.describe(n) for n in of if n not in present)

  def describe(self, process: int) -> str:
    """Returns a process's number and, once known, the name of its machine."""
    member = self._members.get(process)
    return f'host {process}' + (f' ({member.name})' if member else '')


class Relay:
  """Forwards a port of this machine to jax's coordinator in process 0.

  Attributes:
    passes_end: whether the connections to jax on this machine end if process 0
      ends. If they end, jax aborts this process. If they stay open, jax waits.
  """

  def __init__(self, host: str, port: int):
    self._coordinator = host, port
    self.passes_end = False

  async def start(self) -> int:
    """Listens on a free port, and returns the port."""
    self._server = await asyncio.start_server(self._serve, '127.0.0.1', 0)
    return self._server.sockets[0].getsockname()[1]

  def close(self) -> None:
    """Stops listening."""
    self._server.close()

  async def _serve(self, reader, writer) -> None:
    with contextlib.closing(writer), contextlib.suppress(*_ENDS):
      outer = await asyncio.open_connection(*self._coordinator)
      with contextlib.closing(outer[1]):
        keep_alive(outer[1])
        outer[1].write(JAX)
        await asyncio.gather(
          pump(reader, outer[1]),
          pump(outer[0], writer, ends=lambda: self.passes_end),
        )
      # Process 0 is gone. The bytes that jax still sends to it are dropped.
      while await reader.read(_CHUNK):
        pass


async def pump(reader, writer, *, ends=lambda: True) -> None:
  """Copies bytes until a side ends; closes the writer if `ends()` is true."""
  with contextlib.suppress(OSError):
    while data := await reader.read(_CHUNK):
      writer.write(data)
      await writer.drain()
  if ends():
    writer.close()


async def connect(host: str, port: int):
  """Opens a connection for messages; see `asyncio.open_connection`."""
  reader, writer = await asyncio.open_connection(host, port, limit=_LIMIT)
  keep_alive(writer)
  return reader, writer


def send(writer: asyncio.StreamWriter, message: Message) -> None:
  """Sends a message; does nothing if the connection is closing."""
  if not writer.is_closing():
    writer.write(json.dumps(message).encode() + b'\n')


def keep_alive(writer: asyncio.StreamWriter) -> None:
  """Makes the system end a connection whose other machine is gone."""
  connection = writer.get_extra_info('socket')
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  for name, value in _KEEPALIVE.items():
    if hasattr(socket, name):  # some systems lack these options
      option = getattr(socket, name)
      connection.setsockopt(socket.IPPROTO_TCP, option, value)


def addresses(host: str) -> Sequence[str]:
  """Returns, in order, the addresses that a server of a host tries to bind.

  For a loopback name, only the loopback address is returned, so that no other
  machine can connect. Any other name may belong to a gateway that passes
  connections on, and whose address cannot be bound here. So for any other name,
  '' comes second, which means all addresses of this machine.
  """
  resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  first = str(resolved[0][4][0])
  loopback = first.startswith('127.') or first == '::1'
  return [first] if loopback else [first, '']
