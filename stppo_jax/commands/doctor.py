"""Examine this machine and a config, or a retrieval server, before a run.

python -m stppo_jax doctor [--config=FILE.py[:ALGORITHM]]
    [--config.KEY=VALUE ...] [--workdir=DIR]
python -m stppo_jax doctor retriever --url=URL [--dialect=NAME]
    [--corpus=PATH] [--query=TEXT] [--expect=TEXT] [--timeout=SECONDS]

The first form prints lines about versions, devices, memory and disk. With a
config, it also prints lines about its data, tokenizer, model and retriever.
Each line begins with ok, note or WRONG, and a line with WRONG says what to do.
The exit code is 2 if something is wrong, otherwise 0.

  --config=FILE.py[:ALGORITHM]  the config of the run
  --config.KEY=VALUE            sets a key of the config
  --workdir=DIR                 the folder of the run, which need not exist

The second form asks a server a question, and prints in plain words what is
wrong with the server.

  --url=URL          the address, as in retrieval.url
  --dialect=NAME     the dialect of the run, retrieval.dialect
  --corpus=PATH      the corpus of a question, such as worlds/0
  --query=TEXT       a query whose answer you know
  --expect=TEXT      a text that its passages must contain
  --timeout=SECONDS  seconds to wait for a reply, 10 by default

It tries the address, every dialect and the query, and measures the time of a
reply. The exit code is 0 if a run can use the server, 2 if something must be
changed first, and 75 if the server cannot be reached now.
"""

import asyncio
from collections.abc import Sequence

from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.commands.flags import configuration
from stppo_jax.http import client as http_client
from stppo_jax.retrieval import address
from stppo_jax.retrieval import dialects
from stppo_jax.tools import retriever_check


def main(argv: Sequence[str]) -> int:
  """Examines this machine or a server; returns the exit code."""
  if argv and not argv[0].startswith('-'):
    command_line.subcommand('doctor', argv, ['retriever'])
    return _examine_server(argv[1:])
  flags = command_line.flags(workdir='')
  given = configuration.split(argv, flags, required=())
  if given.overrides and not flags.config:
    given.errors.append('--config: missing')
  command_line.refuse(given.errors)
  config = configuration.checked(flags, given) if flags.config else None
  # Imported late, so that a wrong flag is reported before jax is loaded.
  from stppo_jax.tools import machine

  folders = configuration.folders_read(config) if config else {}
  is_wrong = False
  for grade, line in machine.examine(config, flags.workdir, folders):
    _say(grade, line)
    is_wrong |= grade == machine.WRONG
  return exits.USAGE if is_wrong else 0


def _examine_server(argv: Sequence[str]) -> int:
  """Examines a retrieval server; returns the exit code."""
  flags = command_line.flags(
    url='',
    corpus='',
    expect='',
    query=retriever_check.Examination.query,
    dialect=command_line.one_of(['', *dialects.DIALECTS], ''),
    timeout=command_line.number(10.0, lower_bound=1e-3, upper_bound=3600.0),
  )
  errors = command_line.parse(flags, argv, required=('url',)).errors
  command_line.refuse(errors)
  with exits.as_misconfigured():
    address.check_corpus(flags.corpus)
  asked = retriever_check.Examination(**flags.flag_values_dict())
  try:
    asyncio.run(retriever_check.examine(asked, _say))
  except retriever_check.Unusable as unusable:
    _say('WRONG', str(unusable))
    return unusable.exit_code
  return 0


def _say(grade: str, line: str) -> None:
  print(f'{grade:6} {http_client.one_line(line)}', flush=True)
