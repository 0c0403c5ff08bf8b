"""Measures retrieval: BM25 against bm25s, a server, indexes, an outage.

    python -m benchmarks.retrieval
    python -m benchmarks.retrieval --corpus=FILE.jsonl --only search http

The passages are those of FILE, or random: 100 words each, from a Zipf
distribution. Queries are words of random passages.

`search` times calls of 100 queries in this process. Our search is compared with
bm25s itself, with the same index, words and numpy backend. Before anything is
timed, the scores of both are asserted to be equal within 1e-5.

`http` runs `serve` as a process, and 64 clients in this process, each of which
sends one query after the other. Both processes share the cores. The rate
depends on other work of the machine, but the CPU time of a query does not.

`index` runs `index` on 100,000 random passages as a process, and measures the
time from opening the memory-mapped index to its first answer.

`outage` runs `serve` as a process, which is killed after some answers and
started again a second later. 300 queries are sent. All must be
answered, and no thread or socket may be left over.
"""

import asyncio
from collections.abc import Iterator, Sequence
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from benchmarks import measure
from stppo_jax import types
from stppo_jax.data import passages as passages_lib
from stppo_jax.retrieval import client
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval.indexes import bm25
from stppo_jax.retrieval.indexes import index_folder

# This import must come after that of `bm25`, which imports bm25s without jax.
import bm25s  # isort: skip

PARTS = ('search', 'http', 'index', 'outage')
_GOALS = {'search': 0.8, 'http': 500.0, 'index': 60.0, 'open': 1.0}
_BATCH = 100  # queries of a call
_CLIENTS = 64
_TOPK = 3
_LARGE = 100_000  # the number of passages of the index that is built
_ASKED_IN_OUTAGE = 300
_OUTAGE = 1.0  # seconds


def random_passages(size: int, *, seed: int) -> list[types.Passage]:
  """Returns passages of 100 words from a Zipf distribution."""
  rng = np.random.default_rng(seed)
  words = np.minimum(rng.zipf(1.3, size=(size, 100)), 200_000)
  return [
    types.Passage(f'p{n}', f't{n}', ' '.join(f'w{w}' for w in words))
    for n, words in enumerate(words.tolist())
  ]


def random_queries(
  passages: Sequence[types.Passage], size: int, *, seed: int
) -> list[str]:
  """Returns queries, each of eight words of one random passage."""
  rng = np.random.default_rng(seed)
  queries = []
  for n in rng.integers(len(passages), size=size):
    words = passages[n].text.split()
    chosen = rng.integers(len(words), size=8) if words else []
    queries.append(' '.join(words[i] for i in chosen))
  return queries


def search(passages: Sequence[types.Passage], *, repeats: int) -> str:
  """Returns a table of queries per second, which this process answers."""
  queries = random_queries(passages, _BATCH, seed=1)
  ours = bm25.Bm25Index(passages)
  peer = bm25s.BM25(k1=0.9, b=0.4, backend='numpy')
  texts = [bm25.words_of(f'{p.title}\n{p.text}') for p in passages]
  peer.index(texts, show_progress=False)

  def ask_peer() -> tuple:
    # Our search splits queries into words, so both times include the splitting.
    words = [list(dict.fromkeys(bm25.words_of(query))) for query in queries]
    return peer.retrieve(
      words, k=_TOPK, show_progress=False, backend_selection='numpy'
    )

  scores = [[p.score for p in found] for found in ours.search(queries, _TOPK)]
  np.testing.assert_allclose(scores, ask_peer()[1], rtol=1e-5)
  cases = {
    'ours': measure.Case(lambda: ours.search(queries, _TOPK)),
    'bm25s': measure.Case(ask_peer),
  }
  seconds = measure.interleave(cases, repeats=repeats)
  rows = [
    (name, f'{_BATCH / np.median(x):.0f}', measure.milliseconds(x))
    for name, x in seconds.items()
  ]
  header = ('search', 'queries/s', f'ms per {_BATCH}')
  return '\n'.join(
    (
      measure.table(header, rows),
      measure.comparison(
        seconds, 'bm25s', 'ours', f'at least {_GOALS["search"]}'
      ),
      measure.verdict(seconds),
    )
  )


