"""Serves a corpus, a synthetic encyclopedia or recorded answers over HTTP."""

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import os
import signal
import socket
import sys

from stppo_jax.data import passages
from stppo_jax.data import synthetic_wiki
from stppo_jax.http import server as http_server
from stppo_jax.http import workers
from stppo_jax.retrieval import address
from stppo_jax.retrieval import faults
from stppo_jax.retrieval import recording
from stppo_jax.retrieval import server
from stppo_jax.retrieval.indexes import backends
from stppo_jax.retrieval.indexes import bm25
from stppo_jax.retrieval.indexes import index_folder

WORLD_OPTIONS = ('entities_per_type', 'name_pieces', 'distractors')
_SOURCES = ('index', 'corpus', 'synthetic_seed', 'replay')
_SHUTDOWN_TIMEOUT = 10.0  # seconds for the requests in flight at the end


@dataclasses.dataclass(frozen=True)
class Options:
  """The flags of `serve`, whose help says more.

  Attributes:
    index: the folder of an index.
    corpus: a file of passages.
    synthetic_seed: the seed of a synthetic encyclopedia; None: another source.
    replay: a file of recorded answers.
    backend: a key of `backends.BACKENDS`.
    encoder: the directory of an encoder.
    faiss: a file of FAISS.
    query_prefix: what the encoder expects in front of a query.
    dialect: the only dialect that is answered; '' for all.
    entities_per_type: the size of the encyclopedia.
    name_pieces: likewise.
    distractors: likewise.
    fault_rate: the share of the requests that fail on purpose.
    fault_seed: the seed of these faults.
    host: the address to listen at.
    port: the port to listen at; 0 is a free one.
    workers: the number of processes.
    socket: the descriptor of a bound socket, if this process is a worker.
  """

  index: str
  corpus: str
  synthetic_seed: int | None
  replay: str
  backend: str
  encoder: str
  faiss: str
  query_prefix: str
  dialect: str
  entities_per_type: int
  name_pieces: int
  distractors: int
  fault_rate: float
  fault_seed: int
  host: str
  port: int
  workers: int
  socket: int | None


def problems(options: Options) -> Iterator[str]:
  """Yields a line for each rule between flags that is broken."""
  given = [x for x in _SOURCES if getattr(options, x) not in (None, '')]
  if not given:
    yield f'one of --{", --".join(_SOURCES)} is required'
  elif len(given) > 1 and given != ['index', 'corpus']:
    yield f'--{given[1]}: not allowed with --{given[0]}'
  if options.backend != 'bm25':
    needed = ['index', 'encoder', *['faiss'] * (options.backend == 'faiss')]
    for name in needed:
      if not getattr(options, name):
        yield f'--backend={options.backend}: needs --{name}'
  if options.workers > 1 and not (options.index and options.backend == 'bm25'):
    yield (
      f'--workers={options.workers}: must be 1, or with --index and BM25 1 or '
      'greater'
    )


def serve(options: Options, argv: Sequence[str]) -> int:
  """Serves until SIGINT or SIGTERM.

  Args:
    options: without `problems`.
    argv: the flags of these options, with which workers are started.

  Returns:
    The exit code.

  Raises:
    ValueError, OSError: a file cannot be read, or the address not be used.
    WorkerFailed: a worker could not start.
  """
  http_server.check_exposure(
    options.host, _token(), token_variable=address.TOKEN_VARIABLE
  )
  if options.workers > 1 and options.socket is None:
    return asyncio.run(_supervise(argv, options))
  return asyncio.run(_serve(_app(options), options))


def _token() -> str:
  return os.environ.get(address.TOKEN_VARIABLE, '')


def _app(options: Options):
  index = world_passages = answers = None
  if options.index:
    index = _open_index(options)
  elif options.corpus:
    index = bm25.Bm25Index(passages.read_corpus(options.corpus))
  elif options.replay:
    answers = recording.Recording(options.replay)
  else:
    sizes = {name: getattr(options, name) for name in WORLD_OPTIONS}
    world_passages = functools.partial(
      synthetic_wiki.make_passages, options.synthetic_seed, **sizes
    )
    world_passages(0)  # Raises ValueError for options that make no world.
  failing = faults.Faults(rate=options.fault_rate, seed=options.fault_seed)
  return server.make_app(
    index,
    world_passages=world_passages,
    recording=answers,
    token=_token(),
    dialect=options.dialect,
    faults=failing if options.fault_rate else None,
  )


def _open_index(options: Options) -> backends.Index:
  """Opens the folder of an index; raises ValueError with one line."""
  folder = index_folder.IndexFolder(options.index)
  if options.corpus:
    folder.check_corpus(passages.read_corpus(options.corpus))
  return backends.open_index(
    folder,
    options.backend,
    encoder_directory=options.encoder,
    faiss_file=options.faiss,
    query_prefix=options.query_prefix,
  )


async def _serve(app, options: Options) -> int:
  stopping = _stopping()
  bound = None
  if options.socket is not None:
    bound = socket.socket(fileno=options.socket)
    loop, parent = asyncio.get_running_loop(), sys.stdin.fileno()

    def parent_ended() -> None:
      loop.remove_reader(parent)  # or it would be called again and again
      stopping.set()

    # The parent writes nothing: its end is what can be read.
    loop.add_reader(parent, parent_ended)
  running, url = await http_server.start(
    app,
    options.host,
    options.port,
    bound=bound,
    shutdown_timeout=_SHUTDOWN_TIMEOUT,
  )
  try:
    print(url, flush=True)
    await stopping.wait()
  finally:
    await running.cleanup()
  return 0


async def _supervise(argv: Sequence[str], options: Options) -> int:
  """Serves in several processes."""
  _open_index(options)  # Raises ValueError once, and not in every worker.
  program = [sys.executable, '-m', 'stppo_jax', 'serve']
  bound = http_server.listen(options.host, options.port)
  with bound:
    url = http_server.url_of(bound, options.host)
    await workers.supervise(
      lambda descriptor: [*program, *argv, f'--socket={descriptor}'],
      num_workers=options.workers,
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
