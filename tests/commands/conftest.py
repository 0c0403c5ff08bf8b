"""Files that the tests of the lab's commands share."""

import functools

import numpy as np
import pytest

from tests.commands import lab_calls
from tests.tools.lab import batch_arrays


@pytest.fixture(scope='session')
def file(tmp_path_factory):
  """Returns a saved batch such as another program might write."""
  arrays, *_ = batch_arrays.arrays()
  path = tmp_path_factory.mktemp('file') / 'F.npz'
  np.savez(path, notes=np.zeros(3), **arrays)
  return path


@pytest.fixture
def config(tmp_path):
  """Returns a config file with other options than the table."""
  path = tmp_path / 'mine.py'
  path.write_text(lab_calls.CONFIG, encoding='utf-8')
  return path


@pytest.fixture
def printed(capsys):
  """Returns a function that gives the JSON that a command of the lab prints."""
  return functools.partial(lab_calls.metrics, capsys)
