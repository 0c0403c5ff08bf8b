"""No test here depends on a time, so samples may be as short as possible."""

import pytest

from benchmarks import measure


@pytest.fixture(autouse=True)
def _short(monkeypatch):
  monkeypatch.setattr(measure, 'SAMPLE_SECONDS', 0.0)
  monkeypatch.setattr(measure, 'MIN_REPEATS', 2)
