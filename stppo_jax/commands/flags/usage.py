"""Parsers of flags whose errors are one line, for commands without a config."""

import argparse


class UsageError(Exception):
  """A flag is wrong; the message is one line."""


class Parser(argparse.ArgumentParser):
  """A parser of a command's flags, which raises `UsageError`."""

  def __init__(self, command: str):
    super().__init__(prog=f'python -m stppo_jax {command}', allow_abbrev=False)

  def error(self, message: str):
    """Raises `UsageError`, where argparse would end the process."""
    raise UsageError(message)
