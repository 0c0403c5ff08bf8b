"""Build the index of a corpus, once, for `serve`.

python -m stppo_jax index --corpus=FILE.jsonl --out=DIR [--k1=K1] [--b=B]

  --corpus=FILE.jsonl  passages, one per line: {"id", "contents"} or {"pid",
                       "title", "text"}
  --out=DIR            the folder of the index, with a copy of the passages
  --k1=K1, --b=B       parameters of BM25, 0.9 and 0.4 by default

`serve --index=DIR` opens it at once, whatever its size. If DIR has the same
index already, nothing is done.
"""

import argparse
from collections.abc import Sequence
import sys

from stppo_jax.retrieval import bm25
from stppo_jax.retrieval import corpus
from stppo_jax.retrieval import index_folder


class _UsageError(Exception):
  """A flag is wrong; the message is one line."""


class _Parser(argparse.ArgumentParser):
  def error(self, message: str):
    raise _UsageError(message)


def main(argv: Sequence[str]) -> int:
  """Builds the index; returns the exit code."""
  try:
    flags = _parser().parse_args(argv)
    if flags.k1 < 0 or not 0 <= flags.b <= 1:
      raise _UsageError(
        f'--k1={flags.k1:g} --b={flags.b:g}: k1 must be 0 or greater, and b '
        'from 0 to 1'
      )
    _build(flags)
  except (_UsageError, ValueError, OSError) as error:
    print(f'index: {" ".join(str(error).split())}', file=sys.stderr)
    return 2
  return 0


def _build(flags: argparse.Namespace) -> None:
  passages = corpus.read_corpus(flags.corpus)
  folder = index_folder.IndexFolder.create(flags.out, passages)
  built = folder.add_part(
    'bm25',
    {'k1': flags.k1, 'b': flags.b},
    lambda path: bm25.Bm25Index(passages, k1=flags.k1, b=flags.b).save(path),
  )
  print(
    f'{folder.path}: {len(passages)} passages, bm25 '
    f'{"built" if built else "was there already"}'
  )


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog='python -m stppo_jax index',
    description='Build the index of a corpus.',
    allow_abbrev=False,
  )
  parser.add_argument('--corpus', required=True, help='JSONL file of passages')
  parser.add_argument('--out', required=True, help='folder of the index')
  parser.add_argument('--k1', type=float, default=0.9, help='of BM25')
  parser.add_argument('--b', type=float, default=0.4, help='of BM25')
  return parser
