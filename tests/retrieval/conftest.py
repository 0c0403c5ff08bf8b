"""Short pauses before another attempt, for all tests."""

import pytest

from stppo_jax.http import client as http_client


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
  pauses = http_client.Pauses(first=0.004, health=0.02)
  monkeypatch.setattr(http_client, 'PAUSES', pauses)