@contextlib.contextmanager
def served(folder: pathlib.Path, *flags: str) -> Iterator[tuple[str, int]]:
  """Serves an index as a process; yields its URL and process id."""
  words = [sys.executable, '-m', 'stppo_jax', 'serve', f'--index={folder}']
  with subprocess.Popen(
    [*words, *flags], stdout=subprocess.PIPE, text=True
  ) as process:
    assert process.stdout is not None
    try:
      yield process.stdout.readline().strip(), process.pid
    finally:
      process.send_signal(signal.SIGTERM)


def write_index(
  folder: pathlib.Path, passages: Sequence[types.Passage]
) -> None:
  """Builds an index in this process."""
  made = index_folder.IndexFolder.create(folder, passages)
  made.add_part('bm25', {}, bm25.Bm25Index(passages).save)


def retriever(url: str, **options) -> client.HttpRetriever:
  """Returns a client that sends each query in a request of its own."""
  return client.HttpRetriever(
    url,
    dialect=dialects.DIALECTS['search_r1'],
    topk=_TOPK,
    timeout=30.0,
    retries=12,
    ready_timeout=30.0,
    max_failure_rate=0.5,
    max_queries_per_request=1,
    **options,
  )


async def _ask(url: str, queries: Sequence[str], *, clients: int) -> np.ndarray:
  """Returns the seconds of each query; `clients` ask at the same time."""
  # Each client has its own connections, and sends one query after the other.
  asking = [retriever(url) for _ in range(clients)]
  seconds = []

  async def ask(one: client.HttpRetriever, mine: Sequence[str]) -> None:
    for query in mine:
      begin = time.perf_counter()
      await one.retrieve(query)
      seconds.append(time.perf_counter() - begin)

  await asyncio.gather(
    *(ask(one, queries[i::clients]) for i, one in enumerate(asking))
  )
  await asyncio.gather(*(one.close() for one in asking))
  return np.array(seconds)


def http(
  folder: pathlib.Path, queries: Sequence[str], *, workers: int, repeats: int
) -> str:
  """Returns the lines about the throughput of a server."""
  rates, latencies = [], []
  with served(folder, '--port=0', f'--workers={workers}') as (url, pid):
    asyncio.run(_ask(url, queries[:_CLIENTS], clients=_CLIENTS))
    server, clients = _cpu_seconds(pid), time.process_time()
    for _ in range(repeats):
      begin = time.perf_counter()
      latencies.append(asyncio.run(_ask(url, queries, clients=_CLIENTS)))
      rates.append(len(queries) / (time.perf_counter() - begin))
    per_query = 1e3 / (repeats * len(queries))
    server = per_query * (_cpu_seconds(pid) - server)
    clients = per_query * (time.process_time() - clients)
  low, middle, high = np.quantile(rates, (0, 0.5, 1))
  p50, p99 = 1e3 * np.quantile(np.concatenate(latencies), (0.5, 0.99))
  return (
    f'http: {middle:.0f} ({low:.0f}-{high:.0f}) single queries/s with '
    f'{_CLIENTS} clients and {workers} workers (goal {_GOALS["http"]:.0f}); '
    f'p50 {p50:.0f} ms, p99 {p99:.0f} ms; CPU time of a query: {server:.2f} ms '
    f'in the server, {clients:.2f} ms in the client'
  )


def _cpu_seconds(pid: int) -> float:
  """Returns the CPU time of a process and of its running children."""
  place = pathlib.Path('/proc') / str(pid)
  children = (place / 'task' / str(pid) / 'children').read_text('utf-8')
  # The fields after the name of the process, which may contain spaces and is in
  # brackets.
  fields = (place / 'stat').read_text('utf-8').rpartition(')')[2].split()
  ticks = int(fields[11]) + int(fields[12])  # user time and system time
  own = ticks / os.sysconf('SC_CLK_TCK')
  return own + sum(_cpu_seconds(int(child)) for child in children.split())


