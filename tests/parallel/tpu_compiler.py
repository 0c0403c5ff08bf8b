"""The marks of slow tests that compile for TPU chips that are not there."""

import importlib.util

import pytest

MARKS = [
  pytest.mark.slow,
  # A program for chips that are not there is kept, but cannot be read again.
  pytest.mark.filterwarnings('ignore:Error reading persistent compilation'),
  pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed'
  ),
]


def marked(test):
  """Marks one test of a file in which others need no compiler for TPU."""
  for mark in MARKS:
    test = mark(test)
  return test
