"""Limits the connections of a server, and how long headers may take.

A client can hold a connection at no cost by sending nothing, or a byte at a
time, but the connection costs the server a file descriptor. So the headers of a
request must come in time. At the limit of connections, a new connection takes
the place of the connection that has been idle for longest. A connection is idle
unless the server is answering a POST whose body has come. So clients that send
nothing, or are slow to send a body, cannot keep other clients out.
"""

import asyncio
from collections.abc import Callable
import resource
from typing import Any

# The most connections that one pass of the event loop accepts.
ACCEPTED_AT_ONCE = 32


def bounded_by_descriptors(max_connections: int) -> int:
  """Returns `max_connections`, but at most half of the file descriptors.

  The other half of the process's file descriptors is for files, and for new
  connections that are accepted before idle connections are closed.
  """
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY:
    return max_connections
  return min(max_connections, max(soft // 2, 1))


class Connection(asyncio.Protocol):
  """Passes all events on to a protocol, and limits how long headers may take.

  Attributes:
    transport: the transport; set when the client has connected.
    is_busy: whether the server is answering a POST whose body has come.
  """

  transport: Any  # an asyncio.Transport; asyncio declares a wider type

  def __init__(self, connections: 'Connections', protocol: asyncio.Protocol):
    self._connections = connections
    self._protocol = protocol
    self._timer: asyncio.TimerHandle | None = None
    self._has_request = self.is_busy = False

  def connection_made(self, transport) -> None:
    self.transport = transport
    self._protocol.connection_made(transport)
    if self._connections.add(self):
      self._wait()
    else:
      self.transport.abort()

  def connection_lost(self, exc: Exception | None) -> None:
    self._stop_waiting()
    self._connections.remove(self)
    self._protocol.connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    if not self._has_request and self._timer is None:
      self._wait()  # a connection that was kept open begins another request
    self._protocol.data_received(data)

  def eof_received(self) -> bool | None:
    return self._protocol.eof_received()

  def pause_writing(self) -> None:
    self._protocol.pause_writing()

  def resume_writing(self) -> None:
    self._protocol.resume_writing()

  def begin_request(self) -> None:
    """Notes that the headers of a request have come."""
    self._stop_waiting()
    self._has_request = True

  def end_request(self) -> None:
    """Notes that the request has been answered."""
    self._has_request = False
    self._connections.touch(self)

  def _wait(self) -> None:
    self._timer = asyncio.get_running_loop().call_later(
      self._connections.header_timeout, self.transport.abort
    )

  def _stop_waiting(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None


class Connections:
  """The open connections of one server, in one event loop."""

  def __init__(self, *, max_connections: int, header_timeout: float):
    """Makes an empty table.

    Args:
      max_connections: the most connections; half of the process's file
        descriptors is another limit.
      header_timeout: seconds that a client may take to send the headers of a
        request. The time of the first request of a connection begins when the
        client connects. The time of a later request begins with its first byte.
    """
    self.header_timeout = header_timeout
    self._max_connections = bounded_by_descriptors(max_connections)
    # Ordered by activity, the least recently active connection first.
    self._open: dict[asyncio.BaseTransport, Connection] = {}

  def guard(
    self, make_protocol: Callable[[], asyncio.Protocol]
  ) -> Callable[[], asyncio.Protocol]:
    """Returns a factory that puts a `Connection` around each protocol."""
    return lambda: Connection(self, make_protocol())

  def find(self, transport: asyncio.BaseTransport | None) -> Connection | None:
    """Returns the connection of a transport; None if the client has gone."""
    return self._open.get(transport) if transport else None

  def add(self, connection: Connection) -> bool:
    """Adds a connection; returns whether the table had a place for it.

    If the table is full, the connection that has been idle for longest is
    closed to make a place. A table that is full of busy connections has no
    place.
    """
    if len(self._open) >= self._max_connections:
      idle = (c for c in self._open.values() if not c.is_busy)
      oldest = next(idle, None)
      if oldest is None:
        return False
      self.remove(oldest)
      # Unlike `abort`, `close` would wait until the client has read all data.
      oldest.transport.abort()
    self._open[connection.transport] = connection
    return True

  def remove(self, connection: Connection) -> None:
    self._open.pop(connection.transport, None)

  def touch(self, connection: Connection) -> None:
    """Marks a connection as the most recently active connection."""
    if self._open.pop(connection.transport, None) is not None:
      self._open[connection.transport] = connection
