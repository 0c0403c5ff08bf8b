"""Arrays pass between hosts as they are, in order, and to hosts of the run."""

import concurrent.futures
import json
import socket
import threading

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import ml_dtypes
import numpy as np
import pytest

from stppo_jax.parallel import mesh as mesh_lib
from stppo_jax.parallel import transfer


@pytest.fixture
def server():
  made = transfer.Server('127.0.0.1', readers=2)
  yield made
  made.close()


def _assert_equal(ours, theirs):
  assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
  assert ours.tobytes() == theirs.tobytes()


def test_every_reader_reads_the_log_in_order(server):
  arrays = [
    np.arange(6, dtype=np.int32).reshape(2, 3).T,  # not contiguous
    np.array([1.5, np.nan], ml_dtypes.bfloat16),
    np.zeros((0, 4), np.float16),
    np.float32(3.0),
  ]
  server.append({'weights': 1}, arrays)
  readers = [transfer.Client([server.address]) for _ in range(2)]
  for reader in readers:
    (message,) = reader.read()
    assert message.value == {'weights': 1}
    for ours, theirs in zip(message.arrays, arrays, strict=True):
      _assert_equal(ours, theirs)
  # A reader may wait before there is a message.
  with concurrent.futures.ThreadPoolExecutor() as threads:
    waiting = [threads.submit(reader.read) for reader in readers]
    server.append({'step': 1})
    assert [x.result()[0].value for x in waiting] == [{'step': 1}] * 2
    waiting = [threads.submit(reader.read) for reader in readers]
    server.close()
    assert [x.result() for x in waiting] == [None, None]


class _OnDevices:
  """An array whose copy to the host takes until it is told to end."""

  def __init__(self):
    self.begun, self.ends = threading.Event(), threading.Event()
    self.copies = 0

  def __array__(self, dtype=None, copy=None):
    self.copies += 1
    self.begun.set()
    assert self.ends.wait(30)
    return np.arange(3)


def test_the_next_message_does_not_wait_for_a_copy_from_devices(server):
  array = _OnDevices()
  server.append({'weights': 1}, [array])
  readers = [transfer.Client([server.address]) for _ in range(2)]
  with concurrent.futures.ThreadPoolExecutor() as threads:
    reading = [threads.submit(reader.read) for reader in readers]
    assert array.begun.wait(30)
    appended = threads.submit(server.append, {'step': 1})
    try:
      appended.result(10)
    finally:
      array.ends.set()
    for read in reading:
      (message,) = read.result()
      _assert_equal(message.arrays[0], np.arange(3))
  assert array.copies == 1


def test_a_message_waits_in_the_box_until_it_is_taken(server):
  client = transfer.Client([server.address])
  client.put(0, 'step 3', transfer.Message({'rows': 2}, [np.arange(3)]))
  value, (array,) = server.received('step 3').result(10)
  assert value == {'rows': 2}
  _assert_equal(array, np.arange(3))
  server.forget('step 3')
  assert not server.received('step 3').done()


@pytest.mark.parametrize(
  'line',
  [b'{"word": "x", "read": 0}\n', b'{"read": 0}\n', b'[]\n', b'GET / HTTP\n'],
)
def test_strangers_are_told_nothing(server, line):
  server.append({'weights': 1}, [np.ones(3)])
  place = server.address.host, server.address.port
  with socket.create_connection(place) as stranger:
    stranger.sendall(line)
    stranger.shutdown(socket.SHUT_WR)
    assert stranger.recv(1) == b''
  # It serves the others as before.
  (message,) = transfer.Client([server.address]).read()
  assert message.value == {'weights': 1}


@pytest.mark.parametrize('spec', [P(), P('fsdp'), P('fsdp', 'tensor')])
def test_pieces_are_sent_once_and_joined_to_what_they_were(spec):
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  x = np.arange(24.0, dtype=np.float32).reshape(4, 6)
  tree = {'a': {'b': jax.device_put(x, NamedSharding(mesh, spec))}}
  places, pieces = transfer.held(tree)
  assert sum(piece.nbytes for piece in pieces) == x.nbytes
  places = json.loads(json.dumps(places))
  halves = [
    transfer.Message(places[n::2], [np.asarray(x) for x in pieces[n::2]])
    for n in range(2)
  ]
  _assert_equal(transfer.whole(halves)['a']['b'], x)
