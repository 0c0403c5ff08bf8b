"""Serve a corpus, or the synthetic encyclopedia, over HTTP.

python -m stppo_jax serve --index=DIR [--corpus=FILE.jsonl] [--workers=N]
python -m stppo_jax serve --index=DIR --backend=dense|faiss|hybrid
    --encoder=MODEL [--faiss=FILE] [--query_prefix=TEXT]
python -m stppo_jax serve --corpus=FILE.jsonl
python -m stppo_jax serve --synthetic_seed=N [--entities_per_type=N]
    [--name_pieces=N] [--distractors=N]
python -m stppo_jax serve --replay=FILE.jsonl

  --index=DIR            the folder that `index` wrote
  --corpus=FILE.jsonl    passages, one per line: {"id", "contents"} or {"pid",
                         "title", "text"}; with --index, the corpus from which
                         it must have been made
  --workers=N            the number of processes that answer, which share the
                         memory of the index
  --backend=NAME         bm25, the default; dense, for vectors that `index` has
                         made; faiss, for those in a file of FAISS; or hybrid,
                         which joins BM25 with one of them
  --encoder=MODEL        the Hugging Face directory of the vectors' encoder
  --faiss=FILE           an index of FAISS over the passages, in their order
  --query_prefix=TEXT    what the encoder expects in front of a query; with
                         --faiss
  --synthetic_seed=N     data.synthetic_wiki.seed in the run's config
  --entities_per_type=N  data.synthetic_wiki.entities_per_type, likewise
  --name_pieces=N        data.synthetic_wiki.name_pieces, likewise
  --distractors=N        data.synthetic_wiki.distractors, likewise
  --replay=FILE.jsonl    answers that a run has recorded (retrieval.record)
  --dialect=NAME         the only dialect that is answered, see
                         docs/retrieval.md; by default all are
  --fault_rate=SHARE     the share of the requests that fail on purpose
  --fault_seed=N         the seed of these faults
  --host=ADDRESS         127.0.0.1 by default; another address than loopback
                         needs a bearer token in STPPO_RETRIEVAL_TOKEN
  --port=PORT            8000 by default; 0 is a free one

The server prints its URL when it is ready and runs until SIGINT or SIGTERM;
then it finishes the requests in flight.
"""

import argparse
import asyncio
from collections.abc import Callable
from collections.abc import Sequence
import functools
import os
import signal
import socket
import sys
from typing import Any

from stppo_jax import exits
from stppo_jax import types
from stppo_jax.commands.flags import usage
from stppo_jax.configs import base
from stppo_jax.data import passages
from stppo_jax.data import synthetic_wiki
from stppo_jax.http import server as http_server
from stppo_jax.http import workers
from stppo_jax.retrieval import address
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval import faults
from stppo_jax.retrieval import protocol
from stppo_jax.retrieval import recording
from stppo_jax.retrieval import server
from stppo_jax.retrieval.indexes import backends
from stppo_jax.retrieval.indexes import bm25
from stppo_jax.retrieval.indexes import index_folder

_SHUTDOWN_TIMEOUT = 10.0  # seconds for the requests in flight at the end
_WORLD_OPTIONS = ('entities_per_type', 'name_pieces', 'distractors')


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
    flags = _parse(argv)
    if flags.workers > 1 and flags.socket is None:
      return asyncio.run(_supervise(argv, flags))
    return asyncio.run(_serve(_app(flags, make_passages), flags))
  except workers.WorkerFailed as failed:
    return failed.exit_code
  except (usage.UsageError, ValueError, OSError) as error:
    print(f'serve: {" ".join(str(error).split())}', file=sys.stderr)
    return exits.USAGE


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  """Returns the flags; raises UsageError or ValueError."""
  flags = _parser().parse_args(argv)
  sources = ('index', 'corpus', 'synthetic_seed', 'replay')
  given = [name for name in sources if getattr(flags, name) is not None]
  if not given:
    raise usage.UsageError(f'one of --{", --".join(sources)} is required')
  if len(given) > 1 and given != ['index', 'corpus']:
    raise usage.UsageError(f'--{given[1]}: not allowed with --{given[0]}')
  if not 0 <= flags.port <= 65535:
    raise usage.UsageError(f'--port: {flags.port} is not in 0..65535')
  if flags.backend != 'bm25' and flags.index is None:
    raise usage.UsageError(f'--backend={flags.backend}: needs --index')
  if flags.backend != 'bm25' and not flags.encoder:
    raise usage.UsageError(f'--backend={flags.backend}: needs --encoder')
  if flags.backend == 'faiss' and not flags.faiss:
    raise usage.UsageError('--backend=faiss: needs --faiss')
  shared = flags.index is not None and flags.backend == 'bm25'
  if flags.workers < 1 or (flags.workers > 1 and not shared):
    raise usage.UsageError(
      f'--workers={flags.workers}: must be 1, or with --index and BM25 1 or '
      'greater'
    )
  http_server.check_exposure(
    flags.host, _token(), token_variable=address.TOKEN_VARIABLE
  )
  return flags


