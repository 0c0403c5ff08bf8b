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

`serve --index=DIR` opens the index at once, whatever its size. A folder can
hold a bm25 index and a dense index. An index that the folder already holds is
not built again.
"""

from collections.abc import Sequence
import functools
import os
import sys

from stppo_jax import exits
from stppo_jax.commands.flags import command_line
from stppo_jax.data import passages as passages_lib
from stppo_jax.retrieval.indexes import backends
from stppo_jax.retrieval.indexes import index_folder

_TEXTS = 'corpus', 'out', 'encoder', 'query_prefix', 'passage_prefix'


def main(argv: Sequence[str]) -> int:
  """Builds the index; returns the exit code."""
  flags = command_line.flags(
    **dict.fromkeys(_TEXTS, ''),
    backend=command_line.one_of(('bm25', 'dense'), 'bm25'),
    dtype=command_line.one_of(('float32', 'bfloat16'), 'float32'),
    k1=command_line.number(0.9, lower_bound=0),
    b=command_line.number(0.4, lower_bound=0.0, upper_bound=1.0),
  )
  errors = command_line.parse(flags, argv, required=('corpus', 'out')).errors
  # The bounds of absl let k1 be infinite, but then every score would be 0.
  if flags.k1 == float('inf'):
    errors.append('--k1=inf: must be finite')
  if (flags.backend == 'dense') != bool(flags.encoder):
    errors.append('--backend=dense and --encoder: give both, or neither')
  elif flags.encoder and not os.path.isfile(f'{flags.encoder}/config.json'):
    errors.append(
      f'--encoder={flags.encoder}: no encoder: config.json is missing'
    )
  command_line.refuse(errors)
  with exits.as_misconfigured():
    with exits.as_misconfigured(flags.corpus):
      passages = passages_lib.read_corpus(flags.corpus)
    line = f'{flags.out}: another process builds an index there; waiting for it'
    say = functools.partial(print, line, file=sys.stderr, flush=True)
    # If another process was building this index, this process waits here, finds
    # the index, and builds nothing.
    with index_folder.building(flags.out, waits=say):
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
  return 0
