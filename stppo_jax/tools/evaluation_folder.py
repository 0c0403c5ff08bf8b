"""The folder of an evaluation, in which an interrupted one goes on."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
from typing import Any
import uuid

from stppo_jax import exits
from stppo_jax.workdir import atomic_files
from stppo_jax.workdir import lock
from stppo_jax.workdir import run_folder

_COMMAND = 'evaluate'


class EvaluationFolder:
  """The folder of an evaluation; without a path, nothing is written.

  Args:
    path: the folder, or None.
    identity: what is evaluated, as JSON has it.
  """

  def __init__(self, path: pathlib.Path | None, identity: Mapping[str, Any]):
    self._path, self._identity = path, identity

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Locks the folder.

    Raises:
      Misconfigured: it has dialogues of another evaluation; nothing changes.
      Locked: another process writes there.
    """
    if self._path is None:
      yield
      return
    with lock.held(self._path):
      self._check()
      if run_folder.read(self._path) is None:
        run = run_folder.Run(_COMMAND, uuid.uuid4().hex, '')
        run_folder.write(self._path, run)
      text = json.dumps(self._identity, indent=2) + '\n'
      self.write('evaluation.json', text)
      yield

  def _check(self) -> None:
    assert self._path is not None
    path = self._path / 'evaluation.json'
    if not path.is_file():
      return
    try:
      there = json.loads(path.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:
      raise exits.Misconfigured(f'{path}: not JSON: {error}') from error
    lines = [
      f'--out={self._path}: has an evaluation with {key}={there.get(key)!r}, '
      f'not {value!r}; give another folder'
      for key, value in self._identity.items()
      if key != 'weights' and there.get(key) != value
    ]
    if not lines and there.get('weights') != self._identity['weights']:
      lines = [
        f'--out={self._path}: has an evaluation of other weights; give another '
        'folder'
      ]
    if lines:
      raise exits.Misconfigured('\n'.join(lines))

  def records(self) -> list[dict[str, Any]]:
    """Returns the written records; drops a last one that is incomplete."""
    if self._path is None:
      return []
    path = self._path / 'dialogues.jsonl'
    if not path.is_file():
      return []
    content = path.read_bytes()
    whole = content[: content.rfind(b'\n') + 1]
    if whole != content:
      os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.decode().splitlines()]

  def append(self, records: Sequence[Mapping[str, Any]]) -> None:
    """Appends records to the dialogues."""
    if self._path is None or not records:
      return
    lines = [json.dumps(record) + '\n' for record in records]
    path = self._path / 'dialogues.jsonl'
    atomic_files.append(path, ''.join(lines).encode())

  def write(self, name: str, text: str) -> None:
    """Writes a file, in place of an earlier one."""
    if self._path is None:
      return
    atomic_files.replace(self._path / name, text.encode())
