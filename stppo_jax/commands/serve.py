"""Serve a corpus, or the synthetic encyclopedia, over HTTP.

python -m stppo_jax serve --corpus=FILE.jsonl [--host=ADDRESS] [--port=PORT]
python -m stppo_jax serve --synthetic_seed=N [--entities_per_type=N]
    [--name_pieces=N] [--distractors=N] [--host=ADDRESS] [--port=PORT]

  --corpus=FILE.jsonl    passages, one per line: {"id", "contents"} or {"pid",
                         "title", "text"}
  --synthetic_seed=N     data.synthetic_wiki.seed in the run's config
  --entities_per_type=N  data.synthetic_wiki.entities_per_type, likewise
  --name_pieces=N        data.synthetic_wiki.name_pieces, likewise
  --distractors=N        data.synthetic_wiki.distractors, likewise
  --host=ADDRESS         127.0.0.1 by default; another address than loopback
                         needs a bearer token in STPPO_RETRIEVAL_TOKEN
  --port=PORT            8000 by default; 0 is a free one

The server prints its URL when it is ready and runs until SIGINT or SIGTERM.
"""

import argparse
import asyncio
from collections.abc import Callable
from collections.abc import Sequence
import functools
import os
import signal
import sys
from typing import Any

from stppo_jax import types
from stppo_jax.configs import base
from stppo_jax.data import synthetic_wiki
from stppo_jax.http import server as http_server
from stppo_jax.retrieval import address
from stppo_jax.retrieval import corpus
from stppo_jax.retrieval import server

_WORLD_OPTIONS = ('entities_per_type', 'name_pieces', 'distractors')


class _UsageError(Exception):
  """A flag is wrong; the message is one line."""


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise _UsageError(message)


def main(
  argv: Sequence[str],
  *,
  make_passages: Callable[
    ..., Sequence[types.Passage]
  ] = synthetic_wiki.make_passages,
) -> int:
  """Runs the server; returns the exit code.

  Args:
    argv: flags, without the command's name.
    make_passages: called with (seed, world, **options) for a world's
      passages.
  """
  try:
    app, host, port = _app(argv, make_passages)
    return asyncio.run(_serve(app, host, port))
  except (_UsageError, ValueError, OSError) as error:
    print(f'serve: {" ".join(str(error).split())}', file=sys.stderr)
    return 2


def _app(argv, make_passages):
  flags = _parser().parse_args(argv)
  if not 0 <= flags.port <= 65535:
    raise _UsageError(f'--port: {flags.port} is not in 0..65535')
  variable = address.TOKEN_VARIABLE
  token = os.environ.get(variable, '')
  http_server.check_exposure(flags.host, token, token_variable=variable)
  if flags.corpus is not None:
    passages = corpus.read_corpus(flags.corpus)
    app = server.make_app(passages, token=token)
  else:
    options = {name: getattr(flags, name) for name in _WORLD_OPTIONS}
    world_passages = functools.partial(
      make_passages, flags.synthetic_seed, **options
    )
    world_passages(0)  # Raises ValueError for options that make no world.
    app = server.make_app(world_passages=world_passages, token=token)
  return app, flags.host, flags.port


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog='python -m stppo_jax serve',
    description='Serve passages over HTTP (the protocol of Search-R1).',
    allow_abbrev=False,
  )
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--corpus', help='JSONL file of passages')
  source.add_argument(
    '--synthetic_seed', type=int, help='seed of a synthetic encyclopedia'
  )
  parser.add_argument('--host', default=http_server.LOOPBACK)
  parser.add_argument('--port', type=int, default=8000, help='0 = a free one')
  # The defaults of a run, so that both make the same worlds.
  config: Any = base.get_config()
  defaults = config.data.synthetic_wiki
  for name in _WORLD_OPTIONS:
    parser.add_argument(
      f'--{name}',
      type=int,
      default=defaults[name],
      help='with --synthetic_seed: as in config.data.synthetic_wiki of the run',
    )
  return parser


async def _serve(app, host: str, port: int) -> int:
  stopping = asyncio.Event()
  loop = asyncio.get_running_loop()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, stopping.set)
  runner, url = await http_server.start(app, host, port)
  try:
    print(url, flush=True)
    await stopping.wait()
  finally:
    await runner.cleanup()
  return 0
