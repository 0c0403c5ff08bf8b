"""Lets the processes of a run meet, agree, and hear of lost ones.

It is a server in process 0, at the address that all processes know. Every
process, process 0 too, keeps a connection to it as long as it lives:

    {"process": 1, "count": 4, "name": "worker-1"}    I am here
    {"give": "vote/3", "value": ..., "to": "all",
     "among": []}                                     my part of an exchange
    {"stop": true}                                    abandon what can be
    {"failed": "host 1 ...", "code": 70}              the run cannot go on
    {"answer": true}                                  I am alive
    {"bye": true}                                     I am done

    {"waiting": "for host 2, host 3 ..."}             who is missing
    {"done": "met", "values": ["worker-0", ...]}      all are here
    {"done": "vote/3", "values": [...]}               all parts of an exchange
    {"ask": true}                                     are you alive?
    {"stop": true}, {"failed": "...", "code": 75}     for everybody

A message is a line of JSON. A process that is killed loses its connection, so
the others hear of it at once, and by name. One that is stopped, or whose
machine hangs, keeps it, but answers nothing any more.

jax has a coordinator too, which XLA needs. Its store of keys and its barriers
would do for the exchanges, but not for their failures: a wait cannot be ended
from outside, so neither a signal nor a failure of another host would be heard
before its time-out; and a client that loses the coordinator aborts the process,
with a stack trace and without a name, also with `jax_enable_recoverability`. So
jax's clients reach jax's coordinator through the same port, by relays that stay
open when process 0 is gone.
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

# The name of exchanges before a program that no host may call without the
# others. A stop abandons these exchanges, and no others.
PROGRAM = 'the next program'
JAX = b'jax\n'  # the first line of a connection that is relayed
# How the task of a connection ends; asyncio would log a cancelled one.
_ENDS = (OSError, asyncio.CancelledError)
_LIMIT = 1 << 28  # bytes of a message
_CHUNK = 1 << 16
# Seconds until a process that waits says for whom, and between two such lines.
FIRST_WAIT, NEXT_WAIT = 5.0, 60.0
PAUSE = 0.5  # seconds between two looks at who is late
ASK_EVERY = 5.0  # seconds between two questions whether a process is alive
RETRY = 0.1  # seconds between two attempts to connect
# Linux probes a silent connection after 5 seconds, and gives it up 15 seconds
# later. Nothing else ends the connections of a machine that has lost its power.
_KEEPALIVE = {'TCP_KEEPIDLE': 5, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 3}

Message = dict[str, Any]


class AwakeClock:
  """Counts the seconds in which this process was awake.

  A process that was stopped for hours must not take these hours for a silence
  of the others.

  Args:
    clock: returns seconds.

  Attributes:
    now: the seconds so far, up to the last `tick`.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self.now = 0.0
    self._clock, self._last = clock, clock()

  def tick(self) -> None:
    """Adds the time since the last call, which is due every `PAUSE` seconds."""
    last, self._last = self._last, self._clock()
    self.now += min(self._last - last, 4 * PAUSE)


class _Member(NamedTuple):
  """Describes a process that is connected."""

  name: str
  writer: asyncio.StreamWriter


