"""Build the index of a corpus, once, for `serve`.

python -m stppo_jax index --corpus=FILE.jsonl --out=DIR [--k1=K1] [--b=B]
python -m stppo_jax index --backend=dense --corpus=FILE.jsonl --out=DIR
    --encoder=MODEL [--query_prefix=TEXT] [--passage_prefix=TEXT]
    [--dtype=float32|bfloat16]

  --corpus=FILE.jsonl    passages, one per line: {"id", "contents"} or {"pid",
                         "title", "text"}
  --out=DIR              the folder of the index, with a copy of the passages
  --backend=NAME         bm25, the default, or dense
  --k1=K1, --b=B         parameters of BM25, 0.9 and 0.4 by default
  --encoder=MODEL        the Hugging Face directory of an encoder such as E5
  --query_prefix=TEXT    what the encoder expects in front of a query
  --passage_prefix=TEXT  what it expects in front of a passage
  --dtype=NAME           the dtype of the stored vectors, float32 by default

`serve --index=DIR` opens it at once, whatever its size. A folder can have both
kinds. What it has already is not built again.
"""

import argparse
from collections.abc import Sequence
import sys

from stppo_jax import exits
from stppo_jax.commands.flags import usage
from stppo_jax.data import passages as passages_lib
from stppo_jax.retrieval.indexes import backends
from stppo_jax.retrieval.indexes import index_folder


def main(argv: Sequence[str]) -> int:
  """Builds the index; returns the exit code."""
  try:
    flags = _parser().parse_args(argv)
    if flags.k1 < 0 or not 0 <= flags.b <= 1:
      raise usage.UsageError(
        f'--k1={flags.k1:g} --b={flags.b:g}: k1 must be 0 or greater, and b '
        'from 0 to 1'
      )
    if (flags.backend == 'dense') != bool(flags.encoder):
      raise usage.UsageError('--backend=dense and --encoder belong together')
    _build(flags)
  except (usage.UsageError, ValueError, OSError) as error:
    print(f'index: {" ".join(str(error).split())}', file=sys.stderr)
    return exits.USAGE
  return 0


def _build(flags: argparse.Namespace) -> None:
  passages = passages_lib.read_corpus(flags.corpus)
  folder = index_folder.IndexFolder.create(flags.out, passages)
  if flags.backend == 'bm25':
    built = backends.add_bm25(folder, k1=flags.k1, b=flags.b)
  else:
    options = backends.DenseOptions(
      flags.query_prefix, flags.passage_prefix, flags.dtype
    )
    built = backends.add_dense(folder, flags.encoder, options)
  print(
    f'{folder.path}: {len(passages)} passages, {flags.backend} '
    f'{"built" if built else "was there already"}'
  )


def _parser() -> argparse.ArgumentParser:
  parser = usage.Parser('index')
  parser.add_argument('--corpus', required=True)
  parser.add_argument('--out', required=True)
  parser.add_argument('--backend', choices=['bm25', 'dense'], default='bm25')
  parser.add_argument('--k1', type=float, default=0.9)
  parser.add_argument('--b', type=float, default=0.4)
  parser.add_argument('--encoder', default='')
  parser.add_argument('--query_prefix', default='')
  parser.add_argument('--passage_prefix', default='')
  parser.add_argument(
    '--dtype', choices=['float32', 'bfloat16'], default='float32'
  )
  return parser
