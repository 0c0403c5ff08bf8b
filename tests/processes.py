"""Runs programs in processes of their own."""

from collections.abc import Mapping
import os
import pathlib
import subprocess
import sys

_REPO = pathlib.Path(__file__).resolve().parents[1]


def python(
  *words: object,
  cwd: str | os.PathLike[str] = _REPO,
  env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
  """Runs Python with these arguments; returns its exit code and its texts.

  Args:
    *words: the arguments, such as `-m` and a module, or `-c` and a program.
    cwd: the current folder, by default the repository.
    env: the environment, by default that of this process.

  Raises:
    subprocess.TimeoutExpired: after 600 seconds; the process is killed.
  """
  return subprocess.run(
    [sys.executable, *map(str, words)],
    cwd=cwd,
    env=env,
    capture_output=True,
    text=True,
    timeout=600,
  )
