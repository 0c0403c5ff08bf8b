"""Sends arrays between hosts over TCP, outside of compiled programs.

A host that learns has a `Server`, and a host that only collects has a `Client`.
The server keeps a log of messages, such as weights, which every client reads in
order. The server also keeps a box into which clients put messages, such as
dialogues. A compiled program on the devices of both hosts would send arrays
faster, but both hosts would have to interrupt their work at the same time to
call it. Here no host waits for a reader: weights are sent while both hosts
compute.

A message is a line of JSON with a value and the dtypes and shapes of arrays,
followed by the bytes of the arrays. Nothing is unpickled. A connection carries
one message. The first line of a connection contains a secret word that only the
hosts of the run know:

    {"word": ..., "read": 7}            send me message 7 of the log when it
                                        exists
    {"word": ..., "put": "3 from 1"}    a message for the box follows, with the
                                        key "3 from 1"

If a host is lost, its connections end, and no error is raised or printed here.
The coordinator reports the lost host.
"""

from collections.abc import Mapping, Sequence
import concurrent.futures
import contextlib
import hmac
import io
import json
import secrets
import socket
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from stppo_jax.parallel import coordinator

Tree = Any
_LINE = 1 << 26  # the most bytes of a message's line of JSON


class Message(NamedTuple):
  """A message: a value and arrays.

  Attributes:
    value: a value that JSON can write.
    arrays: numpy arrays, or arrays on devices of this host.
  """

  value: Any
  arrays: Sequence[Any]


class Address(NamedTuple):
  """Says how a client reaches a server.

  Attributes:
    host: the name or address of the host.
    port: the port.
    word: the secret word in the first line of a connection.
  """

  host: str
  port: int
  word: str


class Server:
  """Serves the log and the box of one host, as the module describes.

  Args:
    host: the name or address at which other hosts reach this host.
    readers: the number of hosts that read each message of the log.

  Attributes:
    address: the address of this server, for clients.
  """

  def __init__(self, host: str, readers: int):
    for place in coordinator.addresses(host):
      family = socket.AF_INET6 if ':' in place else socket.AF_INET
      with contextlib.suppress(OSError):
        self._socket = socket.create_server((place, 0), family=family)
        break
    else:
      raise OSError(f'{host}: this machine cannot listen at this address')
    port = self._socket.getsockname()[1]
    self.address = Address(host, port, secrets.token_hex())
    self._readers = readers
    self._changed, self._copying = threading.Condition(), threading.Lock()
    self._is_closed = False
    # A message that every reader has read is replaced with None.
    self._log: list[Message | None] = []
    self._reads: list[int] = []  # for each message, how many hosts have read it
    self._box: dict[str, concurrent.futures.Future[Message]] = {}
    self._connections: set[socket.socket] = set()
    threading.Thread(target=self._accept, daemon=True).start()

  def append(self, value: Any, arrays: Sequence[Any] = ()) -> None:
    """Adds a message to the log.

    Args:
      value, arrays: see `Message`; arrays on devices are copied to the memory
        of this host when the first client reads the message.
    """
    with self._changed:
      self._log.append(Message(value, arrays))
      self._reads.append(0)
      self._changed.notify_all()

  def received(self, key: str) -> 'concurrent.futures.Future[Message]':
    """Returns the future of the message that a client puts into the box.

    Args:
      key: the key that the client gives to the message.
    """
    with self._changed:
      return self._box.setdefault(key, concurrent.futures.Future())

  def forget(self, key: str) -> None:
    """Removes the message with this key from the box."""
    with self._changed:
      self._box.pop(key, None)

  def close(self) -> None:
    """Ends all connections; `Client.read` then returns None."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
    for connection in (self._socket, *self._connections):
      _end(connection)
    self._socket.close()

  def _accept(self) -> None:
    # After `close`, `accept` raises an OSError.
    with contextlib.suppress(OSError):
      while True:
        connection, _ = self._socket.accept()
        self._connections.add(connection)
        threading.Thread(
          target=self._serve, args=(connection,), daemon=True
        ).start()

  def _serve(self, connection: socket.socket) -> None:
    # A peer whose first line is not valid does not belong to the run, so its
    # errors are ignored.
    with (
      connection,
      connection.makefile('rb') as reader,
      contextlib.suppress(OSError, ValueError, KeyError, TypeError),
    ):
      asked = json.loads(reader.readline(_LINE))
      is_known = hmac.compare_digest(asked['word'], self.address.word)
      if is_known and 'put' in asked:
        self.received(asked['put']).set_result(_receive(reader))
      elif is_known:
        self._send_logged(asked['read'], connection)
    self._connections.discard(connection)

  def _send_logged(self, number: int, connection: socket.socket) -> None:
    """Waits until a message of the log exists, and sends the message.

    If the server is closed, nothing is sent.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._is_closed or len(self._log) > number)
      message = None if self._is_closed else self._log[number]
    if message is None:
      return
    # For the first reader, the arrays are copied to the memory of this host.
    # Later readers get the same copy, and the devices can free the arrays.
    # `_changed` is not held during the copy, so that the thread which appends
    # the next message does not wait.
    with self._copying:
      message = self._log[number] or message
      arrays = [np.asarray(x) for x in message.arrays]
      self._log[number] = message = Message(message.value, arrays)
    _send(connection, message)
    with self._changed:
      self._reads[number] += 1
      if self._reads[number] == self._readers:
        self._log[number] = None


