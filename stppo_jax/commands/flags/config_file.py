"""Loads a config file, or describes in one line an error in the file."""

import importlib.machinery
import importlib.util
import pathlib
import re
import traceback
from typing import Any

from ml_collections import config_dict

from stppo_jax import exits
from stppo_jax import settings
from stppo_jax.configs import algorithms

_PACKAGE = pathlib.Path(__file__).parents[2]
_INSTALLED = 'configs'  # the folder of the configs in the package


def load(name: str) -> Any:
  """Returns the configuration that `FILE.py[:ALGORITHM]` describes.

  Raises:
    Misconfigured: if there is no such file or algorithm, or if the file raises
      an error; the message is one line.
  """
  file, _, argument = name.partition(':')
  with exits.naming(f'--config={name}'):
    config = call(file, 'get_config', *filter(None, [argument]))
    if not isinstance(config, config_dict.ConfigDict):
      raise ValueError(
        f'get_config returns {type(config).__name__}, expected a ConfigDict'
      )
  config = config.copy_and_resolve_references()
  if 'title' in config:
    config.title = f'{pathlib.Path(file).stem}: {config.title}'
  return config


class _Uncached(importlib.machinery.SourceFileLoader):
  """Compiles a module from its source text every time it is loaded.

  Python would cache byte code beside the file. If the text is replaced within a
  second by a text of the same length, Python would run the old byte code.
  """

  def get_code(self, fullname: str) -> Any:
    """Returns the code of the file as it is now."""
    del fullname
    return self.source_to_code(self.get_data(self.path), self.path)


def call(file: str, name: str, *arguments: str) -> Any:
  """Calls a function of a config file and returns its result.

  Raises:
    ValueError: if there is no such file or function, or if the file raises an
      error; the message is one line.
  """
  path = _find(file)
  if path.suffix != '.py':
    raise ValueError('not a Python file')
  loader = _Uncached(path.stem, str(path.absolute()))
  spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
  assert spec is not None
  module = importlib.util.module_from_spec(spec)
  # The file is a program of the user: any exception in it is a usage error.
  try:
    loader.exec_module(module)
    if hasattr(module, name):
      return getattr(module, name)(*arguments)
  except algorithms.UnknownName as error:
    raise ValueError(str(error)) from error
  except Exception as error:
    raise ValueError(_describe(error, path)) from error
  raise ValueError(f'has no function {name}')


def _find(file: str) -> pathlib.Path:
  """Returns the path of a config file.

  A path such as `configs/base.py` names a file below the current folder. If
  there is no such file, the path names a file that is installed with the
  package. `base` is short for `configs/base.py`.

  Raises:
    ValueError: if there is no such file; the message lists config files.
  """
  if re.fullmatch(r'\w+', file) and not pathlib.Path(file).exists():
    file = f'{_INSTALLED}/{file}.py'
  path = pathlib.Path(file)
  folders = [pathlib.Path()]
  if path.parts[:1] == (_INSTALLED,):
    folders.append(_PACKAGE)
  for folder in folders:
    if (folder / path).is_file():
      return folder / path
  parent = path if path.is_dir() else path.parent
  choices = {
    str(parent / found.name)
    for folder in folders
    for found in (folder / parent).glob('*.py')
    if b'def get_config(' in found.read_bytes()
  }
  if path.is_dir():
    listed = ', '.join(sorted(choices)) or 'none, as no file in it is a config'
    raise ValueError(f'is a folder; choices: {listed}')
  raise ValueError('no such file' + settings.closest(file, sorted(choices)))


def _describe(error: Exception, path: pathlib.Path) -> str:
  """Returns one line with the place and the cause of an error in a file."""
  reason, file, line = str(error), str(path), None
  if isinstance(error, SyntaxError) and error.filename:
    # The error may be in a module that the file imports.
    reason, file, line = error.msg, error.filename, error.lineno
  else:
    # The last frame in the file itself has the line that a user can change.
    # Deeper frames are in libraries.
    for frame in traceback.extract_tb(error.__traceback__):
      if frame.filename == str(path.absolute()):
        line = frame.lineno
  place = f'{file}, line {line},' if line else file
  text = f'{place} fails with {type(error).__name__}: {reason}'
  return ' '.join(text.split())
