"""Tests of runs may begin with a copy of the finished one."""

import shutil

import pytest


@pytest.fixture
def run(finished, tmp_path):
  """Returns a copy of the folder of a finished run."""
  return shutil.copytree(finished, tmp_path / 'run')