def index(folder: pathlib.Path, *, size: int) -> str:
  """Returns the lines about building and opening a large index."""
  passages = random_passages(size, seed=2)
  path = folder / 'large.jsonl'
  with open(path, 'w', encoding='utf-8') as file:
    for p in passages:
      fields = {'id': p.id, 'title': p.title, 'text': p.text}
      file.write(json.dumps(fields) + '\n')
  words = [sys.executable, '-m', 'stppo_jax', 'index', f'--corpus={path}']
  begin = time.perf_counter()
  subprocess.run(
    [*words, f'--out={folder / "large"}'], check=True, capture_output=True
  )
  built = time.perf_counter() - begin
  query = random_queries(passages, 1, seed=3)
  begin = time.perf_counter()
  opened = index_folder.IndexFolder(folder / 'large')
  mapped = bm25.Bm25Index.load(opened.path / 'bm25', opened.passages)
  (found,) = mapped.search(query, 1)
  ready = time.perf_counter() - begin
  assert passages_lib.document_of(found[0])['contents']
  return (
    f'index: {size} passages in {built:.1f} s (goal {_GOALS["index"]:.0f}), '
    f'open and first answer in {ready:.2f} s (goal {_GOALS["open"]:.0f})'
  )


def outage(folder: pathlib.Path, queries: Sequence[str]) -> str:
  """Returns the line about queries to a server that is killed and restarted."""
  before = threading.active_count(), _sockets()
  answered, latencies = asyncio.run(_in_outage(folder, queries))
  after = threading.active_count(), _sockets()
  assert after == before, f'threads, sockets: {before} before, {after} after'
  p50, p99 = np.quantile(latencies, (0.5, 0.99))
  return (
    f'outage: {answered} of {len(queries)} answered in an outage of '
    f'{_OUTAGE:g} s; p50 '
    f'{p50:.2f} s, p99 {p99:.2f} s; no thread and no socket left over'
  )


async def _in_outage(
  folder: pathlib.Path, queries: Sequence[str]
) -> tuple[int, list[float]]:
  latencies: list[float] = []

  async def ask(one: client.HttpRetriever, query: str) -> bool:
    begin = time.perf_counter()
    found = await one.retrieve(query)
    latencies.append(time.perf_counter() - begin)
    return bool(found)

  with contextlib.ExitStack() as stack:
    url, pid = stack.enter_context(served(folder, '--port=0'))
    port = url.rpartition(':')[2]
    one = retriever(url)
    asking = [asyncio.create_task(ask(one, query)) for query in queries]
    while len(latencies) < len(queries) // 10:
      await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    stack.close()
    await asyncio.sleep(_OUTAGE)
    stack.enter_context(served(folder, f'--port={port}'))
    answered = await asyncio.gather(*asking)
    await one.close()
  return sum(answered), latencies


def _sockets() -> int:
  """Returns the number of open sockets of this process."""
  count = 0
  for path in pathlib.Path('/proc/self/fd').glob('*'):
    with contextlib.suppress(OSError):
      count += os.readlink(path).startswith('socket:')
  return count


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints what was measured, and on which machine."""
  parser = measure.parser(
    'retrieval',
    passages=16_223,  # random passages, if there is no --corpus
    large=_LARGE,  # passages of the part `index`
    queries=2000,  # queries of the part `http`
    workers=2,  # workers of the server in the part `http`
    repeats=measure.MIN_REPEATS,
  )
  parser.add_argument('--only', nargs='+', choices=PARTS, default=PARTS)
  parser.add_argument('--corpus', default='', help='JSONL file of passages')
  flags = measure.start(parser, arguments, bm25s=bm25s.__version__)
  passages = (
    passages_lib.read_corpus(flags.corpus)
    if flags.corpus
    else random_passages(flags.passages, seed=0)
  )
  print(f'BM25 over {len(passages)} passages, the best {_TOPK} of each query\n')
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    if 'search' in flags.only:
      print(search(passages, repeats=flags.repeats), flush=True)
    if {'http', 'outage'} & {*flags.only}:
      write_index(folder / 'index', passages)
    if 'http' in flags.only:
      queries = random_queries(passages, flags.queries, seed=4)
      line = http(
        folder / 'index', queries, workers=flags.workers, repeats=flags.repeats
      )
      print(line, flush=True)
    if 'index' in flags.only:
      print(index(folder, size=flags.large), flush=True)
    if 'outage' in flags.only:
      queries = random_queries(passages, _ASKED_IN_OUTAGE, seed=5)
      print(outage(folder / 'index', queries), flush=True)


if __name__ == '__main__':
  main()
