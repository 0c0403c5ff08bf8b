"""A finished run, shared by the modules that read it or end up like it."""

import pathlib

import pytest

from tests.training import runs


@pytest.fixture(scope='session')
def finished(tmp_path_factory) -> pathlib.Path:
  """The folder of a run of three steps that nothing happened to."""
  workdir = tmp_path_factory.mktemp('finished')
  assert runs.train(workdir) == 0
  return workdir
