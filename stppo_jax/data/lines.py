"""Reads text files line by line, none of which may fill the memory."""

from collections.abc import Iterator
from typing import TextIO

# Characters. A dialogue of 100,000 tokens with all that is recorded of each
# token takes half of it.
MAX_LENGTH = 32 << 20


def numbered(text: TextIO, name: object) -> Iterator[tuple[int, str]]:
  """Yields the number of each line, from 1, and the line with its line break.

  Args:
    text: the open file.
    name: its name in the error message.

  Raises:
    ValueError: if a line is too long; the message names the file and the line.
  """
  number = 0
  while line := text.readline(MAX_LENGTH + 1):
    number += 1
    if len(line) > MAX_LENGTH:
      raise ValueError(
        f'{name}:{number}: longer than {MAX_LENGTH} characters, the most that '
        'a line may have'
      )
    yield number, line