def _token() -> str:
  return os.environ.get(address.TOKEN_VARIABLE, '')


def _app(flags: argparse.Namespace, make_passages):
  index = world_passages = answers = None
  if flags.index is not None:
    index = _open_index(flags)
  elif flags.corpus is not None:
    index = bm25.Bm25Index(passages.read_corpus(flags.corpus))
  elif flags.replay is not None:
    answers = recording.Recording(flags.replay)
  else:
    options = {name: getattr(flags, name) for name in _WORLD_OPTIONS}
    world_passages = functools.partial(
      make_passages, flags.synthetic_seed, **options
    )
    world_passages(0)  # Raises ValueError for options that make no world.
  return server.make_app(
    index,
    world_passages=world_passages,
    recording=answers,
    token=_token(),
    dialect=flags.dialect,
    faults=faults.Faults(rate=flags.fault_rate, seed=flags.fault_seed)
    if flags.fault_rate
    else None,
  )


def _open_index(flags: argparse.Namespace) -> protocol.Index:
  """Opens the folder of an index; raises ValueError with one line."""
  folder = index_folder.IndexFolder(flags.index)
  if flags.corpus is not None:
    folder.check_corpus(passages.read_corpus(flags.corpus))
  return backends.open_index(
    folder,
    flags.backend,
    encoder_directory=flags.encoder,
    faiss_file=flags.faiss,
    query_prefix=flags.query_prefix,
  )


def _parser() -> argparse.ArgumentParser:
  parser = usage.Parser('serve')
  parser.add_argument('--index', help='folder that `index` wrote')
  parser.add_argument('--backend', choices=backends.BACKENDS, default='bm25')
  parser.add_argument('--encoder', default='')
  parser.add_argument('--faiss', default='')
  parser.add_argument('--query_prefix', default='')
  parser.add_argument('--corpus', help='JSONL file of passages')
  parser.add_argument(
    '--synthetic_seed', type=int, help='seed of a synthetic encyclopedia'
  )
  parser.add_argument('--replay', help='file of recorded answers')
  parser.add_argument(
    '--dialect', default='', choices=['', *dialects.DIALECTS], help='only this'
  )
  parser.add_argument('--fault_rate', type=float, default=0.0)
  parser.add_argument('--fault_seed', type=int, default=0)
  parser.add_argument('--host', default=http_server.LOOPBACK)
  parser.add_argument('--port', type=int, default=8000, help='0 = a free one')
  parser.add_argument('--workers', type=int, default=1, help='processes')
  # The descriptor of a bound socket: this process is a worker.
  parser.add_argument('--socket', type=int, help=argparse.SUPPRESS)
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


async def _serve(app, flags: argparse.Namespace) -> int:
  stopping = _stopping()
  bound = None
  if flags.socket is not None:
    bound = socket.socket(fileno=flags.socket)
    loop, parent = asyncio.get_running_loop(), sys.stdin.fileno()

    def parent_ended() -> None:
      loop.remove_reader(parent)  # or it would be called again and again
      stopping.set()

    # The parent writes nothing: its end is what can be read.
    loop.add_reader(parent, parent_ended)
  running, url = await http_server.start(
    app,
    flags.host,
    flags.port,
    bound=bound,
    shutdown_timeout=_SHUTDOWN_TIMEOUT,
  )
  try:
    print(url, flush=True)
    await stopping.wait()
  finally:
    await running.cleanup()
  return 0


async def _supervise(argv: Sequence[str], flags: argparse.Namespace) -> int:
  """Serves in several processes."""
  _open_index(flags)  # Raises ValueError once, and not in every worker.
  program = [sys.executable, '-m', 'stppo_jax', 'serve']
  bound = http_server.listen(flags.host, flags.port)
  with bound:
    url = http_server.url_of(bound, flags.host)
    await workers.supervise(
      lambda descriptor: [*program, *argv, f'--socket={descriptor}'],
      num_workers=flags.workers,
      bound=bound,
      stopping=_stopping(),
      ready=lambda: print(url, flush=True),
    )
  return 0


def _stopping() -> asyncio.Event:
  """Returns an event that SIGINT and SIGTERM set."""
  stopping = asyncio.Event()
  loop = asyncio.get_running_loop()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, stopping.set)
  return stopping