@dataclasses.dataclass(eq=False, kw_only=True)
class Coordinator:
  """Serves all processes from process 0, on one event loop.

  Attributes:
    address: where the processes find it, for the lines that they print.
    count: the number of processes.
    jax_port: the port of jax's coordinator on this machine.
    start_timeout: seconds to wait until all processes have come.
    patience: seconds that a process may come later than others to an exchange,
      and that it may take to answer.
  """

  address: str
  count: int
  jax_port: int
  start_timeout: float
  patience: float

  def __post_init__(self):
    self._members: dict[int, _Member] = {}
    self._left: set[int] = set()  # said goodbye, or are gone
    # Each exchange that has begun: since when, among whom, the parts so far.
    self._given: dict[str, tuple[float, Sequence[int], dict[int, Any]]] = {}
    self._asked: dict[int, float] = {}  # process -> when it was asked
    self._said: dict[str, float] = {}  # line -> when it is said again
    self._clock = AwakeClock()
    self._failed = self._stopped = False
    self._all_left = asyncio.Event()

  async def start(self, host: str, port: int) -> None:
    """Listens at the first address of a name that is possible.

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
    """Waits until all processes have left, but not for ever, and ends."""
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(self._all_left.wait(), seconds)
    self._server.close()
    self._watching.cancel()

  async def _serve(self, reader, writer) -> None:
    keep_alive(writer)
    with contextlib.closing(writer):
      # A peer that sends anything else does not belong to the run.
      with contextlib.suppress(*_ENDS, ValueError, KeyError, TypeError):
        first = await reader.readline()
        if first == JAX:
          await self._relay(reader, writer)
        elif first:
          await self._join(json.loads(first), reader, writer)

  async def _relay(self, reader, writer) -> None:
    """Connects a client of jax with jax's coordinator, once that listens."""
    while True:
      try:
        inner = await asyncio.open_connection('127.0.0.1', self.jax_port)
        break
      except ConnectionRefusedError:
        await asyncio.sleep(RETRY)
    # When one direction ends, `pump` ends the other.
    with contextlib.closing(inner[1]):
      await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer))

  async def _join(self, hello: Message, reader, writer) -> None:
    """Serves a process from its first message to its last."""
    process, count, name = hello['process'], hello['count'], hello['name']
    refusal, code = '', exits.USAGE
    if count != self.count:
      refusal = f'{self.count} processes are expected, not {count}'
    elif process in self._left:
      # The host was started again before the others have ended.
      refusal = f'the run that host {process} has left is about to end'
      code = exits.TRY_AGAIN
    elif not 0 <= process < count or process in self._members:
      taken = self._members.get(process)
      by = f'by {taken.name} already' if taken else 'by no process'
      refusal = f'--process_id={process} is taken {by}'
    if refusal:
      send(writer, {'failed': f'{self.address}: {refusal}', 'code': code})
      return
    self._members[process] = _Member(name, writer)
    if len(self._members) == self.count:
      names = [self._members[n].name for n in range(self.count)]
      self._broadcast({'done': 'met', 'values': names})
    # A line that is not a message ends the connection, and the others hear that
    # the process is gone: it could not be trusted to answer any more.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
      while line := await reader.readline():
        self._receive(process, json.loads(line))
    self._leave(process)

  def _receive(self, process: int, message: Message) -> None:
    """Handles a message of a process, which is a sign of life as well."""
    # Any message will do: a host that exchanges is alive, and need not answer.
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
    """Adds the part of a process to an exchange, which ends with the last."""
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
    """Tells everybody the first failure; others may follow from it."""
    if not self._failed:
      self._failed = True
      self._broadcast({'failed': line, 'code': code})

  def _broadcast(self, message: Message) -> None:
    for member in self._members.values():
      send(member.writer, message)

  async def _watch(self) -> None:
    """Says which hosts are waited for, and gives up those that are too late."""
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
        line = f'to come to {self.address}'
        waits.append((started, self.start_timeout, line, missing))
      for key, (since, among, parts) in self._given.items():
        if self._stopped and key.startswith(PROGRAM):
          continue  # nobody waits for it any more
        line = f'to come to the others ({key.rpartition("/")[0]})'
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
    """Returns the processes that are not present; '' if all are."""
    return ', '.join(self.describe(n) for n in of if n not in present)

  def describe(self, process: int) -> str:
    """Returns a process with the name of its machine, if it is known."""
    member = self._members.get(process)
    return f'host {process}' + (f' ({member.name})' if member else '')


class Relay:
  """Leads from a port of this machine to jax's coordinator in process 0.

  Attributes:
    passes_end: whether the end of process 0 ends the connections too. As long
      as it does not, jax waits where it would abort the process.
  """

  def __init__(self, host: str, port: int):
    self._coordinator = host, port
    self.passes_end = False

  async def start(self) -> int:
    """Listens, and returns the port."""
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
      # Process 0 is gone. What jax still sends to it is dropped.
      while await reader.read(_CHUNK):
        pass


async def pump(reader, writer, *, ends=lambda: True) -> None:
  """Copies bytes until one side ends, and then ends the other if `ends()`."""
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
  """Sends a message; without an error if the other side is gone."""
  if not writer.is_closing():
    writer.write(json.dumps(message).encode() + b'\n')


def keep_alive(writer: asyncio.StreamWriter) -> None:
  """Lets the system notice that the machine of the other side is gone."""
  connection = writer.get_extra_info('socket')
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  for name, value in _KEEPALIVE.items():
    if hasattr(socket, name):  # some systems lack these options
      option = getattr(socket, name)
      connection.setsockopt(socket.IPPROTO_TCP, option, value)


def addresses(host: str) -> Sequence[str]:
  """Returns the addresses to listen at, the best first.

  A loopback name is bound to loopback, so that no other machine can connect. A
  name may lead to a gateway that passes connections on, so the second choice is
  every address of this machine.
  """
  resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  first = str(resolved[0][4][0])
  loopback = first.startswith('127.') or first == '::1'
  return [first] if loopback else [first, '']