class Client:
  """Reads the logs of several servers, message by message.

  Messages that have the same number in their logs belong together, such as the
  pieces of the same weights.

  Args:
    addresses: the addresses of the servers.
  """

  def __init__(self, addresses: Sequence[Address]):
    self._addresses = addresses
    self._next = 0
    self._threads = concurrent.futures.ThreadPoolExecutor(len(addresses))
    self._reading: set[socket.socket] = set()

  def read(self) -> list[Message] | None:
    """Returns the next message of each log; None if a log has ended."""
    number, self._next = self._next, self._next + 1
    read = [
      self._threads.submit(self._read, address, number)
      for address in self._addresses
    ]
    try:
      return [future.result() for future in read]
    except OSError:
      return None

  def put(self, server: int, key: str, message: Message) -> None:
    """Puts a message into a server's box, unless the server is gone."""
    with contextlib.suppress(OSError):
      connection = self._connect(self._addresses[server], {'put': key})
      with connection:
        _send(connection, message)

  def close(self) -> None:
    """Ends a `read` in which another thread may be waiting."""
    for connection in list(self._reading):
      _end(connection)
    self._threads.shutdown(cancel_futures=True)

  def _read(self, address: Address, number: int) -> Message:
    connection = self._connect(address, {'read': number})
    self._reading.add(connection)
    with connection, connection.makefile('rb') as reader:
      try:
        return _receive(reader)
      finally:
        self._reading.discard(connection)

  def _connect(
    self, address: Address, asked: Mapping[str, Any]
  ) -> socket.socket:
    connection = socket.create_connection((address.host, address.port))
    line = json.dumps({'word': address.word, **asked})
    try:
      connection.sendall(line.encode() + b'\n')
    except OSError:  # the server was closed after the connection was made
      connection.close()
      raise
    return connection


def held(tree: Tree) -> tuple[list[Any], list[jax.Array]]:
  """Returns the pieces of arrays that this host has to send.

  If several devices, perhaps of several hosts, hold the same piece, only one of
  these devices sends the piece.

  Args:
    tree: nested dicts of global arrays.

  Returns:
    Two lists. The first has, for each piece, the path, dtype and shape of its
    array, and the piece's begin and end in each dimension. The second has the
    pieces.
  """
  places, pieces = [], []
  for path, x in jax.tree.leaves_with_path(tree):
    names = [key.key for key in path]
    for shard in x.addressable_shards:
      if shard.replica_id == 0:
        bounds = [
          part.indices(size)[:2] for part, size in zip(shard.index, x.shape)
        ]
        places.append([names, x.dtype.name, x.shape, bounds])
        pieces.append(shard.data)
  return places, pieces


def whole(messages: Sequence[Message]) -> Tree:
  """Returns numpy arrays that are assembled from the pieces of several hosts.

  Args:
    messages: one message from each host; its value and its arrays are the two
      results of `held`.
  """
  found: dict[tuple, np.ndarray] = {}
  for places, pieces in messages:
    for (names, dtype, shape, bounds), piece in zip(
      places, pieces, strict=True
    ):
      # A piece that is the whole array needs no copy.
      if piece.shape == tuple(shape):
        found[tuple(names)] = piece
        continue
      if tuple(names) not in found:
        found[tuple(names)] = np.empty(shape, np.dtype(dtype))
      part = tuple(slice(*bound) for bound in bounds)
      found[tuple(names)][part] = piece
  tree: dict = {}
  for (*folders, name), x in found.items():
    inner = tree
    for folder in folders:
      inner = inner.setdefault(folder, {})
    inner[name] = x
  return tree


def _send(connection: socket.socket, message: Message) -> None:
  arrays = [np.asarray(x, order='C') for x in message.arrays]
  kinds = [(x.dtype.name, x.shape) for x in arrays]
  line = json.dumps({'value': message.value, 'arrays': kinds}).encode() + b'\n'
  for data in (line, *(x.reshape(-1).view(np.uint8).data for x in arrays)):
    connection.sendall(data)


def _receive(stream: io.BufferedReader) -> Message:
  line = stream.readline(_LINE)
  if not line.endswith(b'\n'):
    raise ConnectionError('the connection has ended')
  described, arrays = json.loads(line), []
  for dtype, shape in described['arrays']:
    x = np.empty(shape, np.dtype(dtype))
    data = x.reshape(-1).view(np.uint8).data
    if stream.readinto(data) != len(data):
      raise ConnectionError('the connection has ended')
    arrays.append(x)
  return Message(described['value'], arrays)


def _end(connection: socket.socket) -> None:
  """Ends a connection on which another thread may be waiting."""
  with contextlib.suppress(OSError):
    connection.shutdown(socket.SHUT_RDWR)
