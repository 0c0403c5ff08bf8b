"""A finished run, shared by the tests that read or repeat it."""

import pathlib

import pytest

from tests.training import runs


@pytest.fixture(scope='session')
def finished(tmp_path_factory) -> pathlib.Path:
  """Returns the folder of an uninterrupted run of three steps."""
  workdir = tmp_path_factory.mktemp('finished')
  assert runs.train(workdir) == 0
  return workdir
