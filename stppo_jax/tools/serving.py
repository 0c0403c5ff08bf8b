"""Serves a corpus, or a synthetic encyclopedia, over HTTP."""

import asyncio
from collections.abc import Iterator, Sequence
import functools
import os
import signal
import socket
import sys

from absl import flags as absl_flags

from stppo_jax import buckets
from stppo_jax.data import passages
from stppo_jax.data import synthetic_wiki
from stppo_jax.http import server as http_server
from stppo_jax.http import workers
from stppo_jax.retrieval import address
from stppo_jax.retrieval import server
from stppo_jax.retrieval.indexes import backends
from stppo_jax.retrieval.indexes import bm25
from stppo_jax.retrieval.indexes import index_folder

# The flags that describe synthetic worlds, with the least value of each flag.
WORLD_OPTIONS = {'entities_per_type': 1, 'name_pieces': 1, 'distractors': 0}
_SOURCES = ('index', 'corpus', 'synthetic_seed')
_SHUTDOWN_TIMEOUT = 10.0  # seconds in which open requests may still be answered


def problems(options: absl_flags.FlagValues) -> Iterator[str]:
  """Yields a line for each combination of flags that `serve` refuses."""
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
      f'--workers={options.workers}: must be 1; only BM25 with --index takes '
      'more'
    )


def serve(options: absl_flags.FlagValues, argv: Sequence[str]) -> int:
  """Serves searches until SIGINT or SIGTERM.

  Args:
    options: the flags of `serve`, for which `problems` yields nothing. In a
      worker process, the flag `socket` is the file descriptor of a bound
      socket.
    argv: the same flags as they were typed; worker processes are started with
      them.

  Returns:
    The exit code.

  Raises:
    ValueError, OSError: a file cannot be read, or the address cannot be used.
    WorkerFailed: a worker process could not start.
  """
  http_server.check_exposure(
    options.host, _token(), token_variable=address.TOKEN_VARIABLE
  )
  if options.workers > 1 and options.socket is None:
    return asyncio.run(_supervise(argv, options))
  return asyncio.run(_serve(_app(options), options))


def _token() -> str:
  return os.environ.get(address.TOKEN_VARIABLE, '')


def _app(options: absl_flags.FlagValues):
  index = world_passages = None
  if options.index:
    index = _open_index(options)
  elif options.corpus:
    index = bm25.Bm25Index(passages.read_corpus(options.corpus))
  else:
    sizes = {name: getattr(options, name) for name in WORLD_OPTIONS}
    world_passages = functools.partial(
      synthetic_wiki.make_passages, options.synthetic_seed, **sizes
    )
    world_passages(0)  # raises ValueError if no world has these sizes
  return server.make_app(
    index,
    world_passages=world_passages,
    token=_token(),
    dialect=options.dialect,
  )


def _open_index(options: absl_flags.FlagValues) -> backends.Index:
  """Opens the index of `--index`, after a download if it is in a bucket.

  Raises:
    ValueError: a file of the index is missing or damaged, or the index was not
      built from the corpus of `--corpus`; the message is one line.
    BucketError: the bucket cannot be read.
  """
  index, faiss = options.index.rstrip('/'), options.faiss
  encoder = options.encoder and str(buckets.local_folder(options.encoder))
  folder = index_folder.IndexFolder(buckets.local_folder(index))
  if faiss.startswith(f'{index}/'):
    faiss = f'{folder.path}{faiss.removeprefix(index)}'
  if options.corpus:
    folder.check_corpus(passages.read_corpus(options.corpus))
  return backends.open_index(
    folder,
    options.backend,
    encoder_directory=encoder,
    faiss_file=faiss,
    query_prefix=options.query_prefix,
  )


async def _serve(app, options: absl_flags.FlagValues) -> int:
  stopping = _stopping()
  bound = None
  if options.socket is not None:
    bound = socket.socket(fileno=options.socket)
    loop, parent = asyncio.get_running_loop(), sys.stdin.fileno()

    def parent_ended() -> None:
      # A closed pipe stays readable, so this function would be called again.
      loop.remove_reader(parent)
      stopping.set()

    # A worker must not outlive its parent. The parent writes nothing to the
    # pipe at stdin, so the pipe is readable only after the parent has ended.
    loop.add_reader(parent, parent_ended)
  async with http_server.serving(
    app,
    options.host,
    options.port,
    bound=bound,
    shutdown_timeout=_SHUTDOWN_TIMEOUT,
  ) as url:
    print(url, flush=True)
    await stopping.wait()
  return 0


async def _supervise(
  argv: Sequence[str], options: absl_flags.FlagValues
) -> int:
  """Serves in several worker processes."""
  _open_index(options)  # so that errors are raised before a worker starts
  program = [sys.executable, '-m', 'stppo_jax', 'serve', *argv]
  # Workers get the downloaded folder, so that a worker which replaces another
  # one does not need the bucket.
  program += [f'--index={buckets.local_folder(options.index.rstrip("/"))}']
  # All workers accept connections from one socket, which is bound before any
  # worker starts. The kernel spreads the connections over the workers, and when
  # a worker ends, no waiting connection is lost.
  bound = http_server.listen(options.host, options.port)
  with bound:
    url = http_server.url_of(bound, options.host)
    await workers.supervise(
      lambda descriptor: [*program, f'--socket={descriptor}'],
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
