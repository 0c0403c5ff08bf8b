"""`python -m stppo_jax COMMAND FLAGS`: lists the commands and calls one.

A command is a file of `stppo_jax/commands` with a function `main(argv)` that
returns the exit code. The first line of the file's docstring describes the
command in the list. The whole docstring is the command's help.

These are the exit codes:

  0    the command is done
  2    the configuration or the usage is wrong
  3    only corrupt checkpoints are left
  70   a bug
  75   try again: the same command continues
  76   too many skipped updates, or an alarm of `alarms.stop`
  130  interrupted
  141  nobody reads the output

An exception with an `exit_code` is an expected end: its message is printed
without a traceback.
"""

from collections.abc import Sequence
import errno
import importlib
import io
import os
import sys
from typing import Any

from stppo_jax import __version__
from stppo_jax import exits
from stppo_jax import interruption
from stppo_jax import streams

# All other modules are imported inside functions. Their imports take seconds,
# and `main` must already handle signals during these seconds.

# These commands keep their compiled programs in their workdir. All other
# commands keep them in `_cache_folder()`.
_TRAINING = ('train', 'sft', 'prefer')
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def commands() -> dict[str, str]:
  """Maps each command's name to its docstring, without importing a command."""
  return {name: _docstring(path) for name, path in _files().items()}


def _files() -> dict[str, Any]:
  """Maps each command's name to the path of its file."""
  import pathlib

  folder = pathlib.Path(__file__).parent / 'commands'
  paths = {path.stem: path for path in sorted(folder.glob('*.py'))}
  del paths['__init__']
  return paths


def _docstring(path) -> str:
  """Returns the docstring of a Python file without running the file."""
  import ast

  # The file is parsed and not imported, because the import would load jax, and
  # the user would have to wait for the help.
  return ast.get_docstring(ast.parse(path.read_text('utf-8'))) or ''


def main(argv: Sequence[str]) -> int:
  """Runs the command `argv[0]` with its flags; returns the exit code."""
  # A terminal's encoding may lack characters of a dialogue. They are printed
  # escaped instead of raising an error.
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors='backslashreplace')
  with interruption.Interruption(owns_process=True) as interrupt:
    try:
      with interrupt.interruptible():
        exit_code = _run(argv)
        # The flush raises an error of the stream here, where `_failed` handles
        # it. Otherwise the error would come when the interpreter ends.
        sys.stdout.flush()
        return exit_code
    except interruption.Interrupted as error:
      return interrupt.exit_code or error.exit_code
    except KeyboardInterrupt:
      print('interrupted', file=sys.stderr)
      return exits.INTERRUPTED
    except Exception as error:
      return _failed(error)


def _run(argv: Sequence[str]) -> int:
  """Runs a command, lets its exceptions pass, and returns its exit code."""
  if not argv or argv[0] in ('--help', '-h', 'help'):
    print('usage: python -m stppo_jax COMMAND [FLAGS | --help]\n')
    for name, doc in commands().items():
      print(f'  {name:10} {doc.partition(chr(10))[0]}')
    return 0 if argv else exits.USAGE
  if argv[0] == '--version':
    print(f'stppo_jax {__version__}')
    return 0
  name, *flags = argv
  files = _files()
  if name not in files:
    from stppo_jax import settings

    choices = settings.closest(name, list(files))
    shown = streams.one_line(name)
    print(f'{shown}: unknown command{choices}', file=sys.stderr)
    return exits.USAGE
  doc = _docstring(files[name])
  for flag in flags:
    if flag in ('--help', '-h', '--helpfull') or flag.startswith('--help='):
      print(_help(doc, flag))
      return 0
  # Without this variable, transformers warns in every run that PyTorch is
  # missing.
  os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
  if name not in _TRAINING:
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', _cache_folder())
  return importlib.import_module(f'stppo_jax.commands.{name}').main(flags)


def _help(doc: str, flag: str) -> str:
  """Returns the help text that a flag asks for.

  Args:
    doc: the docstring of a command.
    flag: --help, --helpfull, or --help=KEY. KEY is a config key, a section, or
      a part between the dots of a key, such as `slots` of `rollout.slots`.
  """
  if flag in ('--help', '-h') and '--config.KEY' not in doc:
    return doc
  from stppo_jax.commands.flags import config_keys

  if flag in ('--help', '-h'):
    return f'{doc}\n\n{config_keys.HINT}'
  if flag == '--helpfull':
    return f'{doc}\n\n{config_keys.describe()}'
  return config_keys.describe(flag.removeprefix('--help='))


def _failed(error: Exception) -> int:
  """Prints an error, with a traceback if it is a bug; returns the exit code."""
  lost = streams.silence_lost()
  exit_code = getattr(error, 'exit_code', None)
  if exit_code is not None:
    # The message is escaped, because it may quote a file that contains terminal
    # control characters.
    print(streams.escape(str(error)), file=sys.stderr)
    return exit_code
  if isinstance(error, BrokenPipeError) and lost:
    return exits.UNREAD
  if isinstance(error, OSError) and error.errno in (*_FULL, *_REFUSED):
    print(f'{error.filename or "output"}: {error.strerror}', file=sys.stderr)
    return exits.TRY_AGAIN if error.errno in _FULL else exits.USAGE
  import traceback

  traceback.print_exc()
  return exits.BUG


def _cache_folder() -> str:
  """Returns the folder in which compiled programs are cached.

  In a clone of the repository it is `.cache/jax`. An installed package uses the
  user's cache folder.
  """
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  if os.path.isfile(os.path.join(root, 'Makefile')):
    return os.path.join(root, '.cache', 'jax')
  caches = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return os.path.join(caches, 'stppo_jax', 'jax')


if __name__ == '__main__':
  code = main(sys.argv[1:])
  if code in interruption.EXIT_CODES.values():
    interruption.end_process(code)
  sys.exit(code)
