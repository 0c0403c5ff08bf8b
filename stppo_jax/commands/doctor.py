"""Examine this machine and a config, or a retrieval server, before a run.

python -m stppo_jax doctor [--config=FILE.py[:ALGORITHM]]
    [--config.KEY=VALUE ...] [--workdir=DIR]
python -m stppo_jax doctor retriever --url=URL [--dialect=NAME]
    [--corpus=PATH] [--query=TEXT] [--expect=TEXT] [--timeout=SECONDS]

The first form prints a line for each thing that a run needs: versions, devices,
memory, disk, free ports and the clock; with a config also its data, tokenizer,
model and retriever. Each line begins with ok, note or WRONG; the last says what
to do. The exit code is 2 if something is wrong, otherwise 0.

  --config=FILE.py[:ALGORITHM]  the config of the run
  --config.KEY=VALUE            sets a key of the config
  --workdir=DIR                 the folder of the run, which need not exist

The second form asks a server a question, and says in plain words what is wrong.

  --url=URL          the address, as in retrieval.url
  --dialect=NAME     the dialect of the run, retrieval.dialect
  --corpus=PATH      the corpus of a question, such as worlds/0
  --query=TEXT       a query whose answer you know
  --expect=TEXT      a text that its passages must contain
  --timeout=SECONDS  seconds to wait for a reply, 10 by default

It tries the address, every dialect, the time of an answer and the query. The
exit code is 0 if a run can use the server, 2 if something must be changed
first, and 75 if the server cannot be reached now.
"""

import argparse
import asyncio
from collections.abc import Iterator
from collections.abc import Sequence
import os
import pathlib
import sys
from typing import Any

from stppo_jax import exits
from stppo_jax.commands.flags import configuration
from stppo_jax.commands.flags import usage
from stppo_jax.http import client as http_client
from stppo_jax.retrieval import address
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import examination
from stppo_jax.workdir import run_folder


def main(argv: Sequence[str]) -> int:
  """Examines this machine or a server; returns the exit code."""
  if argv and not argv[0].startswith('-'):
    return _examine_server(argv)
  given = configuration.split(argv, ('config', 'workdir'), overrides=True)
  config: Any = None
  if 'config' in given.values or given.overrides:
    config = configuration.parse(
      argv, workdir=False, options={'workdir': ''}
    ).config
  elif given.errors:
    raise configuration.ConfigurationError(given.errors)
  is_wrong = False
  for grade, line in _findings(config, given.values.get('workdir', '')):
    _say(grade, line)
    is_wrong |= grade == 'WRONG'
  return 2 if is_wrong else 0


def _findings(config: Any, workdir: str) -> Iterator[tuple[str, str]]:
  """Yields grade and line of each check.

  Args:
    config: the config of a run; None for checks of the machine only.
    workdir: the folder of the run; '' if it is not known.
  """
  # Imported late: a wrong flag is answered before jax is loaded.
  from stppo_jax.tools import machine

  yield from machine.versions(*machine.declared())
  yield from machine.clock()
  yield from machine.port()
  has_devices = True
  for finding in machine.devices():
    has_devices &= finding.grade != machine.WRONG
    yield finding
  built, needs = None, machine.Needs()
  if config is not None and has_devices:
    findings, built = machine.setup(config)
    yield from findings
  if built is not None:
    needs = machine.needs(config, built)
    yield from machine.retriever(config, built)
  yield from machine.memory(machine.available_memory(), needs.memory)
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR')
  if cache:
    yield from machine.folder('cache', pathlib.Path(cache))
  if workdir:
    path = pathlib.Path(workdir)
    problems = run_folder.problems(
      path,
      flag='--workdir',
      command=_writer(path),
      reads={} if config is None else configuration.folders_read(config),
    )
    for problem in problems:
      yield machine.WRONG, f'workdir: {problem.removeprefix("--workdir=")}'
    yield from machine.owner(path)
    if not problems:
      yield from machine.folder('workdir', path, needed=needs.disk)


def _writer(path: pathlib.Path) -> str:
  """Returns the command that may go on in a folder, or begin there."""
  owner = run_folder.command_of(path)
  return owner if owner in ('sft', 'prefer') else 'train'


def _examine_server(argv: Sequence[str]) -> int:
  """Examines a retrieval server; returns the exit code."""
  try:
    flags = _parser().parse_args(argv)
    if not 0 < flags.timeout < float('inf'):
      raise usage.UsageError(
        f'--timeout={flags.timeout:g}: must be greater than 0'
      )
    address.check_corpus(flags.corpus)
  except (usage.UsageError, ValueError) as error:
    print(f'doctor: {error}', file=sys.stderr)
    return exits.USAGE
  asked = examination.Examination(
    flags.url,
    dialect=flags.dialect,
    corpus=flags.corpus,
    query=flags.query,
    expect=flags.expect,
    timeout=flags.timeout,
  )
  try:
    asyncio.run(examination.examine(asked, _say))
  except examination.Unusable as unusable:
    _say('WRONG', str(unusable))
    return unusable.exit_code
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = usage.Parser('doctor')
  parser.add_argument('patient', choices=['retriever'])
  parser.add_argument('--url', required=True)
  parser.add_argument('--dialect', default='', choices=['', *dialects.DIALECTS])
  parser.add_argument('--corpus', default='')
  parser.add_argument('--query', default='capital of France')
  parser.add_argument('--expect', default='')
  parser.add_argument('--timeout', type=float, default=10.0)
  return parser


def _say(grade: str, line: str) -> None:
  print(f'{grade:6} {http_client.one_line(line)}', flush=True)
