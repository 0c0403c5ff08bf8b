"""Serve a corpus, or the synthetic encyclopedia, over HTTP.

python -m stppo_jax serve --index=DIR [--corpus=FILE.jsonl] [--workers=N]
python -m stppo_jax serve --index=DIR --backend=dense|faiss|hybrid
    --encoder=MODEL [--faiss=FILE] [--query_prefix=TEXT]
python -m stppo_jax serve --corpus=FILE.jsonl
python -m stppo_jax serve --synthetic_seed=N [--entities_per_type=N]
    [--name_pieces=N] [--distractors=N]

  --index=DIR            the folder that `index` wrote, or its address in a
                         bucket, gs://BUCKET/INDEX
  --corpus=FILE.jsonl    passages, one per line: {"id", "contents"} or {"pid",
                         "title", "text"}; with --index, the corpus from which
                         it must have been made
  --workers=N            the number of processes that answer, which share the
                         memory of the index
  --backend=NAME         bm25, the default; dense, for vectors that `index` has
                         made; faiss, for those in a file of FAISS; or hybrid,
                         which joins BM25 with one of them
  --encoder=MODEL        the Hugging Face directory of the vectors' encoder, or
                         its address
  --faiss=FILE           an index of FAISS over the passages, in their order; in
                         a bucket, a file of the folder of --index
  --query_prefix=TEXT    what the encoder expects in front of a query; with
                         --faiss
  --synthetic_seed=N     data.synthetic_wiki.seed in the run's config
  --entities_per_type=N  data.synthetic_wiki.entities_per_type, likewise
  --name_pieces=N        data.synthetic_wiki.name_pieces, likewise
  --distractors=N        data.synthetic_wiki.distractors, likewise
  --dialect=NAME         the only dialect that is answered, see
                         docs/retrieval.md; by default all are
  --host=ADDRESS         127.0.0.1 by default; another address than loopback
                         needs a bearer token in STPPO_RETRIEVAL_TOKEN
  --port=PORT            8000 by default; 0 is a free one

The server prints its URL when it is ready. At SIGINT or SIGTERM it finishes the
requests in flight and ends.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags

from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.configs import base
from stppo_jax.http import server as http_server
from stppo_jax.http import workers
from stppo_jax.retrieval import dialects
from stppo_jax.retrieval.indexes import backends
from stppo_jax.tools import serving

_TEXTS = 'index', 'corpus', 'encoder', 'faiss', 'query_prefix'


def main(argv: Sequence[str]) -> int:
  """Runs the server; returns the exit code."""
  flags = parse(argv)
  try:
    with exits.as_misconfigured():
      return serving.serve(flags, argv)
  except workers.WorkerFailed as failed:
    return failed.exit_code


def parse(argv: Sequence[str]) -> absl_flags.FlagValues:
  """Returns the flags of a command line.

  Raises:
    Misconfigured: if there are errors; the message has a line for each.
  """
  # A run has the same defaults, so server and run make equal worlds.
  config: Any = base.get_config()
  world = config.data.synthetic_wiki
  flags = command_line.flags(
    **dict.fromkeys(_TEXTS, ''),
    backend=command_line.one_of(backends.BACKENDS, 'bm25'),
    dialect=command_line.one_of(['', *dialects.DIALECTS], ''),
    synthetic_seed=command_line.integer(lower_bound=0),
    **{
      name: command_line.integer(world[name], lower_bound=least)
      for name, least in serving.WORLD_OPTIONS.items()
    },
    host=http_server.LOOPBACK,
    port=command_line.integer(8000, lower_bound=0, upper_bound=65535),
    workers=command_line.integer(1, lower_bound=1),
    # Only for a worker process: the file descriptor of a bound socket.
    socket=command_line.integer(),
  )
  command_line.refuse(command_line.parse(flags, argv).errors)
  command_line.refuse(list(serving.problems(flags)))
  return flags
