"""One server for all tests, which is reset for each of them."""

import pytest

from stppo_jax.http import client as http_client
from stppo_jax.http import server as http_server
from stppo_jax.rollout import event_loop
from tests.sampling.remote import fake_servers


@pytest.fixture(scope='session')
def _started(tmp_path_factory):
  root = tmp_path_factory.mktemp('weights')
  with event_loop.EventLoop() as loop:
    served = fake_servers.Served(loop, root)
    with http_server.EmbeddedServer(lambda: served.app) as server:
      served.url = server.url
      yield served


@pytest.fixture
def served(_started, monkeypatch):
  # Engines write their weights where the server reads them.
  monkeypatch.setattr('tempfile.tempdir', str(_started.root))
  monkeypatch.setattr(http_client, 'PAUSES', http_client.Pauses(first=0.01))
  _started.reset()
  return _started
