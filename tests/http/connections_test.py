"""Clients that are silent, slow or gone take nothing from the others."""

import contextlib
import json
import logging
import resource
import socket
import time
from urllib import parse

import pytest

from stppo_jax.http import connections
from tests.http import requests

_POST = b'POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n'
_BUSY = _POST.replace(b'9', b'16') + b'{"seconds": 0.4}'


def _connect(stack, server, data=b''):
  parts = parse.urlsplit(server.url)
  client = stack.enter_context(
    socket.create_connection((parts.hostname, parts.port), timeout=10)
  )
  client.sendall(data)
  return client


def _request(server, method='GET', path='/health', body=None):
  """Returns (status, fields) of one request."""
  status, _, text = requests.send(server.url, path, body, method=method)
  return status, json.loads(text)


def _is_closed(client):
  try:
    return client.recv(1000) == b''
  except ConnectionError:
    return True


def test_silent_clients_do_not_keep_others_out(caplog):
  """Three hundred of them, and a process that may open 256 files."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  with contextlib.ExitStack() as stack:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
      server = stack.enter_context(requests.serve(header_timeout=60.0))
    finally:
      # The clients are in this process too.
      resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    clients = [
      _connect(stack, server, data)
      for data in (b'', b'GET', _POST)
      for _ in range(100)
    ]
    for _ in range(3):
      assert _request(server) == (200, {'status': 'ok'})
    assert _is_closed(clients[0])
    clients[-1].sendall(b'{"a": 12}')
    assert clients[-1].recv(1000).startswith(b'HTTP/1.1 200')
  assert not caplog.records


def test_a_busy_connection_is_kept():
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(requests.serve(max_connections=2))
    busy = _connect(stack, server, _BUSY)
    idle = _connect(stack, server)
    time.sleep(0.1)  # Both have been accepted, and the first one is busy.
    assert _request(server)[0] == 200
    assert _is_closed(idle)
    assert busy.recv(1000).startswith(b'HTTP/1.1 200')


def test_if_all_are_busy_a_new_connection_is_closed():
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(requests.serve(max_connections=1))
    busy = _connect(stack, server, _BUSY)
    time.sleep(0.1)
    assert _is_closed(_connect(stack, server))
    assert busy.recv(1000).startswith(b'HTTP/1.1 200')


@pytest.mark.parametrize('data', [b'', b'GET /health HTTP/1.1\r\nHost'])
def test_headers_that_do_not_come_close_the_connection(data):
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(requests.serve(header_timeout=0.1))
    assert _is_closed(_connect(stack, server, data))
    # A kept connection has the same time for its next request, from its first
    # byte on.
    kept = _connect(stack, server, b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n')
    assert kept.recv(1000).startswith(b'HTTP/1.1 200')
    time.sleep(0.2)
    kept.sendall(b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n')
    assert kept.recv(1000).startswith(b'HTTP/1.1 200')
    kept.sendall(b'GET /h')
    assert _is_closed(kept)


def test_slow_bodies_do_not_use_up_the_concurrency():
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(
      requests.serve(max_concurrent=1, body_timeout=0.3)
    )
    slow = [_connect(stack, server, _POST + b'{') for _ in range(5)]
    assert _request(server, 'POST', '/echo', b'{"a": 1}') == (200, {'a': 1})
    for client in slow:
      assert client.recv(1000).startswith(b'HTTP/1.1 408')


def test_a_client_that_vanishes_is_no_traceback(caplog):
  caplog.set_level(logging.WARNING)
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(requests.serve())
    for data in (b'', b'GET', _POST, _POST + b'{', _POST + b'{"a": 12}'):
      with _connect(contextlib.ExitStack(), server, data) as client:
        client.setsockopt(  # a reset, and not an orderly end
          socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0'
        )
    assert _request(server)[0] == 200
  assert not caplog.records


def test_requests_in_flight_are_finished_at_the_end():
  closed = []
  with contextlib.ExitStack() as stack:
    with requests.serve(closed=closed) as server:
      client = _connect(stack, server, _BUSY)
      idle = _connect(stack, server)
      time.sleep(0.1)
    assert client.recv(1000).startswith(b'HTTP/1.1 200')
    assert closed == [True] and _is_closed(idle)


def test_the_limit_leaves_half_of_the_descriptors():
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  assert connections.bounded_by_descriptors(1) == 1
  assert connections.bounded_by_descriptors(10**9) == soft // 2
